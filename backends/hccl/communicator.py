"""The HCCL communicator: serves the channels between ranks with NPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from ...ir.attributes import Stream
from ...ir.ops import Collective, Recv, Send
from ...ir.ops.module import Channel
from ...ir.types import TensorType
from ..base import World
from ..errors import BindError
from ..per_world import PerWorld
from ..streams.collectives import Collectives
from ..streams.communicator import StreamCommunicator
from ..streams.library import Messenger
from ..streams.pool import Pool
from .batch import Batch
from .collectives import HcclCollectives, check_supported
from .library import HcclLibrary
from .pool import HcclPool
from .symbols import load


class HcclCommunicator(StreamCommunicator):
    """Serves the channels of a plan between ranks with NPUs; making one is collective.

    Raises:
        BindError: this version of HCCL has no function for an op.
    """

    collectives: ClassVar[type[Collectives]] = HcclCollectives

    def __init__(self, pool: Pool, channels: Sequence[Channel], rank: int) -> None:
        super().__init__(pool, channels, rank)
        self._batches: dict[int, Batch] = {}

    def reset(self) -> None:
        """Join the other ranks again, and forget batches that were begun."""
        for batch in self._batches.values():
            batch.forget()
        super().reset()

    def _check(self, op: Send | Recv | Collective) -> None:
        check_supported(op, self._library.symbols)

    @property
    def _library(self) -> HcclLibrary:
        library = self._pool.library
        assert isinstance(library, HcclLibrary), "the pool was made with one"
        return library

    def _stream(self, op: Send | Recv | Collective, usual: Stream) -> tuple[Stream, Any]:
        if isinstance(op, Collective):
            return super()._stream(op, usual)
        if op.stream not in (None, Stream.MESSAGE):
            raise BindError(
                f"`{op.opcode}` {op.seq} of channel {op.chan} is on stream {op.stream.value}: HCCL "
                "does the messages of a rank one after the other, so they are all on stream "
                "message; let batch-messages and assign-streams put them there"
            )
        return super()._stream(op, Stream.MESSAGE)

    def _messenger(self, op: Send | Recv, type_: TensorType) -> Messenger:
        if op.batch is None:
            return self._library
        batch = self._batches.setdefault(op.batch, Batch(self._library))
        if type_.nbytes:  # what is empty is not sent
            batch.size += 1
        return batch


def connect(
    world: World, channels: Sequence[Channel], library: str | None = None
) -> HcclCommunicator:
    """HCCL's factory of communicators (`CommunicatorFactory`).

    Args:
        library: path of `libhccl.so`; see `symbols.load`. The first call in a process decides.

    Raises:
        TransportError: there is no HCCL on this machine, or not one that cg knows.
        BindError: a rank of the channels has no device, or would need too many communicators.
    """
    pool = _pools.of(world, partial(make_pool, world, library))
    return HcclCommunicator(pool, channels, world.rank)


def make_pool(world: World, library: str | None = None) -> HcclPool:
    """A pool for this process, with no communicators yet.

    Raises:
        TransportError: there is no HCCL on this machine, or not one that cg knows.
    """
    device = world.device
    if device is None:
        return HcclPool(world, None, None)
    return HcclPool(world, device, HcclLibrary(load(library), device, world.rank))


_pools: PerWorld[HcclPool] = PerWorld()
