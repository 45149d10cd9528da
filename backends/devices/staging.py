"""Ports that carry a device's tensors by a transport of the host: through pinned memory.

Copies between the device and its host are on a stream of their own, `Stream.COPY`. No op of a
program is on it: copies are part of messages. The host puts them there and goes on. A message of
the host begins when its copy has passed, and messages begin in the order of the program.
`Copies.move_on` sees to that whenever the host waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ...ir.attributes import Stream
from ...ir.types import TensorType
from ..base import Port
from ..device import Device, DeviceQueue, Event
from ..dtypes import TORCH_DTYPES
from ..poison import Poison
from ..program.instructions import Instruction

LOOKING_SECONDS = 30.0
"""Seconds after which nobody looks after messages any more: Ctrl-C has ended whoever did."""


class Copies:
    """The copies between a device and its host that the messages of one program need.

    Another thread may look after messages while the host is in a call that waits for its device:
    whoever does holds `looking`. The host holds it throughout an execution, but for such calls.

    Args:
        device: of this rank.

    Attributes:
        queue: the stream of copies.
        compute: the stream of the other work of a program.
        looking: held by the thread that looks after messages.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.looking = Lock()
        self.compute = device.stream(Stream.COMPUTE)
        self.queue = device.stream(Stream.COPY)
        self._pending: deque[tuple[Event | None, Callable[[], None]]] = deque()
        self._landings: dict[tuple[int, int | None, TensorType], Landing] = {}

    def begin(self, copied: Event | None, start: Callable[[], None]) -> None:
        """Start a message when its copy has passed, and all messages before it have been started.

        Args:
            copied: the event behind the copy; None if there is none to wait for.
        """
        self._pending.append((copied, start))
        self.move_on()

    def move_on(self) -> bool:
        """Start the messages whose copies have passed; True if none is left. Does not block."""
        pending = self._pending
        while pending:
            copied, start = pending[0]
            if copied is not None and not copied.query():
                return False
            pending.popleft()
            start()
        return True

    @contextmanager
    def looked_after(self) -> Iterator[None]:
        """Hold `looking` in a block with instructions that are put aside."""
        self.looking.acquire(timeout=LOOKING_SECONDS)
        try:
            yield
        finally:
            with suppress(RuntimeError):  # Ctrl-C may have come where it was not held
                self.looking.release()

    def aside(self, instruction: Instruction) -> Instruction:
        """An instruction that may wait for the device, and does nothing for messages of hosts."""
        looking = self.looking

        def run() -> bool:
            looking.release()
            try:
                return instruction()
            finally:
                looking.acquire(timeout=LOOKING_SECONDS)

        return run

    def forget(self) -> None:
        """Drop the messages that have not been started."""
        self._pending.clear()

    def landing(self, channel: int, slot: int | None, type_: TensorType) -> Landing:
        """The landing for messages of a type; each slot of a channel has its own."""
        key = channel, slot, type_
        if key not in self._landings:
            self._landings[key] = Landing(self, type_, slot is not None)
        return self._landings[key]


class Landing:
    """Brings messages to the device.

    Args:
        type_: of the messages.
        keeps: True to receive into one place, each message when the one before has been released.
            Otherwise each message gets memory of its own.

    Attributes:
        landed: the event behind the last copy.
    """

    def __init__(self, copies: Copies, type_: TensorType, keeps: bool) -> None:
        device = copies.device
        self._copies = copies
        self._host = _pinned(device, type_)
        self._memory = self._new() if keeps else None
        self._free = device.event()
        self.landed = device.event()

    def bring(self, value: Tensor) -> Tensor:
        """Copy a host's tensor to the device, for work that is put on the compute stream later."""
        copies = self._copies
        self._host.copy_(value)
        target = self._memory
        if target is None:
            # The compute stream may use new memory up to where it is now.
            target = self._new()
            self._free.record(copies.compute)
        copies.queue.wait_event(self._free)
        copies.device.copy(self._host, target, copies.queue)
        self.landed.record(copies.queue)
        copies.compute.wait_event(self.landed)
        return target

    def release(self) -> None:
        """Let the next message come: no further work on the compute stream uses this one."""
        if self._memory is not None:
            self._free.record(self._copies.compute)

    def _new(self) -> Tensor:
        return torch.empty_like(self._host, device=self._copies.device.torch_device)


class StagedPort:
    """A port of the host whose operand, or value, is a tensor on a device.

    It implements `Port`, which describes the methods.

    Args:
        inner: the host's port.
        copies: of the program.
        operand: the type of a tensor that is to be sent, if one is. The host's memory for it is
            taken at once: a driver gives out such memory only when its device has nothing to do.
        landing: where received tensors come to the device; None if none is received.
        producers: the streams that the operand may have been made on.
        changes: whether work that is put on the compute stream after `start` may change the
            operand.
    """

    def __init__(
        self,
        inner: Port,
        copies: Copies,
        operand: TensorType | None,
        landing: Landing | None = None,
        producers: Sequence[DeviceQueue] = (),
        changes: bool = False,
    ) -> None:
        self._inner = inner
        self._copies = copies
        self._landing = landing
        self._queue = copies.compute if changes else copies.queue
        self._produced = [(copies.device.event(), producer) for producer in producers]
        self._copied = copies.device.event()
        self._value: Any = None
        self._has_begun = True
        self._buffer = None if operand is None else _pinned(copies.device, operand)
        self.needs_release = True

    @property
    def landed(self) -> Event | None:
        """The event behind the copy of the last received tensor; None if none is received."""
        return None if self._landing is None else self._landing.landed

    def start(self, value: Any) -> None:
        if self._buffer is None:
            self._inner.start(value)
            return
        for event, producer in self._produced:
            event.record(producer)
            self._queue.wait_event(event)
        self._copies.device.copy(value, self._buffer, self._queue)
        self._copied.record(self._queue)
        self._value = value  # its memory is not to be used again before it has been read
        self._has_begun = False
        self._copies.begin(self._copied, self._send)

    def fail(self, poison: Poison) -> None:
        """Send an error in place of a tensor, in its turn."""
        if self._buffer is None:
            self._inner.fail(poison)
            return
        self._has_begun = False
        self._copies.begin(None, lambda: self._send_error(poison))

    def poll(self) -> bool:
        if not self._has_begun:
            self._copies.move_on()
        if not (self._has_begun and self._inner.poll()):
            return False
        # The host's memory is in use until the previous message has come to the device.
        return self._landing is None or self._landing.landed.query()

    def take(self) -> Any:
        value = self._inner.take()
        if not isinstance(value, Tensor):
            return value
        assert self._landing is not None, "a tensor is received where its type says so"
        return self._landing.bring(value)

    def release(self) -> None:
        if self._landing is not None:
            self._landing.release()
        self._inner.release()

    def _send(self) -> None:
        self._value = None
        self._has_begun = True
        self._inner.start(self._buffer)

    def _send_error(self, poison: Poison) -> None:
        self._has_begun = True
        self._inner.fail(poison)


def _pinned(device: Device, type_: TensorType) -> Tensor:
    like = torch.empty(type_.shape, dtype=TORCH_DTYPES[type_.dtype], device="meta")
    return device.host_buffer(like)
