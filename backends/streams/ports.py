"""The ports of messages and collectives on streams: counts are fixed when they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...ir.attributes import Stream
from ...ir.types import TensorType
from ..device import DeviceQueue
from ..dtypes import TORCH_DTYPES
from ..errors import BindError
from ..poison import Poison
from .groups import Line
from .library import CommunicationError, Messenger


class _LibraryPort:
    """The common part of the ports; `handle` is the stream as the library takes it."""

    stream: Stream

    def __init__(self, stream: Stream, handle: Any, library: Messenger, line: Line) -> None:
        self.stream = stream
        self.landing: Tensor | None = None
        self.rehearses = False
        self._handle = handle
        self._library = library
        self._line = line

    def must_prepare(self, value: Any) -> bool:
        """True: `prepare` has work for every operand."""
        return True

    def fail(self, poison: Poison) -> NoReturn:
        """Raise the poison: it cannot travel."""
        raise poison

    def room(self) -> Tensor | None:
        """None: `prepare` takes no memory."""
        return None

    def poll(self) -> bool:
        """True: the host waits for nothing."""
        return True

    def release(self) -> None:
        """Keep nothing: the port has dropped its value."""

    def _failed(self, error: CommunicationError) -> CommunicationError:
        """The library's error, with the ranks that it concerns."""
        return CommunicationError(f"{self._line.group}: {error}")


class StreamSendPort(_LibraryPort):
    """Sends a tensor's bytes."""

    needs_release = False

    def __init__(
        self, handle: Any, library: Messenger, line: Line, type_: TensorType, stream: Stream
    ) -> None:
        super().__init__(stream, handle, library, line)
        self._nbytes = type_.nbytes
        self._held: Tensor | None = None

    def must_prepare(self, value: Tensor) -> bool:
        """True if the operand has to be copied to be contiguous."""
        return not value.is_contiguous()

    def prepare(self, value: Tensor) -> Tensor:
        """Make the operand contiguous, on the compute stream, and hold it."""
        self._held = value.contiguous()
        return self._held

    def start(self, value: Tensor) -> None:
        """Put the send on its stream."""
        if self._nbytes and not self.rehearses:
            line, at = self._line, value.data_ptr()
            try:
                with line as comm:
                    self._library.send(at, self._nbytes, line.peer, comm, self._handle)
            except CommunicationError as error:
                raise self._failed(error) from error

    def take(self) -> None:
        """A send makes no value."""


class StreamRecvPort(_LibraryPort):
    """Receives a tensor's bytes: into a slot of its channel, a given buffer, or memory of its own.

    Args:
        slot: the slot's tensor; None where the op has no slot.
        takes_buffer: whether the op's operand is the memory to receive into.
        handle_of: a stream as the library takes it.
    """

    def __init__(
        self,
        handle: Any,
        library: Messenger,
        line: Line,
        type_: TensorType,
        stream: Stream,
        slot: Tensor | None,
        takes_buffer: bool,
        device: torch.device,
        handle_of: Callable[[DeviceQueue], Any],
    ) -> None:
        super().__init__(stream, handle, library, line)
        self._handle_of = handle_of
        self._nbytes = type_.nbytes
        self._slot = slot
        self._takes_buffer = takes_buffer
        self._make = maker(type_, device)
        self._value: Tensor | None = None
        self.needs_release = slot is not None

    def put_on(self, queue: DeviceQueue) -> None:
        """Receive on a stream: in the tail of a program, the tail's is its compute stream."""
        self._handle = self._handle_of(queue)

    def must_prepare(self, value: Tensor | None) -> bool:
        """True without a slot, since `prepare` then takes memory."""
        return self._slot is None

    def room(self) -> Tensor | None:
        """New memory for the value; None if it has a slot, or a buffer."""
        return self._make() if self._slot is None and not self._takes_buffer else None

    def prepare(self, value: Tensor | None) -> Tensor:
        """The memory to receive into; the receive comes behind the last use of a buffer."""
        if not self._takes_buffer:
            return self._make() if self.landing is None else self.landing
        assert value is not None, "a receive into a buffer takes one"
        if not value.is_contiguous():
            raise BindError(
                f"a receive on {self._line.group} takes a buffer that is not contiguous: receive "
                "into memory of its own, and copy that"
            )
        return value

    def start(self, value: Tensor | None) -> None:
        """Put the receive on its stream."""
        into = self._slot if value is None else value
        assert into is not None, "without a slot, `prepare` takes memory"
        self._value = into
        if self._nbytes and not self.rehearses:
            line, at = self._line, into.data_ptr()
            try:
                with line as comm:
                    self._library.recv(at, self._nbytes, line.peer, comm, self._handle)
            except CommunicationError as error:
                raise self._failed(error) from error

    def take(self) -> Tensor | None:
        """The value, for work behind the receive."""
        value, self._value = self._value, None
        return value


class CollectivePort(_LibraryPort):
    """A collective. Its result is in memory of its own."""

    needs_release = False

    def __init__(
        self,
        handle: Any,
        library: Messenger,
        line: Line,
        stream: Stream,
        make: Callable[[], Tensor],
        shape_up: Callable[[Any, Tensor], Tensor | None],
        run: Callable[[int, int], None],
        shape_down: Callable[[Tensor], Any],
    ) -> None:
        super().__init__(stream, handle, library, line)
        self._make = make
        self._shape_up = shape_up
        self._run = run
        self._shape_down = shape_down
        self._operand: Tensor | None = None
        self._result: Tensor | None = None

    def room(self) -> Tensor:
        """New memory for the result."""
        return self._make()

    def prepare(self, value: Any) -> Any:
        """Lay the operand out, on the compute stream, and take memory for the result."""
        self._result = self._make() if self.landing is None else self.landing
        self._operand = self._shape_up(value, self._result)
        return value

    def start(self, value: Any) -> None:
        """Put the collective on its stream."""
        assert self._result is not None
        source = self._result if self._operand is None else self._operand
        if not self.rehearses:
            try:
                self._run(source.data_ptr(), self._result.data_ptr())
            except CommunicationError as error:
                raise self._failed(error) from error

    def take(self) -> Any:
        """The value; the compute stream puts its elements in order."""
        result, self._result = self._result, None
        assert result is not None
        return self._shape_down(result)


def maker(type_: TensorType, device: torch.device) -> Callable[[], Tensor]:
    """A function that takes memory for a tensor of a type."""
    dtype, shape = TORCH_DTYPES[type_.dtype], type_.shape
    return lambda: torch.empty(shape, dtype=dtype, device=device)
