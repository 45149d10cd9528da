"""The NCCL communicator: serves the channels between ranks with GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from ...ir.attributes import ReduceOp
from ...ir.ops.module import Channel
from ...ir.types import DType
from ..base import World
from ..per_world import PerWorld
from ..streams.collectives import Collectives, Reduction, as_logic, does_not_reduce
from ..streams.communicator import StreamCommunicator
from .codes import CODES, REDUCTIONS
from .library import load
from .pool import NcclPool


class NcclCollectives(Collectives):
    """A collective in calls of NCCL, which averages floating point alone; sums are divided."""

    codes: ClassVar[Mapping[DType, int]] = CODES
    numbers: ClassVar[Mapping[ReduceOp, int]] = REDUCTIONS

    def reduction(self, op: ReduceOp, dtype: DType) -> Reduction:
        """The reduction of elements of a type."""
        if dtype not in CODES:
            raise does_not_reduce("NCCL", dtype)
        if dtype is DType.BOOL:
            return Reduction(as_logic(op), dtype)
        if op is ReduceOp.AVG and dtype.value[0] in "iu":
            return Reduction(ReduceOp.SUM, dtype, divides=True)
        return Reduction(op, dtype)


class NcclCommunicator(StreamCommunicator):
    """Serves the channels of a plan between ranks with GPUs; making one is collective."""

    collectives: ClassVar[type[Collectives]] = NcclCollectives


def connect(
    world: World, channels: Sequence[Channel], nonblocking: bool = False
) -> NcclCommunicator:
    """NCCL's factory of communicators (`CommunicatorFactory`).

    Args:
        nonblocking: see `make_pool`; the first call in a process decides.

    Raises:
        TransportError: nccl4py is not installed.
        BindError: a rank of the channels has no device, or would need too many communicators.
    """
    pool = _pools.of(world, partial(make_pool, world, nonblocking=nonblocking))
    return NcclCommunicator(pool, channels, world.rank)


def make_pool(world: World, nonblocking: bool = False) -> NcclPool:
    """A pool for this process, with no communicators yet.

    Args:
        nonblocking: whether NCCL's calls return before they are done; the same on all ranks.

    Raises:
        TransportError: nccl4py is not installed.
    """
    device = world.device
    return NcclPool(world, device, None if device is None else load(nonblocking))


_pools: PerWorld[NcclPool] = PerWorld()
