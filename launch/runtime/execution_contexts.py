"""Make the execution contexts of a driven graph, and connect them to those of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, permutations

from ...backends.base import Communicator, World
from ...backends.device import Device
from ...backends.devices.programs.device_only import DeviceOnlyBinder
from ...backends.devices.programs.driven import DrivenBinder, HostHandshake
from ...backends.devices.programs.instance import DeviceOnlyInstance, HandshakeInstance, Shared
from ...backends.devices.programs.pending_work import named
from ...backends.devices.programs.watchdog import Watchdog, advice, put_by
from ...backends.driven.arrange import Reports
from ...backends.driven.graphs import Rebuild
from ...backends.driven.instance import Guard, Instance
from ...backends.driven.rank_scheduler import ExecutionContext, RankScheduler
from ...backends.failures.flight import FlightRecord, Position
from ...backends.failures.participants import is_device_only, participants
from ...backends.failures.unobserved_failures import unobserved_ranks
from ...backends.program.binder import Binder
from ...backends.program.linked import LinkedModule, LinkedProgram
from ...backends.program.ticket_locks import Tickets
from ...backends.streams.communicator import StreamCommunicator
from ...backends.timing.statistics import Statistics
from ...backends.virtual.fabric import VirtualFabric
from ...ir.ops import Recv, Send
from ...ir.ops.module import Channel, Module
from ...ir.types import UnitType
from ...passes.placement.fabrics import is_by_stream
from ...tracer.checked_ids import noted
from ..world.communicators import connect_channels, faults_of, logs_of
from ..world.devices import fabrics_of
from ..world.fault_hook import say_faults
from .runtime import transport_of

Pair = tuple[int, int]
"""Two ranks, of which the first reports to the second."""


@dataclass(frozen=True)
class GraphVariant:
    """A variant of a graph, as one process has it.

    Attributes:
        linked: the scheduled module, and what the ranks that this process plays run it with.
        guards: returns the guards of a rank's actors, if this process plays the rank.
        rebuild: makes the results of the step; None where the driver gets nothing.
    """

    linked: LinkedModule
    guards: Callable[[int], Sequence[Guard]]
    rebuild: Rebuild | None


@dataclass(frozen=True)
class Connections:
    """The communicators of one execution context of a rank.

    Attributes:
        host: serves messages from host to host, announcements and reports included.
        serving: for each variant the communicators of its channels, by id.
        streams: the communicators from device to device.
    """

    host: Communicator
    serving: Sequence[Mapping[int, Communicator]]
    streams: Sequence[StreamCommunicator] = ()

    def close(self) -> None:
        """Close the communicators; idempotent."""
        for communicator in (*self.streams, self.host):
            communicator.close()


class OnDevice:
    """The device of a rank, as the execution contexts of a graph share it.

    Args:
        world: all ranks.
        device: of this rank.
        scheduler: of this rank.
        timeout: seconds that an execution may take on the device; None for no limit.
    """

    def __init__(
        self, world: World, device: Device, scheduler: RankScheduler, timeout: float | None
    ) -> None:
        self.device = device
        self._world = world
        self._scheduler = scheduler
        self._streams: list[StreamCommunicator] = []
        self._whole: list[DeviceOnlyInstance] = []
        faults = partial(faults_of, self._streams)
        end = world.end_job
        self.watchdog = Watchdog(
            *(device, timeout, faults, self.give_up, self._putting, end),
            lambda: noted(device.torch_device),
        )
        say_faults(end)

    def make(self, instances: Sequence[Instance], connections: Connections) -> ExecutionContext:
        """A context, whose resources are given back once the device has nothing to do."""
        self._streams += connections.streams
        device_only_instances = [
            instance for instance in instances if isinstance(instance, DeviceOnlyInstance)
        ]
        self._whole += device_only_instances
        for communicator in connections.streams if device_only_instances else ():
            communicator.hold(self)

        def close() -> None:
            self.watchdog.close()
            self.device.synchronize()
            for instance in device_only_instances:
                instance.drop_graphs()
            connections.close()

        return ExecutionContext(tuple(instances), close)

    def in_flight(self) -> Sequence[Instance]:
        """The executions of the rank, in the order of their start."""
        return self._scheduler.in_flight

    def drop_graphs(self) -> None:
        """Drop the graphs with messages; idempotent."""
        for instance in self._whole:
            instance.drop_graphs()

    def _putting(self) -> Position | None:
        """The place where the host puts work on the device at the moment, if it does."""
        busy = (
            instance for instance in self._scheduler.in_flight if instance.engine.pending is None
        )
        return next(filter(None, map(put_by, busy)), None)

    def give_up(self, trouble: str) -> None:
        """End the job: the device does not end its work."""
        rank = self._scheduler.rank
        records = [
            FlightRecord(
                instance.module,
                [instance.position()],
                (rank,),
                f"execution {instance.execution} of {named(instance.module)}: ",
            )
            for instance in self._scheduler.in_flight
        ]
        others = [other for other in range(self._world.size) if other != rank]
        where = transport_of(self._world).control.where(others, records)
        if not records:
            where = (
                f"  rank {rank} is in no execution: all that it was given is on its device\n{where}"
            )
        head = f"{trouble}\nHere is where the host of every rank is:\n{where}".rstrip()
        self._world.end_job(head + advice(logs_of(self._streams)))


class ContextFactory:
    """Makes the execution contexts of a graph; the first of a world is collective.

    Args:
        world: all ranks.
        variants: of the graph.
        channels: of all variants.
        driver: the rank that starts executions.
        on_device: of this rank, if it has a device.
    """

    def __init__(
        self,
        world: World,
        variants: Sequence[GraphVariant],
        channels: Sequence[Channel],
        driver: int,
        on_device: OnDevice | None,
    ) -> None:
        self._world = world
        self._variants = variants
        self._driver = driver
        self._on_device = on_device
        fabrics = fabrics_of(world)
        numbers = count(len(channels))
        # The channels by which hosts announce messages on streams, by the id of their channel.
        self._announcing = {
            c.id: replace(c, id=next(numbers), via=None, slots=0, slot_bytes=0)
            for c in channels
            if fabrics is not None and c.via is not None and fabrics.knows(c.via)
        }
        # For each variant, the pairs of ranks of which the first reports to the second.
        self._pairs = [_reports_of(variant.linked.module, driver) for variant in variants]
        self._reporting = {
            pair: Channel(next(numbers), pair, slots=0, slot_bytes=0)
            for pair in sorted(set[Pair]().union(*self._pairs))
        }
        self._hosts = [c for c in channels if world.is_virtual or not is_by_stream(c)]
        self._hosts += [*self._announcing.values(), *self._reporting.values()]

    def connect(self) -> Mapping[int, Connections]:
        """The connections of one context of each rank that this process plays; collective."""
        world = self._world
        modules = [variant.linked.module for variant in self._variants]
        if world.is_virtual:
            fabric = VirtualFabric()
            communicators = {rank: fabric.communicator(rank) for rank in range(world.size)}
            return {
                rank: Connections(
                    communicator, [dict.fromkeys(m.channels, communicator) for m in modules]
                )
                for rank, communicator in communicators.items()
            }
        transport = transport_of(world)
        host = transport.communicator(world, self._hosts)
        # Each variant has slots of its own: it alone knows when they are free.
        connected = [
            connect_channels(world, transport, list(module.channels.values()), module.name, host)
            for module in modules
        ]
        streams = [c for connection in connected for c in connection.streams]
        return {
            world.rank: Connections(host, [connection.serving for connection in connected], streams)
        }

    def make(
        self, scheduler: RankScheduler, connections: Connections, statistics: Statistics
    ) -> ExecutionContext:
        """An execution context of one rank."""
        instances = []
        host, rank = connections.host, scheduler.rank
        announcements = {channel.id: host for channel in self._announcing.values()}
        for variant, pairs, serving in zip(
            self._variants, self._pairs, connections.serving, strict=True
        ):
            linked = variant.linked.program(rank, {**serving, **announcements})
            # The driver's guards are checked before it starts an execution at all.
            guards = () if rank == self._driver else variant.guards(rank)
            reports = self._reports(rank, pairs, host)
            shared = (statistics, guards, reports)
            instances.append(self._instance(linked, Tickets(scheduler.locks), shared, host))
        if self._on_device is not None:
            return self._on_device.make(instances, connections)

        # A third party's transport can be reset, but the reset may not stand an interruption.
        reset = None if connections.streams else host.reset
        return ExecutionContext(tuple(instances), connections.close, reset)

    def _instance(
        self,
        linked: LinkedProgram,
        tickets: Tickets,
        shared: Shared,
        host: Communicator,
    ) -> Instance:
        on_device = self._on_device
        if on_device is None:
            return Instance(linked, Binder(linked, tickets).bind(), *shared)
        device, watchdog = on_device.device, on_device.watchdog
        if is_device_only(linked.module):
            device_only_binder = DeviceOnlyBinder(linked, tickets, device=device)
            abandon, in_flight = on_device.give_up, on_device.in_flight
            return DeviceOnlyInstance(device_only_binder, shared, watchdog, abandon, in_flight)
        announcing = self._announcing.items()
        handshakes = {id_: HostHandshake(host, channel) for id_, channel in announcing}
        binder = DrivenBinder(linked, tickets, device=device, handshakes=handshakes)
        return HandshakeInstance(binder, shared, watchdog)

    def _reports(self, rank: int, pairs: Sequence[Pair], host: Communicator) -> Reports:
        send, receive = [], []
        for pair in pairs:
            channel, (reporter, recipient) = self._reporting[pair], pair
            if reporter == rank:
                op = Send(chan=channel.id, peer=recipient)
                send.append(host.send_port(op, channel, UnitType()))
            elif recipient == rank:
                recv = Recv(chan=channel.id, peer=reporter)
                receive.append((reporter, host.recv_port(recv, channel, UnitType())))
        return Reports(tuple(send), tuple(receive))


def _reports_of(module: Module, driver: int) -> tuple[Pair, ...]:
    """The pairs of ranks of which the first reports to the second; see `Reports`."""
    if is_device_only(module):
        return tuple(permutations(sorted({driver, *participants([module], driver)}), 2))
    return tuple((rank, driver) for rank in unobserved_ranks(module, driver))
