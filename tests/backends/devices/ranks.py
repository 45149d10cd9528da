"""Ranks as threads of one process, each with a fake device, and a host's transport between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch

from cg.backends.base import Port, World
from cg.backends.devices.programs.binder import DeviceBinder
from cg.backends.devices.programs.executable import DeviceExecutable
from cg.backends.fake.library import FakeLibrary
from cg.backends.nccl.communicator import NcclCommunicator
from cg.backends.nccl.pool import NcclPool
from cg.backends.poison import Poison
from cg.backends.program.linked import LinkedProgram
from cg.backends.virtual.fabric import VirtualFabric
from cg.ir.ops.module import Channel, Module
from tests.backends.devices.patience import PATIENCE, loose_device


class ThreadWorld:
    """A `World` whose ranks are threads."""

    is_virtual = False

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank = rank
        self.size = size
        self.nodes = [0] * size
        self.shared = shared
        self.device: Any = None
        self.library: Any = None

    def plays(self, rank: int) -> bool:
        return rank == self.rank

    def allgather(self, value: Any) -> list[Any]:
        self.shared["values"][self.rank] = value
        self.barrier()
        found = [self.shared["values"][rank] for rank in range(self.size)]
        self.barrier()
        return found

    def broadcast(self, value: Any, root: int) -> Any:
        return self.allgather(value)[root]

    def barrier(self) -> None:
        self.shared["barrier"].wait(PATIENCE)


def on_ranks(size: int, play: Callable[[ThreadWorld], Any]) -> list[Any]:
    """Run `play` on each rank; the results, or the exception of the lowest rank that raised."""
    shared: dict[str, Any] = {
        "barrier": threading.Barrier(size),
        "values": {},
        "host": (VirtualFabric(), Lock()),
    }
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = play(ThreadWorld(rank, size, shared))
        except BaseException as error:
            errors[rank] = error
            shared["barrier"].abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
        assert not thread.is_alive(), "a rank is stuck"
    real = [e for _, e in sorted(errors.items()) if not isinstance(e, threading.BrokenBarrierError)]
    if real or errors:
        raise (real or list(errors.values()))[0]
    return [results[rank] for rank in range(size)]


class HostCommunicator:
    """A transport of hosts: that of the virtual world, one thread at a time.

    Args:
        fabric: what the ranks have in common.
    """

    def __init__(self, fabric: VirtualFabric, lock: Lock, rank: int) -> None:
        self._lock = lock
        self._there = fabric.communicator(rank)

    def send_port(self, op: Any, channel: Channel, type_: Any) -> Any:
        return _Locked(self._lock, self._there.send_port(op, channel, type_))

    def recv_port(self, op: Any, channel: Channel, type_: Any) -> Any:
        return _Locked(self._lock, self._there.recv_port(op, channel, type_))

    def collective_port(self, op: Any, channel: Channel, operand: Any, result: Any) -> Any:
        port = self._there.collective_port(op, channel, operand, result)
        return _Locked(self._lock, port)

    def progress(self) -> None:
        pass

    def reset(self) -> None:
        with self._lock:
            self._there.reset()

    def close(self) -> None:
        pass


class _Locked:
    """A port that one thread uses at a time, of all that its fabric has."""

    def __init__(self, lock: Lock, port: Port) -> None:
        self._lock = lock
        self._port = port

    def start(self, value: Any) -> None:
        with self._lock:
            self._port.start(value)

    def fail(self, poison: Poison) -> None:
        with self._lock:
            self._port.fail(poison)

    def poll(self) -> bool:
        with self._lock:
            return self._port.poll()

    def take(self) -> Any:
        with self._lock:
            return self._port.take()

    def release(self) -> None:
        with self._lock:
            self._port.release()


def bound(
    world: ThreadWorld,
    module: Module,
    bodies: Any = None,
    constants: Any = None,
    delay: float = 0.0,
) -> DeviceExecutable:
    """This rank's program of `module`, bound to a fake device of its own.

    Channels that say `via = fake`, or nothing, go by the device, all others by the host.
    """
    device = world.device = loose_device(world.rank, delay)
    library = world.library = FakeLibrary(device)
    pool = NcclPool(world, device, library)
    by_device = [c for c in module.channels.values() if c.via in (None, "fake")]
    streams = NcclCommunicator(pool, by_device, world.rank)
    host = HostCommunicator(*world.shared["host"], world.rank)
    serving: dict[int, Any] = {
        id_: streams if channel.via in (None, "fake") else host
        for id_, channel in module.channels.items()
    }
    linked = LinkedProgram(module, world.rank, bodies or {}, constants or {}, serving)
    return DeviceExecutable(linked, device)


def pause(polls: int) -> None:
    """Give way to other threads; not for ever."""
    if polls > PATIENCE / _NAP:
        raise TimeoutError(f"a rank has polled {polls} times in vain")
    threading.Event().wait(_NAP)


_NAP = 0.0005


def play(
    module: Module,
    inputs: Sequence[Sequence[Sequence[Any]]],
    bodies: Any = None,
    **options: Any,
) -> list[list[tuple[Any, ...]]]:
    """Execute a module once for each of `inputs`; for each execution the outputs by rank.

    Args:
        inputs: by execution, then rank, then parameter.
    """

    def run(world: ThreadWorld) -> list[tuple[Any, ...]]:
        executable = bound(world, module, bodies, **options)
        found = []
        for values in inputs:
            outputs = executable.run(values[world.rank], pause)
            found.append(
                tuple(v.clone().cpu() if isinstance(v, torch.Tensor) else v for v in outputs)
            )
            world.barrier()
        return found

    by_rank = on_ranks(len(module.programs), run)
    return [[by_rank[rank][i] for rank in range(len(by_rank))] for i in range(len(inputs))]


__all__ = ["DeviceBinder", "World", "bound", "on_ranks", "pause", "play"]
