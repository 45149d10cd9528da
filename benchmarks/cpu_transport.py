"""Round trips between two ranks of one machine: the CPU transport against mpi4py's Send and Recv.

    mpirun -n 2 python benchmarks/cpu_transport.py [--sizes 1 1024 ...] [--turns 20] [--json FILE]

Tensors go through ports as the executor uses them, with and without planned slots, and so does an
object. The receiver of a planned slot reads the message in place; mpi4py copies it into a buffer.
All arms run in the same processes, in turns (ABAB…). A figure is the median over the turns of the
mean round trip of a turn, in µs; the range over the turns stands beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from cg.backends.base import Communicator, Port
from cg.backends.cpu.transport import CpuTransport
from cg.ir.ops import Recv, Send, Value
from cg.ir.ops.module import Channel
from cg.ir.types import DType, FutureType, ObjectType, TensorType, UnitType, ValueType
from cg.launch.world.world import world as start_world

Trip = Callable[[], None]


def edges(type_: ValueType) -> tuple[Channel, Channel]:
    """The channels from rank 0 to rank 1 and back, with a slot that fits."""
    nbytes = type_.nbytes if isinstance(type_, TensorType) else 0
    there = Channel(0, (0, 1), slots=1, slot_bytes=nbytes)
    return there, Channel(1, (1, 0), slots=1, slot_bytes=nbytes)


def ports(
    communicator: Communicator, rank: int, type_: ValueType, slot: int | None
) -> tuple[Port, Port]:
    """This rank's ports to and from the other."""
    out, into = edges(type_) if rank == 0 else edges(type_)[::-1]
    unit = (Value("s", FutureType(UnitType())),)
    send = Send((Value("x", type_),), unit, chan=out.id, peer=1 - rank, slot=slot)
    recv = Recv((), (Value("r", FutureType(type_)),), chan=into.id, peer=1 - rank, slot=slot)
    return communicator.send_port(send, out, type_), communicator.recv_port(recv, into, type_)


def through_ports(
    transport: CpuTransport, rank: int, type_: ValueType, slot: int | None, value: Any
) -> Trip:
    """A round trip through ports."""
    communicator = transport.communicator(transport.node.world, edges(type_))
    outgoing, incoming = ports(communicator, rank, type_, slot)
    pause, progress = transport.pause, communicator.progress

    def wait(port: Port) -> None:
        polls = 0
        while not port.poll():
            progress()
            polls += 1
            pause(polls)

    def give() -> None:
        outgoing.start(value)
        wait(outgoing)

    def take() -> None:
        incoming.start(None)
        wait(incoming)
        incoming.take()
        incoming.release()

    return _trip(rank, give, take)


def through_mpi(rank: int, nbytes: int) -> Trip:
    """A round trip through Send and Recv."""
    comm = MPI.COMM_WORLD
    buffer, received = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return _trip(rank, lambda: comm.Send(buffer, 1 - rank), lambda: comm.Recv(received, 1 - rank))


def _trip(rank: int, give: Trip, take: Trip) -> Trip:
    first, second = (give, take) if rank == 0 else (take, give)

    def run() -> None:
        first()
        second()

    return run


def measure(arms: dict[str, Trip], rounds: int, turns: int) -> dict[str, list[float]]:
    """Mean round trip of each turn, in µs, by arm."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 1):
        for name, trip in arms.items():
            MPI.COMM_WORLD.Barrier()
            began = time.perf_counter()
            for _ in range(rounds):
                trip()
            if turn:  # the first only warms up
                found[name].append((time.perf_counter() - began) / rounds * 1e6)
    return found


def main() -> None:
    """Print a table; write the figures as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 1 << 10, 1 << 20, 10 << 20])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world: Any = start_world()
    if world.size != 2 or world.is_virtual:
        raise SystemExit(f"this needs two ranks: mpirun -n 2 python {__file__}")
    transport = CpuTransport(world)
    figures = {}
    for size in args.sizes:
        type_ = TensorType(DType.U8, (size,))
        value = torch.zeros(size, dtype=torch.uint8)
        arms = {
            "mpi4py": through_mpi(world.rank, size),
            "planned slot": through_ports(transport, world.rank, type_, 0, value),
            "no slot": through_ports(transport, world.rank, type_, None, value),
            "object": through_ports(transport, world.rank, ObjectType(), None, {"x": value}),
        }
        figures[size] = measure(arms, 300 if size <= 1 << 16 else 15, args.turns)
        if world.rank == 0:
            show(size, figures[size])
    if world.rank == 0 and args.json:
        args.json.write_text(json.dumps({"round_trip_us": figures}))
    world.barrier()
    transport.close()


def show(size: int, found: dict[str, list[float]]) -> None:
    """One table of arms."""
    base = statistics.median(found["mpi4py"])
    print(f"{size} bytes, round trip in µs")
    for name, values in found.items():
        middle = statistics.median(values)
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"  {name:13} {middle:9.1f}   {spread:>22}   {middle / base:5.2f} of mpi4py")


if __name__ == "__main__":
    main()
