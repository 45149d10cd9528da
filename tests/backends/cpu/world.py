"""Worlds for the tests of the CPU transport: ranks as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cg.backends.base import Port
from cg.backends.cpu.communicator import CpuCommunicator
from cg.backends.cpu.waiting.node import MachineNode
from cg.backends.device import Device
from cg.ir.ops import Recv, Send, Value
from cg.ir.ops.module import Channel
from cg.ir.types import FutureType, Place, UnitType, ValueType

T = TypeVar("T")
SECONDS = 20.0


class ThreadWorld:
    """One rank of a world whose ranks are threads."""

    is_virtual = False
    comm = None
    device: Device | None = None

    def __init__(self, rank: int, size: int, shared: list[Any], meeting: threading.Barrier) -> None:
        self.rank = rank
        self.size = size
        self.nodes: Sequence[int] = [0] * size
        self._shared = shared
        self._meeting = meeting

    def plays(self, rank: int) -> bool:
        return rank == self.rank

    def allgather(self, value: T) -> list[T]:
        self._shared[self.rank] = value
        self.barrier()
        values = list(self._shared)
        self.barrier()
        return values

    def broadcast(self, value: T | None, root: int) -> T:
        found = self.allgather(value)[root]
        assert found is not None
        return found

    def barrier(self) -> None:
        self._meeting.wait(SECONDS)

    def answer_by(self, teller: Callable[[], object]) -> None:
        """Nobody asks."""

    def look(self, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """Nobody answers."""
        return {}


def run_ranks(size: int, body: Callable[[ThreadWorld], T]) -> list[T]:
    """Run `body` on each rank; the results, or the first exception of any."""
    shared: list[Any] = [None] * size
    meeting = threading.Barrier(size)

    def run(rank: int) -> T:
        try:
            return body(ThreadWorld(rank, size, shared, meeting))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception(2 * SECONDS))]
    broken = threading.BrokenBarrierError
    for error in sorted(errors, key=lambda error: isinstance(error, broken)):
        raise error
    return [future.result() for future in futures]


def run_communicators(
    size: int,
    channels: Sequence[Channel],
    body: Callable[[CpuCommunicator, ThreadWorld], T],
) -> list[T]:
    """Run `body` on each rank with its communicator for `channels`; the results."""

    def run(world: ThreadWorld) -> T:
        node = MachineNode(world)
        communicator = CpuCommunicator(node, channels)
        try:
            result = body(communicator, world)
            world.barrier()
            return result
        finally:
            communicator.close()
            node.close()

    return run_ranks(size, run)


def send(
    communicator: CpuCommunicator,
    channel: Channel,
    type_: ValueType,
    slot: int | None = None,
    seq: int = 0,
) -> Port:
    source, destination = channel.ranks
    place = Place.of(source)
    op = Send(
        (Value("x", type_),),
        (Value("s", FutureType(UnitType(place))),),
        chan=channel.id,
        peer=destination,
        seq=seq,
        slot=slot,
    )
    return communicator.send_port(op, channel, type_)


def recv(
    communicator: CpuCommunicator,
    channel: Channel,
    type_: ValueType,
    slot: int | None = None,
    into: bool = False,
    seq: int = 0,
) -> Port:
    op = Recv(
        (Value("b", type_),) if into else (),
        (Value("r", FutureType(type_)),),
        chan=channel.id,
        peer=channel.ranks[0],
        seq=seq,
        slot=slot,
    )
    return communicator.recv_port(op, channel, type_)


def wait(*ports: Port, communicator: CpuCommunicator | None = None) -> None:
    """Poll until all are done, or fail the test."""
    pause = threading.Event()
    for _ in range(int(SECONDS / 0.0002)):
        if communicator is not None:
            communicator.progress()
        if all(port.poll() for port in ports):
            return
        pause.wait(0.0002)
    raise AssertionError("a port was not done in time")


def get(port: Port, into: Any = None) -> Any:
    """One message, received from start to end."""
    port.start(into)
    wait(port)
    value = port.take()
    port.release()
    return value


def put(port: Port, value: Any) -> None:
    """One message, sent from start to end."""
    port.start(value)
    wait(port)
