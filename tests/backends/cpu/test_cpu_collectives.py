"""Collectives in shared memory against their definition, in `backends/exchanges.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cg.backends.base import Port
from cg.backends.cpu.communicator import CpuCommunicator
from cg.backends.cpu.queues.collectives import SPLIT_BYTES
from cg.backends.cpu.queues.local_sender import LocalSender
from cg.backends.dtypes import TORCH_DTYPES
from cg.backends.errors import BindError, TransportError
from cg.backends.exchanges import outcomes
from cg.ir.attributes import ReduceOp
from cg.ir.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    ReduceScatter,
)
from cg.ir.ops.module import Channel
from cg.ir.types import DType, ObjectType, Place, TensorType, UnitType, ValueType

from .world import ThreadWorld, run_communicators, wait

GROUP = (2, 0, 1)
CHANNEL = Channel(0, GROUP, collective=True)
PLACE = Place(GROUP)


def inputs(type_: TensorType, count: int = 3) -> list[Tensor]:
    """One tensor for each rank of the group; sums depend on the order of addition."""
    generator = torch.Generator().manual_seed(count)
    values = [torch.randn(type_.shape, generator=generator) * 10**i for i in range(count)]
    return [value.to(TORCH_DTYPES[type_.dtype]) for value in values]


def run_collective(
    op: Collective,
    values: Sequence[Any],
    operand: Callable[[int], ValueType | None],
    result: ValueType,
    times: int = 3,
) -> list[Any]:
    """The results of each rank of the group, in group order; the same every time."""
    group = op.group.ranks
    channel = replace(CHANNEL, ranks=group)

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank not in group:
            return None
        index = group.index(world.rank)
        port = communicator.collective_port(op, channel, operand(world.rank), result)
        seen: list[Any] = []
        for _ in range(times):
            port.start(values[index])
            wait(port)
            seen.append(port.take())
            port.release()
        for value in seen[1:]:
            assert value is None or isinstance(value, str) or torch.equal(value, seen[0])
        return seen[0]

    results = run_communicators(4, [channel], body)
    return [results[rank] for rank in group]


ORDERED = [DType.F32, DType.F64, DType.BF16, DType.I64]
CASES = [(dtype, op) for dtype in ORDERED for op in ReduceOp] + [(DType.C64, ReduceOp.AVG)]


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=str)
def test_all_reduce(dtype: DType, op: ReduceOp) -> None:
    type_ = TensorType(dtype, (4, 5))
    values = inputs(type_)
    collective = AllReduce(group=PLACE, op=op)
    got = run_collective(collective, values, lambda _: type_, type_)
    for result, expected in zip(got, outcomes(collective.exchange, values), strict=True):
        assert result.dtype is expected.dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("numel", [SPLIT_BYTES // 4 + 1, SPLIT_BYTES // 4 + 3, SPLIT_BYTES])
def test_large_all_reduce_gives_the_same_bits(numel: int) -> None:
    type_ = TensorType(DType.F32, (numel,))
    values = inputs(type_)
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        got = run_collective(AllReduce(group=PLACE, op=op), values, lambda _: type_, type_)
        expected = outcomes(AllReduce(group=PLACE, op=op).exchange, values)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("op", "shape"), [(AllGather, (2, 3)), (ReduceScatter, (6, 3)), (AllToAll, (3, 6))]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_collectives_along_a_dimension(op: Any, shape: tuple[int, ...], dim: int) -> None:
    type_, collective = TensorType(DType.F32, shape), op(group=PLACE, dim=dim)
    values = inputs(type_)
    expected = outcomes(collective.exchange, values)
    result = TensorType(DType.F32, tuple(expected[0].shape))
    got = run_collective(collective, values, lambda _: type_, result)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("numel", [0, 1, 100_000])
def test_broadcast_of_a_tensor(numel: int) -> None:
    type_ = TensorType(DType.F64, (numel,))
    (value,) = inputs(type_, 1)
    op = Broadcast(group=PLACE, root=0)
    values = [None, value, None]
    got = run_collective(op, values, lambda r: type_ if r == 0 else None, type_)
    assert all(torch.equal(result, value) for result in got)
    assert all(result.data_ptr() != value.data_ptr() for result in got if numel)


@pytest.mark.parametrize("length", [5, 1_000_000])
def test_broadcast_of_an_object(length: int) -> None:
    object_ = ObjectType()
    op = Broadcast(group=PLACE, root=1)
    values = [None, None, "x" * length]
    got = run_collective(op, values, lambda r: object_ if r == 1 else None, object_)
    assert got == ["x" * length] * 3


def test_a_group_of_one() -> None:
    type_ = TensorType(DType.F32, (2,))
    op = AllReduce(group=Place.of(3))
    assert torch.equal(
        run_collective(op, [torch.ones(2)], lambda _: type_, type_)[0], torch.ones(2)
    )


def test_nobody_leaves_a_barrier_before_all_have_come() -> None:
    def body(communicator: CpuCommunicator, world: ThreadWorld) -> None:
        port = communicator.collective_port(Barrier(group=PLACE), CHANNEL, None, UnitType())
        for absent in range(3):
            if world.rank != absent:
                port.start(None)
                assert not any(port.poll() for _ in range(100))
            world.barrier()
            if world.rank == absent:
                port.start(None)
            wait(port)
            world.barrier()

    run_communicators(3, [CHANNEL], body)


def test_collectives_in_flight_together_keep_their_order() -> None:
    big = TensorType(DType.F32, (SPLIT_BYTES,))
    small = TensorType(DType.F32, (2,))

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> list[float]:
        ports: list[Port] = []
        for index in range(12):
            type_ = small if index % 2 else big
            op = AllReduce(group=PLACE)
            port = communicator.collective_port(op, CHANNEL, type_, type_)
            port.start(torch.full(type_.shape, float(index + world.rank)))
            ports.append(port)
        for port in reversed(ports):
            wait(port)
        return [port.take()[1].item() for port in ports]

    expected = [float(3 * index + 3) for index in range(12)]
    assert run_communicators(3, [CHANNEL], body) == [expected] * 3


@pytest.mark.parametrize(("numel", "messages"), [(2, 3), (SPLIT_BYTES, 1)])
def test_small_messages_do_not_wait_for_the_collective_before(numel: int, messages: int) -> None:
    """Rank 0 sends those of three collectives before the others begin; of large ones, the first."""
    type_ = TensorType(DType.F32, (numel,))

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> list[int]:
        op = AllReduce(group=PLACE)
        ports = [communicator.collective_port(op, CHANNEL, type_, type_) for _ in range(3)]
        (queue,) = communicator._senders[0].values()
        assert isinstance(queue, LocalSender)
        sent: list[int] = []
        for starts in (world.rank == 0, world.rank != 0):
            for index, port in enumerate(ports):
                if starts:
                    port.start(torch.full((numel,), float(index)))
            sent.append(sum(queue.sent))
            world.barrier()
        for index, port in enumerate(ports):
            wait(port)
            assert port.take().eq(3.0 * index).all()
        return sent

    assert run_communicators(3, [CHANNEL], body)[0][0] == messages


def test_reset_forgets_a_collective_that_did_not_end() -> None:
    type_ = TensorType(DType.F32, (2,))

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Tensor:
        op = AllReduce(group=PLACE)
        port = communicator.collective_port(op, CHANNEL, type_, type_)
        if world.rank:
            port.start(torch.full((2,), 100.0))
            port.poll()
        world.barrier()
        communicator.reset()
        world.barrier()
        port.start(torch.ones(2))
        wait(port)
        result = port.take()
        assert isinstance(result, Tensor)
        return result

    for result in run_communicators(3, [CHANNEL], body):
        assert torch.equal(result, torch.full((2,), 3.0))


def test_wrong_operands_are_refused() -> None:
    type_ = TensorType(DType.F32, (2,))

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> None:
        op = AllReduce(group=PLACE)
        with pytest.raises(BindError, match="`all_reduce` combines tensors, and its operand is ob"):
            communicator.collective_port(op, CHANNEL, ObjectType(), ObjectType())
        port = communicator.collective_port(op, CHANNEL, type_, type_)
        port.start(torch.zeros(3))
        wait(port)
        with pytest.raises(TransportError, match=r"f32\[2\] cannot carry f32\[3\]"):
            port.take()

    run_communicators(3, [CHANNEL], body)
