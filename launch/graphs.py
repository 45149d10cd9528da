"""Makes the graph of compiled variants: seats on every rank, opened in the world's executions."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from ..backends.base import Body, Communicator, World
from ..backends.binder import Binder
from ..backends.cpu.node import MpiWorld
from ..backends.cpu.record_ring import RecordRing
from ..backends.cpu.serving import Serving
from ..backends.devices.base import Device
from ..backends.devices.hosted import HostedBinder
from ..backends.executions import Executions, virtual_executions
from ..backends.fabric import VirtualFabric
from ..backends.graphs import Graph, Rebuild
from ..backends.instance import Guard, Instance, Reports
from ..backends.linked import LinkedProgram
from ..backends.plan import check_plan
from ..backends.records import SEATS, VARIANTS
from ..backends.resident import Resident, Seat
from ..backends.statistics import Statistics
from ..backends.variants import share_channels
from ..backends.witnesses import witnesses
from ..ir.module import Channel, Module
from ..ir.ops import Recv, Send
from ..ir.types import UnitType
from .runtime import transport_of


@dataclass(frozen=True)
class Variant:
    """What a graph does for one signature.

    Attributes:
        module: scheduled.
        bodies, constants: what the ranks that this process plays run with.
        guards: what the traces of this process's actors rely on.
        rebuild: makes what the step returns; None where the driver gets nothing.
    """

    module: Module
    bodies: Mapping[str, Body]
    constants: Mapping[str, Any]
    guards: Sequence[Guard]
    rebuild: Rebuild | None


@dataclass(frozen=True)
class Made:
    """A graph, what runs it, and what this process measures of it, by rank."""

    executions: Executions
    graph: Graph
    statistics: Mapping[int, Statistics]


_worlds: WeakKeyDictionary[World, Executions] = WeakKeyDictionary()


def executions_of(world: World) -> Executions:
    """The executions of a world; made once, on all ranks."""
    found = _worlds.get(world)
    if found is None:
        if world.is_virtual:
            found = virtual_executions(world.size)
        else:
            found = _cpu_executions(world)  # type: ignore[arg-type] # only MPI's is not virtual
        use_executions(world, found)
    return found


def check_idle(world: World) -> None:
    """Return if a step that all ranks run together may start.

    Raises:
        RuntimeError: an execution of a graph is in flight on a rank of this process.
    """
    executions = _worlds.get(world)
    if executions is not None and not executions.is_idle:
        raise RuntimeError(
            "executions of a graph are in flight on this rank: wait for their results, or close "
            "the graph, before a step that all ranks run together"
        )


def use_executions(world: World, executions: Executions) -> None:
    """Let a world's graphs be those of `executions`; before any graph of it is compiled."""
    _worlds[world] = executions
    # After the hook of the transport, which therefore runs later.
    atexit.register(_close_all, ref(executions))


def _close_all(executions: ref[Executions]) -> None:
    """At the interpreter's exit: as the driver, close every graph that is still open."""
    alive = executions()
    if alive is None:
        return
    for graph in tuple(alive.graphs.values()):
        if graph.driver in alive.residents:
            alive.close(graph)


def make_graph(
    world: World, name: str, driver: int, variants: Sequence[Variant], capacity: int, seed: int
) -> Made:
    """Bind a graph on all ranks, and open it; collective.

    Args:
        world: all ranks.
        name: of the step.
        driver: the rank that starts executions.
        variants: one for each signature, in the same order on all ranks.
        capacity: how many executions may be in flight.
        seed: of all random numbers.

    Raises:
        PlanMismatch: the ranks have compiled different plans.
        RuntimeError: open graphs of the world have another driver.
        ValueError: there are more variants or executions in flight than records can name.
    """
    if not 1 <= capacity <= SEATS:
        raise ValueError(f"max_inflight={capacity}: it is at least 1, and at most {SEATS}")
    if len(variants) > VARIANTS:
        raise ValueError(f"{len(variants)} variants: a graph has at most {VARIANTS}")
    modules = [variant.module for variant in variants]
    channels = share_channels(modules)
    if not world.is_virtual:
        for module in modules:
            check_plan(module, world)
    executions = executions_of(world)
    executions.claim(driver)
    silent = [witnesses(module, driver) for module in modules]
    reporting = _report_channels(silent, driver, len(channels))
    statistics = {rank: Statistics() for rank in executions.residents}
    maker = _Maker(variants, silent, reporting, driver, seed, statistics, world.device)
    seats: dict[int, list[Seat]] = {rank: [] for rank in executions.residents}
    everything = [*channels, *reporting.values()]
    for _ in range(capacity):
        communicators = _communicators(world, everything)
        for rank, resident in executions.residents.items():
            seats[rank].append(maker.seat(resident, communicators[rank]))
    graph = Graph(name, driver, modules, seats, [variant.rebuild for variant in variants])
    executions.open(graph)
    return Made(executions, graph, statistics)


class _Maker:
    """Makes the seats of a graph."""

    def __init__(
        self,
        variants: Sequence[Variant],
        silent: Sequence[tuple[int, ...]],
        reporting: Mapping[int, Channel],
        driver: int,
        seed: int,
        statistics: Mapping[int, Statistics],
        device: Device | None,
    ) -> None:
        self._binder: Callable[..., Binder] = Binder
        if device is not None:
            self._binder = partial(HostedBinder, device=device)
        self._variants = variants
        self._silent = silent
        self._reporting = reporting
        self._driver = driver
        self._seed = seed
        self._statistics = statistics

    def seat(self, resident: Resident, communicator: Communicator) -> Seat:
        """A seat on one rank."""
        instances = []
        for variant, silent in zip(self._variants, self._silent, strict=True):
            module = variant.module
            linked = LinkedProgram(
                module,
                resident.rank,
                variant.bodies,
                variant.constants,
                dict.fromkeys(module.channels, communicator),
                self._seed,
            )
            # The driver's guards are checked before it starts an execution at all.
            guards = () if resident.rank == self._driver else variant.guards
            instances.append(
                Instance(
                    linked,
                    resident.turnstiles,
                    self._statistics[resident.rank],
                    guards,
                    self._reports(resident.rank, silent, communicator),
                    self._binder,
                )
            )
        return Seat(tuple(instances), communicator)

    def _reports(
        self, rank: int, silent: tuple[int, ...], communicator: Communicator
    ) -> Reports | None:
        if rank == self._driver:
            ports = []
            for other in silent:
                channel = self._reporting[other]
                recv = Recv(chan=channel.id, peer=other)
                ports.append(communicator.recv_port(recv, channel, UnitType()))
            return Reports(receive=tuple(ports))
        if rank in silent:
            channel = self._reporting[rank]
            send = Send(chan=channel.id, peer=self._driver)
            return Reports(send=communicator.send_port(send, channel, UnitType()))
        return None


def _report_channels(
    silent: Sequence[tuple[int, ...]], driver: int, first: int
) -> dict[int, Channel]:
    """A channel to the driver for each rank that has to report in some variant."""
    ranks = sorted(set[int]().union(*silent))
    return {
        rank: Channel(first + index, (rank, driver), slots=0, slot_bytes=0)
        for index, rank in enumerate(ranks)
    }


def _communicators(world: World, channels: Sequence[Channel]) -> Mapping[int, Communicator]:
    """A communicator for each rank that this process plays; collective."""
    if world.is_virtual:
        fabric = VirtualFabric()
        return {rank: fabric.communicator(rank) for rank in range(world.size)}
    transport = transport_of(world)  # type: ignore[arg-type] # only MPI's is not virtual
    return {world.rank: transport.communicator(world, channels)}


def _cpu_executions(world: MpiWorld) -> Executions:
    transport = transport_of(world)
    serving = Serving(transport.node)

    def records(driver: int) -> RecordRing:
        return RecordRing(transport.node, driver, serving.pause_simply)

    return Executions((world.rank,), records, serving)
