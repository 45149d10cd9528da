"""Ports that copy tensors from the device to pinned memory of the host, and back, on a stream.

The pinned memory belongs to the bound program: one buffer for each slot of its plan. So copies can
be part of a device's graph. Memory on the device is taken in the order of the compute stream.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from ...ir.attributes import Stream
from ...ir.ops import CopyStart
from ...ir.types import TensorType, promised
from ..device import Device, DeviceQueue
from ..dtypes import TORCH_DTYPES
from ..poison import Poison
from ..program.value_copies import HostCopy
from .pinned_pieces import PinnedPieces


class PinnedBuffers:
    """The buffers of one bound program, by slot.

    Args:
        device: of this rank.
    """

    def __init__(self, device: Device) -> None:
        self._pieces = PinnedPieces(device)
        self._bytes: dict[int, Tensor] = {}

    def of(self, op: CopyStart) -> Tensor:
        """The memory for a copy to the host, in one dimension; copies of a slot share it."""
        type_ = promised(op.result.type)
        assert isinstance(type_, TensorType), "a copy is of a tensor"
        dtype = TORCH_DTYPES[type_.dtype]
        if op.slot is None or not type_.nbytes:
            return self._pieces.take(type_.nbytes).view(dtype)
        shared = self._bytes.get(op.slot)
        if shared is None:
            shared = self._bytes[op.slot] = self._pieces.take(type_.nbytes)
        return shared[: type_.nbytes].view(dtype)


class _CopyPort:
    """The common part: the copy on its stream."""

    needs_release = False

    def __init__(self, device: Device, stream: Stream, queue: DeviceQueue) -> None:
        self.stream = stream
        self.landing: Tensor | None = None
        self.rehearses = False
        self._device = device
        self._queue = queue
        self._value: Any = None

    def room(self) -> Tensor | None:
        """None: its value is used within the graph, or is the host's."""
        return None

    def fail(self, poison: Poison) -> NoReturn:
        """Raise the poison: what a copy copies, its rank has made."""
        raise poison

    def poll(self) -> bool:
        """True: the host waits for nothing."""
        return True

    def take(self) -> Any:
        """The copy, for work behind it."""
        value, self._value = self._value, None
        return value

    def release(self) -> None:
        """Keep nothing."""

    def _copy(self, source: Tensor, target: Tensor) -> None:
        if not self.rehearses and source.numel():
            self._device.copy(source, target, self._queue)


class OffloadPort(_CopyPort):
    """Copies a tensor to the host.

    Args:
        buffer: the pinned memory.
    """

    def __init__(self, device: Device, queue: DeviceQueue, buffer: Tensor) -> None:
        super().__init__(device, Stream.OFFLOAD, queue)
        self._buffer = buffer
        self._together: Tensor | None = None

    def must_prepare(self, value: Tensor) -> bool:
        """True if the elements lie apart, and are put together on the compute stream first."""
        return not HostCopy.of(value, self._buffer).is_dense

    def prepare(self, value: Tensor) -> tuple[HostCopy, Tensor]:
        """The copy's place, and its elements together."""
        return HostCopy.of(value, self._buffer), value.contiguous()

    def start(self, value: Any) -> None:
        """Put the copy on its stream."""
        if isinstance(value, tuple):
            copy, source = value
            self._together = source
        else:
            copy = HostCopy.of(value, self._buffer)
            source = copy.elements(value)
        self._copy(source, copy.source)
        self._value = copy

    def take(self) -> Any:
        """The copy; what was put together for it is no longer needed behind it."""
        self._together = None
        return super().take()


class SettlingPort(_CopyPort):
    """Copies a tensor to memory of the host that is given, and is its actor's.

    Python of the user may read that memory, so the host waits until the copy has ended.
    """

    def __init__(self, device: Device, queue: DeviceQueue) -> None:
        super().__init__(device, Stream.OFFLOAD, queue)
        self._ended = device.event()

    def must_prepare(self, value: tuple[Tensor, HostCopy]) -> bool:
        """False: state is dense."""
        return False

    def prepare(self, value: tuple[Tensor, HostCopy]) -> tuple[Tensor, HostCopy]:
        """Nothing: both memories are there."""
        return value

    def start(self, value: tuple[Tensor, HostCopy]) -> None:
        """Put the copy on its stream."""
        source, there = value
        self._copy(there.elements(source), there.source)
        self._ended.record(self._queue)
        self._value = there

    def poll(self) -> bool:
        """True once the copy has ended."""
        return self._ended.query()


class FetchPort(_CopyPort):
    """Copies a tensor back to the device."""

    def __init__(self, device: Device, queue: DeviceQueue) -> None:
        super().__init__(device, Stream.FETCH, queue)

    def must_prepare(self, value: HostCopy) -> bool:
        """True: it takes memory."""
        return True

    def prepare(self, value: HostCopy) -> tuple[HostCopy, Tensor]:
        """Take memory for the tensor, in the order of the compute stream."""
        return value, value.room(self._device.torch_device)

    def start(self, value: tuple[HostCopy, Tensor]) -> None:
        """Put the copy on its stream."""
        copy, room = value
        self._copy(copy.source, copy.elements(room))
        self._value = room
