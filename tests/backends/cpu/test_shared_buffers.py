"""Large messages: lent to the receiver, never overwritten while anybody uses them."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from cg.backends.cpu.communicator import RING_BYTES, CpuCommunicator
from cg.backends.cpu.queues.shared_buffers import LIMIT
from cg.ir.attributes import ReduceOp
from cg.ir.ops import AllReduce, Broadcast, Collective, Recv, Send
from cg.ir.ops.module import Channel
from cg.ir.types import DType, ObjectType, Place, TensorType, UnitType

from .world import ThreadWorld, run_communicators, wait

EDGE = Channel(0, (0, 1))
OBJECT = ObjectType(Place((0,)))
LONG = TensorType(DType.F32, (RING_BYTES,))


def exchange(type_: Any, values: list[Any], use: Any) -> Any:
    """Send all values from rank 0 to rank 1, one after the other; what `use` gives of them."""

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        results = []
        if world.rank == 0:
            send = communicator.send_port(Send(chan=0, peer=1), EDGE, type_)
            for value in values:
                send.start(value)
                wait(send)
                world.barrier()
            return communicator._senders[0][1,].buffers.to_lend  # type: ignore[union-attr]
        recv = communicator.recv_port(Recv(chan=0, peer=0), EDGE, type_)
        for _ in values:
            recv.start(None)
            wait(recv)
            results.append(use(recv.take()))
            world.barrier()
        return results

    return run_communicators(2, [EDGE], body)


def test_a_segment_is_used_again_once_nobody_uses_its_value() -> None:
    values = [np.full(100_000, i) for i in range(20)]
    buffers, sums = exchange(OBJECT, values, lambda array: int(array.sum()))
    assert sums == [100_000 * i for i in range(20)]
    assert len(buffers) == 1
    assert buffers[0].lent == 20


def test_what_is_kept_is_not_overwritten_and_hinders_nobody() -> None:
    values = [np.full(100_000, i) for i in range(3 * LIMIT)]
    buffers, kept = exchange(OBJECT, values, lambda array: array)
    assert len(buffers) == LIMIT  # the others were copied
    assert [buffer.is_free for buffer in buffers] == [False] * LIMIT
    for i, array in enumerate(kept):
        assert (array == i).all()
        array[:] = -1  # the receiver's own
    assert (values[1] == 1).all()
    kept.clear()
    del array
    gc.collect()
    assert [buffer.is_free for buffer in buffers] == [True] * LIMIT


def test_a_part_of_a_value_keeps_all_of_it() -> None:
    values = [{"x": torch.full((50_000,), float(i)), "y": np.arange(30_000)} for i in range(2)]
    buffers, parts = exchange(OBJECT, values, lambda value: value["x"].view(100, 500)[3])
    assert [part.unique().item() for part in parts] == [0.0, 1.0]
    assert sum(not buffer.is_free for buffer in buffers) == 2


def test_tensors_without_a_slot_are_lent_too() -> None:
    values = [torch.full((RING_BYTES,), float(i)) for i in range(6)]
    buffers, kept = exchange(LONG, values, lambda tensor: tensor)
    assert [tensor[-1].item() for tensor in kept] == list(map(float, range(6)))
    assert [buffer.lent for buffer in buffers] == [1] * LIMIT


@pytest.mark.parametrize("sizes", [[20_000, 9_000_000, 20_000] * 5, [3_000_000, 30_000] * 9])
def test_sizes_may_change(sizes: list[int]) -> None:
    values = [(bytes(size), np.full(size, 7, dtype=np.uint8)) for size in sizes]
    held: list[Any] = []

    def use(value: Any) -> tuple[int, int]:
        held[:] = [*held, value][-3:]
        return len(value[0]), int(value[1].astype(np.int64).sum())

    buffers, found = exchange(OBJECT, values, use)
    assert found == [(size, 7 * size) for size in sizes]
    assert len(buffers) <= LIMIT


@pytest.mark.parametrize("is_donated", [False, True])
def test_collectives_of_several_sizes_use_the_same_segments(is_donated: bool) -> None:
    """What is only held while it is combined may lie in a segment that is much too large."""
    group, pair = Channel(0, (0, 1), collective=True), Place((0, 1))
    types = [TensorType(DType.F32, (count,)) for count in (1 << 20, 20_000, 1 << 18)]

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        op = AllReduce(op=ReduceOp.SUM, group=pair, donated=is_donated or None)
        ports = [communicator.collective_port(op, group, type_, type_) for type_ in types]
        (sender,) = communicator._senders[0].values()
        made_so_far = 0
        for number in range(20):
            given = [torch.full(type_.shape, float(number)) for type_ in types]
            for port, value in zip(ports, given, strict=True):
                port.start(value)
            while not all(port.poll() for port in ports):
                communicator.progress()
            for port, value in zip(ports, given, strict=True):
                made = port.take()
                assert made.eq(2.0 * number).all()
                assert (made.data_ptr() == value.data_ptr()) is is_donated
            names = [buffer.name for buffer in sender.buffers.to_lend]  # type: ignore[union-attr]
            made_so_far = max(made_so_far, *(name >> 32 for name in names))
        return made_so_far

    # They only grow, until each is as large as the largest message.
    assert max(run_communicators(2, [group], body)) <= LIMIT * len(types)


def test_broadcast_objects_keep_their_place_among_other_collectives() -> None:
    """Small and large ones, with reductions in flight before and after them."""
    group, everyone = Channel(0, (0, 1, 2), collective=True), Place((0, 1, 2))
    tensor = TensorType(DType.F32, (4,))
    given = [b"a", "text", 5, {"b": 1}, bytes(100_000), np.arange(50_000), None, b""] * 3

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        def port(op: Collective, type_: Any, has_operand: bool) -> Any:
            operand = type_ if has_operand else None
            return communicator.collective_port(op, group, operand, type_)

        add = [port(AllReduce(op=ReduceOp.SUM, group=everyone), tensor, True) for _ in range(2)]
        cast = Broadcast(root=0, group=everyone)
        casts = [port(cast, OBJECT, world.rank == 0) for _ in range(2)]
        seen = []
        for i, value in enumerate(given):
            other = given[-i]
            add[0].start(torch.full((4,), float(i)))
            casts[0].start(value if world.rank == 0 else None)
            casts[1].start(other if world.rank == 0 else None)
            add[1].start(torch.ones(4))
            while not all(p.poll() for p in (*add, *casts)):
                communicator.progress()
            assert [p.take()[0].item() for p in add] == [3.0 * i, 3.0]
            seen.append([p.take() for p in casts])
        return seen

    for seen in run_communicators(3, [group], body):
        for i, (value, other) in enumerate(seen):
            assert np.array_equal(value, given[i])
            assert np.array_equal(other, given[-i])


def test_units_do_not_lend() -> None:
    buffers, found = exchange(UnitType(), [None] * 3, lambda value: value)
    assert (buffers, found) == ((), [None] * 3)
