"""Messages through shared memory: order, slots, back-pressure, sizes, types, reset."""

from __future__ import annotations

import gc
import itertools
import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from cg.backends.cpu.communicator import RING_BYTES, RING_SLOTS, CpuCommunicator
from cg.backends.cpu.memory.layout import IN_HEADER, IN_HEADER_BYTES, WORDS, SlotLayout
from cg.backends.cpu.memory.parallel_memcpy import LEAST
from cg.backends.cpu.memory.segments import NamedFiles, SharedSegment
from cg.backends.cpu.queues.shared_buffers import LIMIT
from cg.backends.cpu.waiting.node import MachineNode
from cg.backends.errors import BindError, TransportError
from cg.ir.ops.module import Channel
from cg.ir.types import DType, ObjectType, TensorType, UnitType

from .world import ThreadWorld, get, put, recv, run_communicators, run_ranks, send, wait

OBJECT = ObjectType()
F32 = TensorType(DType.F32, (4,))
EDGE = Channel(0, (0, 1))
PLANNED = Channel(0, (0, 1), slots=2, slot_bytes=16)


def test_layout_keeps_writers_apart() -> None:
    layout = SlotLayout(planned=3, planned_bytes=128, ring=10, ring_bytes=64, readers=2)
    words = [layout.header(slot) for slot in range(13)]
    words += [layout.consumed(reader, slot) for reader in range(2) for slot in range(13)]
    assert len(set(words)) == len(words)
    assert layout.consumed(1, 0) // 8 > layout.consumed(0, 12) // 8
    starts = [layout.payload(slot) for slot in range(14)]
    assert all(start % 64 == 0 for start in starts)
    assert [b - a for a, b in itertools.pairwise(starts)] == [128] * 3 + [64] * 10
    assert layout.nbytes == starts[-1]


def test_messages_keep_their_order_and_wait_for_room() -> None:
    count = 10 * RING_SLOTS

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank == 0:
            ports = [send(communicator, EDGE, OBJECT) for _ in range(count)]
            for index, port in enumerate(ports):
                port.start(index)
            done = sum(port.poll() for port in ports)
            world.barrier()
            wait(*ports, communicator=communicator)
            return done
        world.barrier()
        return [get(recv(communicator, EDGE, OBJECT)) for _ in range(count)]

    done, received = run_communicators(2, [EDGE], body)
    assert done == RING_SLOTS
    assert received == list(range(count))


def test_receives_posted_early_are_filled_in_order_while_another_is_polled() -> None:
    count = 3 * RING_SLOTS

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank == 0:
            ports = [send(communicator, EDGE, F32) for _ in range(count)]
            for index, port in enumerate(ports):
                port.start(torch.full((4,), float(index)))
            wait(*ports)
            return None
        ports = [recv(communicator, EDGE, F32) for _ in range(count)]
        for port in ports:
            port.start(None)
        wait(ports[-1])  # needs room that only the earlier ones give back
        assert all(port.poll() for port in ports)
        return [port.take()[0].item() for port in ports]

    assert run_communicators(2, [EDGE], body)[1] == list(map(float, range(count)))


def test_a_planned_slot_is_read_in_place_and_reused_after_release() -> None:
    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank == 0:
            first, second = (send(communicator, PLANNED, F32, slot=1) for _ in range(2))
            first.start(torch.zeros(4))
            second.start(torch.ones(4))
            world.barrier()
            assert first.poll()
            assert not second.poll()
            world.barrier()
            wait(second)
            return None
        first, second = (recv(communicator, PLANNED, F32, slot=1) for _ in range(2))
        first.start(None)
        second.start(None)
        world.barrier()
        wait(first)
        assert not second.poll()
        value = first.take()
        kept = value.clone()
        world.barrier()
        first.release()
        wait(second)
        assert torch.equal(second.take(), torch.ones(4))
        return kept, value.data_ptr() == second.take().data_ptr()

    kept, in_place = run_communicators(2, [PLANNED], body)[1]
    assert torch.equal(kept, torch.zeros(4))
    assert in_place


def test_planned_slots_of_one_channel_are_independent_and_last_many_executions() -> None:
    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        make = send if world.rank == 0 else recv
        ports = [make(communicator, PLANNED, F32, slot=slot) for slot in (0, 1)]
        seen = []
        for execution in range(50):
            for slot, port in enumerate(ports):
                value = torch.full((4,), float(2 * execution + slot))
                port.start(value if world.rank == 0 else None)
            wait(*ports)
            if world.rank == 1:
                seen += [port.take()[3].item() for port in ports]
                for port in reversed(ports):
                    port.release()
        return seen

    assert run_communicators(2, [PLANNED], body)[1] == list(map(float, range(100)))


def test_a_value_without_a_slot_is_the_receivers_own() -> None:
    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank == 0:
            port = send(communicator, EDGE, F32)
            for index in range(3 * RING_SLOTS):
                put(port, torch.full((4,), float(index)))
            return None
        port = recv(communicator, EDGE, F32)
        values = [get(port) for _ in range(3 * RING_SLOTS)]
        return [value[0].item() for value in values]

    assert run_communicators(2, [EDGE], body)[1] == list(map(float, range(3 * RING_SLOTS)))


@pytest.mark.parametrize("slot", [None, 0])
def test_a_value_is_received_into_the_operand(slot: int | None) -> None:
    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank == 0:
            port = send(communicator, PLANNED, F32, slot=slot)
            for index in range(5):
                put(port, torch.full((4,), float(index)))
            return None
        port = recv(communicator, PLANNED, F32, slot=slot, into=True)
        buffers = [torch.empty(8)[::2] for _ in range(5)]
        assert all(get(port, buffer) is buffer for buffer in buffers)
        return [buffer.tolist() for buffer in buffers]

    received = run_communicators(2, [PLANNED], body)[1]
    assert received == [[float(index)] * 4 for index in range(5)]


def test_large_messages_go_beside_the_slots_and_reuse_that_memory() -> None:
    sizes = [10, RING_BYTES + 1, 3_000_000, 100, 2_000_000, 5_000_000] * 3

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank == 0:
            port = send(communicator, EDGE, OBJECT)
            for size in sizes:
                put(port, (bytes(size), torch.full((size // 4,), float(size))))
            buffers = communicator._senders[0][1,].buffers  # type: ignore[union-attr]
            return [buffer.room for buffer in buffers.to_lend]
        port = recv(communicator, EDGE, OBJECT)
        received = []
        for _ in sizes:
            content, tensor = get(port)
            received.append(len(content))
            assert tensor.eq(len(content)).all()
        return received

    rooms, received = run_communicators(2, [EDGE], body)
    assert received == sizes
    assert max(rooms) >= 10_000_000
    assert len(rooms) <= LIMIT


def test_objects_of_all_sizes_take_turns_in_the_slots_of_a_ring() -> None:
    sizes = [0, 1, IN_HEADER_BYTES, IN_HEADER_BYTES + 1, RING_BYTES, RING_BYTES + 1, 3_000_000]
    kinds = [bytes, lambda size: "é" * size, lambda size: [size] * (size // 1000), int]
    values: list[Any] = [kind(size) for kind in kinds for size in sizes] * 6
    random.Random(0).shuffle(values)
    kept: list[Any] = [np.full(size, size % 251, np.uint8) for size in sizes]
    values += kept * RING_SLOTS + values

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank == 0:
            port = send(communicator, EDGE, OBJECT)
            for value in values:
                put(port, value)
            return None
        port = recv(communicator, EDGE, OBJECT)
        return [get(port) for _ in values]

    received = run_communicators(2, [EDGE], body)[1]
    for value, sent in zip(received, values, strict=True):
        assert type(value) is type(sent)
        assert np.array_equal(value, sent) if isinstance(sent, np.ndarray) else value == sent


def test_a_few_bytes_lie_in_the_cache_line_that_says_they_are_there() -> None:
    contents = [b"", b"x", bytes(range(IN_HEADER_BYTES)), bytes(range(IN_HEADER_BYTES + 1))]

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank == 0:
            port = send(communicator, EDGE, OBJECT)
            for content in contents:
                port.start(content)
            world.barrier()
            return None
        world.barrier()
        memory = communicator._receivers[0, 0].memory
        headers = [memory[8 * WORDS * i : 8 * WORDS * (i + 1)] for i in range(len(contents))]
        room = [bytes(header[8 * IN_HEADER :]) for header in headers]
        port = recv(communicator, EDGE, OBJECT)
        return room, [get(port) for _ in contents]

    room, received = run_communicators(2, [EDGE], body)[1]
    assert received == contents
    assert len(contents) <= RING_SLOTS
    assert room == [c.ljust(IN_HEADER_BYTES, b"\0") for c in contents[:3]] + [
        bytes(IN_HEADER_BYTES)
    ]


@pytest.mark.parametrize("dtype", list(DType), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 5)])
def test_tensors_of_all_dtypes_and_shapes(dtype: DType, shape: tuple[int, ...]) -> None:
    type_ = TensorType(dtype, shape)
    channel = Channel(0, (0, 1), slots=1, slot_bytes=type_.nbytes)
    slots: tuple[int | None, ...] = (0, None)

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        from cg.backends.dtypes import TORCH_DTYPES

        value = torch.arange(type_.numel).reshape(shape).to(TORCH_DTYPES[dtype])
        for slot in slots:
            if world.rank == 0:
                put(send(communicator, channel, type_, slot), value)
            else:
                port = recv(communicator, channel, type_, slot)
                port.start(None)
                wait(port)
                got = port.take()
                assert got.dtype is value.dtype
                assert torch.equal(got.to(torch.complex64), value.to(torch.complex64))
                port.release()

    run_communicators(2, [channel], body)


@pytest.mark.parametrize("slot", [0, None], ids=["slot", "ring"])
@pytest.mark.parametrize("nbytes", [LEAST - 4, LEAST, 2 * LEAST], ids=["small", "least", "large"])
def test_large_tensors_in_one_piece_or_not(nbytes: int, slot: int | None) -> None:
    type_ = TensorType(DType.F32, (nbytes // 4,))
    channel = Channel(0, (0, 1), slots=1, slot_bytes=nbytes)
    whole = torch.arange(nbytes // 4, dtype=torch.float32)
    strided = torch.arange(nbytes // 2, dtype=torch.float32)[::2]

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank == 0:
            port = send(communicator, channel, type_, slot)
            for value in (whole, strided):
                put(port, value)
            return
        port = recv(communicator, channel, type_, slot)
        for value in (whole, strided):
            port.start(None)
            wait(port)
            assert torch.equal(port.take(), value)
            port.release()

    run_communicators(2, [channel], body)


def test_units_and_tensors_that_require_grad() -> None:
    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank == 0:
            put(send(communicator, PLANNED, UnitType()), None)
            for _ in range(2):
                put(send(communicator, PLANNED, F32, slot=0), torch.ones(4, requires_grad=True))
            return None
        unit = get(recv(communicator, PLANNED, UnitType()))
        port = recv(communicator, PLANNED, F32, slot=0)
        return unit, [get(port).requires_grad for _ in range(2)]

    assert run_communicators(2, [PLANNED], body)[1] == (None, [False, False])


def test_a_value_of_another_type_than_planned_is_refused() -> None:
    def body(communicator: CpuCommunicator, world: ThreadWorld) -> None:
        if world.rank == 0:
            port = send(communicator, EDGE, F32)
            message = r"f32\[4\] cannot carry f32\[2,2\]: the plan fixed the type"
            with pytest.raises(TransportError, match=message):
                port.start(torch.zeros(2, 2))
            with pytest.raises(TransportError, match=r"cannot carry object \(str\)"):
                port.start("text")

    run_communicators(2, [EDGE], body)


def test_an_object_that_cannot_be_read_is_an_error_of_its_receiver_alone() -> None:
    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank == 0:
            port = send(communicator, EDGE, OBJECT)
            put(port, Unreadable())
            put(port, "next")
            return None
        port = recv(communicator, EDGE, OBJECT)
        with pytest.raises(ValueError, match="not here"):
            get(port)
        return get(port)

    assert run_communicators(2, [EDGE], body)[1] == "next"


class Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not here")


def test_messages_that_do_not_fit_the_plan_are_refused_when_bound() -> None:
    def body(communicator: CpuCommunicator, world: ThreadWorld) -> None:
        make = send if world.rank == 0 else recv
        with pytest.raises(BindError, match="uses slot 2, and the channel has 2 slots"):
            make(communicator, PLANNED, F32, slot=2)
        big = TensorType(DType.F32, (100,))
        with pytest.raises(BindError, match=r"f32\[100\], which does not fit into a slot of 16 b"):
            make(communicator, PLANNED, big, slot=0)

    run_communicators(2, [PLANNED], body)


def test_reset_forgets_what_was_under_way() -> None:
    def body(communicator: CpuCommunicator, world: ThreadWorld) -> Any:
        if world.rank == 0:
            ring = [send(communicator, PLANNED, OBJECT) for _ in range(9)]
            slot = send(communicator, PLANNED, F32, slot=0)
            for index, port in enumerate(ring):
                port.start(bytes(index * 100_000))
            slot.start(torch.zeros(4))
        else:
            ring = [recv(communicator, PLANNED, OBJECT) for _ in range(2)]
            slot = recv(communicator, PLANNED, F32, slot=0)
            for port in (*ring, slot):
                port.start(None)
            wait(*ring)
        world.barrier()
        communicator.reset()
        world.barrier()
        if world.rank == 0:
            put(slot, torch.ones(4))
            put(ring[0], "fresh")
            put(ring[1], bytes(200_000))
            return None
        return get(slot).tolist(), get(ring[0]), len(get(ring[1]))

    assert run_communicators(2, [PLANNED], body)[1] == ([1.0] * 4, "fresh", 200_000)


class NoProc(NamedFiles):
    """Stands for a machine on which processes cannot open each other's files."""

    def create(self, nbytes: int) -> SharedSegment:
        raise PermissionError("no /proc for you")


@pytest.mark.parametrize("last_works", [True, False])
def test_the_next_kind_of_memory_is_used_where_one_fails(last_works: bool, tmp_path: Any) -> None:
    kinds = [NoProc(), NamedFiles(tmp_path) if last_works else NoProc()]

    def body(world: ThreadWorld) -> Any:
        node = MachineNode(world, kinds)
        communicator = CpuCommunicator(node, [EDGE])
        if world.rank == 0:
            put(send(communicator, EDGE, OBJECT), bytes(100_000))
            world.barrier()
            names = len(list(tmp_path.iterdir()))
            communicator.close()
            return names
        size = len(get(recv(communicator, EDGE, OBJECT)))
        world.barrier()
        return size

    if last_works:
        # Only the memory beside the slots keeps a name until it is closed.
        assert run_ranks(2, body) == [1, 100_000]
        assert list(tmp_path.iterdir()) == []
    else:
        with pytest.raises(TransportError, match=r"cannot share memory: rank 0: no /proc for you"):
            run_ranks(2, body)


def test_closing_gives_all_descriptors_back() -> None:
    def body(communicator: CpuCommunicator, world: ThreadWorld) -> None:
        if world.rank == 0:
            put(send(communicator, EDGE, OBJECT), bytes(1_000_000))
        else:
            get(recv(communicator, EDGE, OBJECT))

    run_communicators(2, [EDGE], body)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run_communicators(2, [EDGE], body)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
