"""Ranks as threads of one process, each with a fake device, and a host's transport between them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cg.backends.base import World
from cg.backends.devices.binder import DeviceBinder
from cg.backends.devices.executable import DeviceExecutable
from cg.backends.linked import LinkedProgram
from cg.backends.nccl.communicator import NcclCommunicator
from cg.backends.nccl.pool import NcclPool
from cg.backends.poison import Poison
from cg.backends.values import duplicate
from cg.ir.module import Channel, Module

from .fakes import PATIENCE, FakeDevice, FakeLibrary


class ThreadWorld:
    """A `World` whose ranks are threads."""

    is_virtual = False

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank = rank
        self.size = size
        self.nodes = [0] * size
        self.shared = shared
        self.device: Any = None

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
    """What `play` returns on each rank; raises what the lowest rank raised."""
    shared: dict[str, Any] = {"barrier": threading.Barrier(size), "values": {}, "host": {}}
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
    """A transport of the host: a queue for each channel; sends and receives only."""

    def __init__(self, world: ThreadWorld) -> None:
        self._queues = world.shared["host"]

    def send_port(self, op: Any, channel: Channel, type_: Any) -> Any:
        return _HostPort(self._queue(channel), type_, sends=True)

    def recv_port(self, op: Any, channel: Channel, type_: Any) -> Any:
        return _HostPort(self._queue(channel), type_, sends=False)

    def collective_port(self, op: Any, channel: Channel, operand: Any, result: Any) -> Any:
        raise NotImplementedError

    def progress(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _queue(self, channel: Channel) -> queue.Queue[Any]:
        return self._queues.setdefault(channel.id, queue.Queue())  # type: ignore[no-any-return]


class _HostPort:
    def __init__(self, line: queue.Queue[Any], type_: Any, sends: bool) -> None:
        self._line = line
        self._type = type_
        self._sends = sends
        self._value: Any = None

    def start(self, value: Any) -> None:
        if self._sends:
            self._line.put(duplicate(value, self._type))

    def fail(self, poison: Poison) -> None:
        self._line.put(poison)

    def poll(self) -> bool:
        if self._sends:
            return True
        try:
            self._value = self._line.get_nowait()
        except queue.Empty:
            return False
        return True

    def take(self) -> Any:
        return self._value

    def release(self) -> None:
        self._value = None


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
    device = world.device = FakeDevice(world.rank, delay)
    library = FakeLibrary(device)
    pool = NcclPool(world, device, library)
    by_device = [c for c in module.channels.values() if c.via in (None, "fake")]
    streams = NcclCommunicator(pool, by_device, world.rank)
    host = HostCommunicator(world)
    serving: dict[int, Any] = {
        id_: streams if channel.via in (None, "fake") else host
        for id_, channel in module.channels.items()
    }
    linked = LinkedProgram(module, world.rank, bodies or {}, constants or {}, serving)
    return DeviceExecutable(linked, device)


def pause(polls: int) -> None:
    """Give way to other threads."""
    threading.Event().wait(0.0005)


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
            outputs = executable.run(values[world.rank], pause, PATIENCE)
            found.append(tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in outputs))
            world.barrier()
        return found

    by_rank = on_ranks(len(module.programs), run)
    return [[by_rank[rank][i] for rank in range(len(by_rank))] for i in range(len(inputs))]


__all__ = ["DeviceBinder", "World", "bound", "on_ranks", "pause", "play"]
