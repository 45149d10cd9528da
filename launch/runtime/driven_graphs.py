"""Make a driven graph of compiled variants, and open it in the world's executions."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ref

from ...backends.agreement.plan_hash import check_plan
from ...backends.base import World
from ...backends.cpu.control.command_ring import CommandRing
from ...backends.cpu.control.restart_epochs import SharedRestartEpochs
from ...backends.cpu.control.serving import Serving
from ...backends.device import Device
from ...backends.devices.programs.tail import follow_tails
from ...backends.driven.commands import CONTEXTS, VARIANTS
from ...backends.driven.execution_launcher import ExecutionLauncher
from ...backends.driven.executions import Executions
from ...backends.driven.futures import Future
from ...backends.driven.graphs import DrivenGraph
from ...backends.driven.rank_scheduler import ExecutionContext
from ...backends.driven.shared_channels import share_channels
from ...backends.errors import StepTimeout
from ...backends.per_world import PerWorld
from ...backends.timing.statistics import Statistics
from ...backends.virtual.virtual_executions import virtual_executions
from ..job import failure
from ..world.devices import fabrics_of
from .execution_contexts import ContextFactory, GraphVariant, OnDevice
from .runtime import is_in_step, mark_of, transport_of, transports

Launch = Callable[[int, Sequence[Any], bool], Future]
"""Starts an execution: the variant, its inputs, and whether to wait for a free context."""


@dataclass(frozen=True)
class OpenGraph:
    """A graph, as one process holds it.

    Attributes:
        executions: those of the world, which run it.
        graph: the graph.
        statistics: the measurements of this process, by rank.
        recover: called on all ranks before they go on with the graph: after a failed step, messages
            between devices have been broken off. None where there are no devices.
        device: of this rank, if it has one.
        mark: the number of executions that the driver has started, as `mark_of` makes it; None on
            other ranks.
    """

    executions: Executions
    graph: DrivenGraph
    statistics: Mapping[int, Statistics]
    recover: Callable[[], None] | None
    device: Device | None
    mark: memoryview | None

    def serve(self) -> None:
        """Run this process's part of the graph until the driver closes it.

        One session of the device spans all executions: to enter one for each would cost as much as
        a message.
        """
        device = self.device
        with nullcontext() if device is None else device.session():
            try:
                self.executions.serve(self.graph)
            finally:
                if device is not None:
                    follow_tails(device, (device.caller(),))

    @property
    def started(self) -> int:
        """The number of executions that the driver has started, as far as this process knows."""
        graph = self.graph
        started_counts = [graph.started[rank] for rank in self.executions.schedulers]
        return graph.count if graph.driver in self.executions.schedulers else max(started_counts)

    def go_on_from(self, execution: int) -> None:
        """Let the next execution have this number; on all ranks, and none is in flight."""
        self.graph.go_on_from(execution, self.executions.schedulers)

    @property
    def launch(self) -> Launch | None:
        """Starts executions; None if this process does not play the driver."""
        if self.mark is None:
            return None
        launcher, recover = ExecutionLauncher(self.executions, self.graph, self.mark), self.recover
        if recover is None:
            return launcher

        def launch(variant: int, inputs: Sequence[Any], block: bool) -> Future:
            recover()
            return launcher(variant, inputs, block)

        return launch


_executions: PerWorld[Executions] = PerWorld()


def executions_of(world: World) -> Executions:
    """The executions of a world; made once, on all ranks."""
    executions = _executions.get(world)
    if executions is None:
        is_virtual = world.is_virtual
        executions = virtual_executions(world.size) if is_virtual else _cpu_executions(world)
        use_executions(world, executions)
    return executions


def idle_check(world: World, step: str) -> Callable[[], None]:
    """Make the check that a step that all ranks run together may start.

    The check raises `RuntimeError` if an execution of a graph is in flight on a rank of this
    process, or a method is running. Each call of the step makes it, so it looks nothing up.
    """
    graphs, transport = _executions.entry(world), transports.entry(world)

    def check() -> None:
        executions, others = graphs.thing, transport.thing
        is_idle = executions is None or executions.is_idle
        if is_idle and (others is None or not others.control.is_running):
            return
        check_outside(world, step)
        raise RuntimeError(
            "executions of a graph are in flight on this rank: wait for their results, or close "
            "the graph, before a step that all ranks run together"
        )

    return check


def check_outside(world: World, step: str) -> None:
    """Return unless a method is running: only its own rank would come to `step`, and wait.

    Raises:
        RuntimeError: one is.
    """
    executions = _executions.get(world)
    schedulers = () if executions is None else executions.schedulers.values()
    if is_in_step(world) or any(scheduler.is_busy for scheduler in schedulers):
        raise RuntimeError(
            f"step '{step}' is used in a method of an actor, where the other ranks do not come to "
            "it: call it in the program of all ranks, or its plain function in the step that "
            "calls the method"
        )


def use_executions(world: World, executions: Executions) -> None:
    """Use `executions` for a world's graphs; called before any graph of it is compiled."""
    _executions.of(world, lambda: executions)
    # After the hook of the transport, which therefore runs later.
    atexit.register(_close_all, ref(world))


def _close_all(world: ref[World]) -> None:
    """At the interpreter's exit: as the driver, close every graph that is still open.

    Another rank reports that it leaves the graphs that the driver has not closed. So does a driver
    that cannot close them.
    """
    alive = world()
    executions = None if alive is None else _executions.get(alive)
    if alive is None or executions is None:
        return
    try:
        for graph in tuple(executions.graphs.values()):
            if graph.driver in executions.schedulers:
                # One that is overdue has waited long enough, and somebody has caught that.
                executions.close(graph, at_once=graph.overdue)
    except StepTimeout as error:
        if alive.is_virtual:
            raise
        failure.give_up(str(error))  # the others would wait for this rank at their ends
    finally:
        if executions.graphs and not alive.is_virtual:
            transport_of(alive).close(deserts=True)


def make_graph(
    world: World,
    name: str,
    driver: int,
    variants: Sequence[GraphVariant],
    capacity: int,
    timeout: float | None,
) -> OpenGraph:
    """Bind a graph on all ranks, and open it; collective.

    Args:
        world: all ranks.
        name: of the step.
        driver: the rank that starts executions.
        variants: one for each signature, in the same order on all ranks.
        capacity: how many executions may be in flight.
        timeout: seconds that an execution may take on a device once it has been put there; None
            for no limit.

    Raises:
        PlanMismatch: the ranks have compiled different plans.
        RuntimeError: open graphs of the world have another driver.
        ValueError: there are more variants or executions in flight than commands can name.
        UnknownCommunicator: a step names a transport that nobody has registered.
        BindError: a transport cannot carry a channel's messages.
    """
    if not 1 <= capacity <= CONTEXTS:
        raise ValueError(f"max_inflight={capacity}: it is at least 1, and at most {CONTEXTS}")
    if len(variants) > VARIANTS:
        raise ValueError(f"{len(variants)} variants: a graph has at most {VARIANTS}")
    modules = [variant.linked.module for variant in variants]
    channels = share_channels(modules)
    if not world.is_virtual:
        for module in modules:
            check_plan(module, world)
    executions = executions_of(world)
    executions.claim(driver)
    on_device = None
    if world.device is not None:
        on_device = OnDevice(world, world.device, executions.schedulers[world.rank], timeout)
    factory = ContextFactory(world, variants, channels, driver, on_device)
    statistics = {rank: Statistics() for rank in executions.schedulers}
    contexts: dict[int, list[ExecutionContext]] = {rank: [] for rank in executions.schedulers}
    for _ in range(capacity):
        connections = factory.connect()
        for rank, scheduler in executions.schedulers.items():
            try:
                contexts[rank].append(factory.make(scheduler, connections[rank], statistics[rank]))
            except BaseException:
                connections[rank].close()  # nobody else will
                raise
    if on_device is not None:
        on_device.device.synchronize()  # constants are there for all streams
    graph = DrivenGraph(name, driver, modules, contexts, [variant.rebuild for variant in variants])
    executions.open(graph)
    recover = None
    if fabrics_of(world) is not None:
        recover = transport_of(world).recover_if_due
    mark = mark_of(world, name) if driver in executions.schedulers else None
    return OpenGraph(executions, graph, statistics, recover, world.device, mark)


def _cpu_executions(world: World) -> Executions:
    transport = transport_of(world)
    serving = Serving(transport.node, transport.control.hear, transport.control.where)

    def commands(driver: int) -> CommandRing:
        return CommandRing(transport.node, driver, serving.pause_simply)

    spans = len(transport.node.leaders) > 1
    epochs = None if spans else SharedRestartEpochs(transport.node)
    executions = Executions(
        (world.rank,), commands, serving, epochs, on_departure=failure.say_departure
    )
    transport.node.world.answer_by(executions.doing)
    return executions
