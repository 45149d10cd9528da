"""Scenarios of the ranks of a job in the tests of the CPU transport (`test_cpu_transport.py`)."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from cpu_world import FileWorld, TestWorld, report

from cg.backends.base import Port
from cg.backends.cpu.communicator import CpuCommunicator
from cg.backends.cpu.transport import CpuTransport
from cg.backends.dtypes import TORCH_DTYPES
from cg.backends.errors import Failure, RemoteError, StepTimeout, TransportError
from cg.backends.exchanges import outcomes
from cg.backends.failures.flight import FlightRecord, Position
from cg.ir.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    Gather,
    Recv,
    ReduceScatter,
    Scatter,
    Send,
    Value,
)
from cg.ir.ops.module import Channel, Module, Program
from cg.ir.phases import Phase
from cg.ir.types import DType, FutureType, ObjectType, Place, TensorType, UnitType, ValueType

F32 = TensorType(DType.F32, (8,))
OBJECT = ObjectType()
Make = Callable[..., Port]


class Rank:
    """This rank, its transport, and how it waits."""

    def __init__(self, world: TestWorld) -> None:
        self.world = world
        self.rank = world.rank
        self.transport = CpuTransport(world)
        self.control = self.transport.control
        self.communicators: list[CpuCommunicator] = []

    def connect(self, channels: Sequence[Channel]) -> CpuCommunicator:
        communicator = CpuCommunicator(self.transport.node, channels)
        self.communicators.append(communicator)
        return communicator

    def watch(self, op: int = 0, awaited: int | None = None) -> Callable[[], Position]:
        return lambda: Position(self.rank, self.control.epoch, op, awaited)

    def wait(self, *ports: Port) -> None:
        polls = 0
        while not all(port.poll() for port in ports):
            for communicator in self.communicators:
                communicator.progress()
            polls += 1
            self.transport.pause(polls)

    def get(self, port: Port, into: Any = None) -> Any:
        port.start(into)
        self.wait(port)
        value = port.take()
        port.release()
        return value

    def put(self, port: Port, value: Any) -> None:
        port.start(value)
        self.wait(port)


def ends(communicator: CpuCommunicator, channel: Channel) -> tuple[Make, Make]:
    """How to make the ports of an edge."""
    source, destination = channel.ranks

    def send(type_: ValueType, slot: int | None = None) -> Port:
        results = (Value("s", FutureType(UnitType())),)
        op = Send((Value("x", type_),), results, chan=channel.id, peer=destination, slot=slot)
        return communicator.send_port(op, channel, type_)

    def recv(type_: ValueType, slot: int | None = None, into: bool = False) -> Port:
        operands = (Value("b", type_),) if into else ()
        results = (Value("r", FutureType(type_)),)
        op = Recv(operands, results, chan=channel.id, peer=source, slot=slot)
        return communicator.recv_port(op, channel, type_)

    return send, recv


def tensor(type_: TensorType) -> torch.Tensor:
    return torch.arange(type_.numel).reshape(type_.shape).to(TORCH_DTYPES[type_.dtype])


# -- messages ------------------------------------------------------------------------------------


def messages(me: Rank) -> Any:
    """All kinds of messages, from rank 0 to the last."""
    last = me.world.size - 1
    channel = Channel(3, (0, last), slots=2, slot_bytes=4096)
    send, recv = ends(me.connect([channel]), channel)
    if me.rank == 0:
        return _send_all(me, send)
    return _receive_all(me, recv) if me.rank == last else None


TYPES = [
    TensorType(dtype, shape)
    for dtype in (DType.F32, DType.BF16, DType.I64, DType.BOOL, DType.F8E4M3)
    for shape in ((), (0, 3), (3, 5))
]
SIZES = [0, 1, 4000, 4080, 4096, 100_000, 3_000_000, 10]
ROUNDS = 40


def _send_all(me: Rank, send: Make) -> None:
    ordered = [send(OBJECT) for _ in range(ROUNDS)]
    for index, port in enumerate(ordered):
        port.start(index)
    me.wait(*ordered)
    for size in SIZES:
        me.put(send(OBJECT), {"bytes": bytes(size), "tensor": torch.ones(size)})
    for type_ in TYPES:
        for slot in (None, 1):
            me.put(send(type_, slot), tensor(type_))
    slots = [send(F32, slot=slot) for slot in (0, 1)]
    for index in range(ROUNDS):
        for slot, port in enumerate(slots):
            port.start(torch.full((8,), float(2 * index + slot)).expand(8))
        me.wait(*slots)
    me.put(send(F32), torch.arange(16.0)[::2])


def _receive_all(me: Rank, recv: Make) -> Any:
    ordered = [recv(OBJECT) for _ in range(ROUNDS)]
    for port in ordered:
        port.start(None)
    me.wait(*ordered)
    assert [port.take() for port in ordered] == list(range(ROUNDS))
    for size in SIZES:
        value = me.get(recv(OBJECT))
        assert len(value["bytes"]) == value["tensor"].numel() == size
        value["tensor"] += 1
    for type_ in TYPES:
        for slot in (None, 1):
            port = recv(type_, slot)
            port.start(None)
            me.wait(port)
            value, expected = port.take(), tensor(type_)
            assert value.dtype is expected.dtype
            assert torch.equal(value.float(), expected.float())
            port.release()
    slots = [recv(F32, slot=slot) for slot in (0, 1)]
    seen, addresses = [], set()
    for _ in range(ROUNDS):
        for port in slots:
            port.start(None)
        me.wait(*slots)
        for port in slots:
            value = port.take()
            seen.append(value[7].item())
            addresses.add(value.data_ptr())
            port.release()
    assert seen == list(map(float, range(2 * ROUNDS)))
    assert len(addresses) == 2
    buffer = torch.empty(8)
    assert me.get(recv(F32, into=True), buffer) is buffer
    return buffer.tolist()


def reset(me: Rank) -> Any:
    """Messages under way in a failed execution are not seen by the next."""
    channel = Channel(0, (0, 1), slots=2, slot_bytes=64)
    communicator = me.connect([channel])
    make = ends(communicator, channel)[min(me.rank, 1)]
    objects = [make(OBJECT) for _ in range(6)] if me.rank < 2 else []
    slots = [make(F32, slot=slot) for slot in (0, 1)] if me.rank < 2 else []
    plan = [*slots[:1], *objects[:3], *slots[1:], *objects[3:]]
    values = [torch.zeros(8), *map(bytes, SIZES[:3]), torch.zeros(8), *map(bytes, SIZES[3:6])]
    for execution in range(4):
        me.control.begin(1, me.watch())
        # One side issues more than the other, first the sender and then the receiver.
        many = (me.rank == 0) == (execution % 2 == 0)
        count = len(plan) if many else execution
        for port, value in list(zip(plan, values, strict=False))[:count]:
            port.start(value if me.rank == 0 else None)
        error = me.control.fail(_failure(me.rank))
        assert isinstance(error, RemoteError)
        assert error.rank == 0
        me.control.recover([communicator.reset])
    me.control.begin(1, me.watch())
    if me.rank == 0:
        me.put(slots[0], torch.ones(8))
        me.put(objects[0], "fresh")
    received = (me.get(slots[0]).tolist(), me.get(objects[0])) if me.rank == 1 else None
    me.control.commit([communicator.progress])
    return received


def collectives(me: Rank) -> Any:
    """Every collective over all ranks, in reverse order, against its definition."""
    group = tuple(reversed(range(me.world.size)))
    channel = Channel(0, group, collective=True)
    communicator = me.connect([channel])
    index, count = group.index(me.rank), len(group)
    place = Place(group)
    for numel in (count, 200_000 * count):
        type_ = TensorType(DType.F32, (numel,))
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(numel, generator=generator) for _ in group]
        cases: list[Collective] = [
            AllReduce(group=place),
            AllGather(group=place),
            ReduceScatter(group=place),
            AllToAll(group=place),
            Broadcast(group=place, root=group[0]),
            *(Gather(group=place, root=root) for root in (0, group[0])),
            *(Scatter(group=place, root=root) for root in (0, group[0])),
        ]
        for op in cases:
            senders = op.exchange.senders
            given = [value for r, value in zip(group, values, strict=True) if r in senders]
            expected = outcomes(op.exchange, given)
            mine = expected[index]
            result = UnitType() if mine is None else TensorType(DType.F32, tuple(mine.shape))
            is_silent = me.rank not in senders
            operand = None if is_silent else type_
            port = communicator.collective_port(op, channel, operand, result)
            for _ in range(3):
                got = me.get(port, None if is_silent else values[index])
                assert got is None if mine is None else torch.equal(got, mine), op.opcode
    unit = communicator.collective_port(Barrier(group=place), channel, None, UnitType())
    me.get(unit)
    op = Broadcast(group=place, root=0)
    operand_type = OBJECT if me.rank == 0 else None
    port = communicator.collective_port(op, channel, operand_type, OBJECT)
    sent = {"text": "x" * 10_000, "tensor": torch.ones(3)}
    value = me.get(port, sent if me.rank == 0 else None)
    return [len(value["text"]), value["tensor"].sum().item()]


# -- control -------------------------------------------------------------------------------------


def _failure(rank: int) -> RemoteError:
    return RemoteError(Failure("ValueError", "boom", rank, "call(@stage.forward)"))


def _wait_in_vain(me: Rank) -> BaseException:
    polls = 0
    try:
        while True:
            polls += 1
            me.transport.pause(polls)
    except (RemoteError, StepTimeout, TransportError, RuntimeError) as error:
        return me.control.fail(error)


def commits(me: Rank) -> Any:
    """Executions end together."""
    first = me.control.epoch
    for _ in range(200):
        me.control.begin(1, me.watch())
        me.control.commit()
    return me.control.epoch - first


def failures(me: Rank) -> Any:
    """A failure on one rank is raised by all, again and again; how often."""
    raised = 0
    for failing in (0, me.world.size - 1, 1):
        me.control.begin(1, me.watch())
        me.world.barrier()
        if me.rank == failing:
            error = me.control.fail(_failure(me.rank))
        else:
            error = _wait_in_vain(me)
        assert isinstance(error, RemoteError)
        assert error.rank == failing
        raised += 1
        me.control.recover()
        me.control.begin(1, me.watch())
        me.control.commit()
    return raised


def killed(me: Rank) -> Any:
    """Rank 1 is killed, with messages under way; nobody ends the others."""
    channel = Channel(0, (1, 0))
    send, _ = ends(me.connect([channel]), channel)
    me.control.begin(1, me.watch())
    if me.rank == 1:
        for _ in range(10):
            send(OBJECT).start(bytes(1_000_000))
        os.kill(os.getpid(), signal.SIGKILL)
    error = _wait_in_vain(me)
    with suppress(TransportError):
        me.control.recover()
    return str(error)


def left(me: Rank) -> Any:
    """Rank 1 makes a step less than the others."""
    me.control.begin(1, me.watch())
    me.control.commit()
    if me.rank == 1:
        return None
    me.control.begin(1, me.watch())
    return str(_wait_in_vain(me))


def diverged(me: Rank) -> Any:
    """Rank 1 calls another step than the others."""
    me.control.begin(7 if me.rank == 1 else 8, me.watch())
    error = _wait_in_vain(me)
    me.control.recover()
    return str(error)


def compared(me: Rank) -> Any:
    """Compare digests of ranks: equal on all, on all but the last, and on some of them."""
    found = []
    size = me.transport.node.size
    everywhere, first = range(size), range(size - 1)
    for ranks, digest in (
        (everywhere, 2**64 - 1),
        (everywhere, 5 if me.rank < size - 1 else 6),
        (first, 7 if me.rank < size - 1 else 0),
        (everywhere, 8),
    ):
        me.control.begin(1, me.watch())
        found.append(me.control.compare(digest, ranks))
        me.control.commit()
    return found


def disordered(me: Rank) -> Any:
    """Rank 1 comes to a call of the world, and the others to an execution; they never meet."""
    me.control.enter(1, "the call of all")
    me.control.begin(1, me.watch(), doing="a step")
    me.control.commit()
    if me.rank != 1:
        me.control.begin(1, me.watch(), doing="another step")
        return str(_wait_in_vain(me))
    me.control.enter(2, "a call of its own")
    try:
        while True:
            me.control.look()
            time.sleep(0.001)
    except RuntimeError as error:
        return str(error)


def late(me: Rank) -> Any:
    """Rank 1 never comes back from its own work."""
    if me.rank == 1:
        me.control.begin(1, me.watch(op=3), _record)
        time.sleep(4.0)
    else:
        me.control.begin(1, me.watch(op=4, awaited=2), _record, timeout=2.5)
    error = _wait_in_vain(me)
    me.control.recover()
    return str(error)


def _record(positions: Sequence[Position]) -> FlightRecord:
    """Of a module in which each rank but rank 1 waits for a message of that one."""
    receive = [
        Recv(results=(Value("r", FutureType(UnitType())),), chan=rank, peer=1, seq=0)
        for rank in range(8)
    ]
    programs = [Program("late", rank=rank, ops=[receive[rank]] * 5) for rank in range(8)]
    return FlightRecord(Module("late", Phase.SCHEDULED, 8, programs=programs), positions)


def idle(me: Rank) -> Any:
    """Share of a core that a waiting rank uses."""
    me.control.begin(1, me.watch())
    if me.rank == 1:
        time.sleep(2.0)
        me.control.commit()
        return None
    cpu, wall = time.process_time(), time.monotonic()
    me.control.commit()
    return (time.process_time() - cpu) / (time.monotonic() - wall)


def _world(nodes: Sequence[int]) -> TestWorld:
    if len(sys.argv) > 4:
        return FileWorld(Path(sys.argv[3]), int(sys.argv[4]), nodes)
    from mpi4py import MPI  # which starts it

    return TestWorld(MPI.COMM_WORLD, nodes)


def main() -> None:
    scenarios, nodes = sys.argv[1].split(","), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    me = Rank(_world(nodes))
    for scenario in scenarios:
        report(me.rank, scenario, globals()[scenario](me))
        for communicator in me.communicators:
            communicator.close()
        me.communicators.clear()
    me.transport.close()


if __name__ == "__main__":
    main()
