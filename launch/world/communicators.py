"""Make the communicators of a step: one for each transport that its channels name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...backends.base import Communicator, World
from ...backends.cpu.transport import CpuTransport
from ...backends.fake.communicator import connect as connect_by_fake
from ...backends.hccl.communicator import HcclCommunicator
from ...backends.hccl.communicator import connect as connect_by_hccl
from ...backends.nccl.communicator import NcclCommunicator
from ...backends.nccl.communicator import connect as connect_by_nccl
from ...backends.streams.communicator import StreamCommunicator
from ...backends.transports.registry import ENTRY_POINTS, create, register, transports
from ...ir.ops import Collective, Transfer
from ...ir.ops.module import Channel, Program
from ...ir.text.diagnostics import error
from ...passes.placement.fabrics import HOST, is_by_stream
from ..environment.config import config


def _connect_by_nccl(world: World, channels: Sequence[Channel]) -> NcclCommunicator:
    return connect_by_nccl(world, channels, config().nccl_nonblocking)


def _connect_by_hccl(world: World, channels: Sequence[Channel]) -> HcclCommunicator:
    return connect_by_hccl(world, channels, config().hccl_library)


register("nccl", _connect_by_nccl)
register("hccl", _connect_by_hccl)
register("fake", connect_by_fake)


def check_transports(program: Program) -> None:
    """Return if every transport that a traced step names is known in this process.

    A virtual world needs none of them, but checks, too: a wrong name is wrong everywhere.

    Raises:
        IRError: a transport is not known.
    """
    asked = [op for op in program.ops if isinstance(op, Transfer | Collective) and op.via]
    if not asked:
        return
    known = transports()
    for op in asked:
        if op.via not in known:
            raise error(
                f"there is no transport '{op.via}'; known are: {', '.join(known)}",
                op=op,
                program=program,
                help="write one of these names in cg.via, or install the package that adds this "
                f"one (by an entry point of group '{ENTRY_POINTS}') on all ranks",
            )


@dataclass(frozen=True, slots=True)
class Connected:
    """The communicators of some channels.

    Attributes:
        communicators: each once.
        serving: the communicator of each channel, by channel id.
    """

    communicators: tuple[Communicator, ...]
    serving: Mapping[int, Communicator]

    @property
    def streams(self) -> tuple[StreamCommunicator, ...]:
        """The communicators that put messages on streams of devices."""
        return tuple(
            communicator
            for communicator in self.communicators
            if isinstance(communicator, StreamCommunicator)
        )


def connect_channels(
    world: World,
    transport: CpuTransport,
    channels: Sequence[Channel],
    step: str,
    host: Communicator | None = None,
) -> Connected:
    """Make the communicators that channels need, in one order on all ranks; collective.

    Args:
        transport: makes the communicator of the channels of hosts.
        step: the name of the step that has the channels, for messages.
        host: the communicator of the channels of hosts. If None, one is made, even if there are
            no such channels.

    Raises:
        UnknownCommunicator: a channel names a transport that is not registered.
        BindError: a transport cannot carry a message that its channel has.
    """
    by_name: dict[str, list[Channel]] = {HOST: []}
    for channel in channels:
        name = str(channel.via) if is_by_stream(channel) else HOST
        by_name.setdefault(name, []).append(channel)
    communicators: list[Communicator] = []
    serving: dict[int, Communicator] = {}
    for name in sorted(by_name):
        served = by_name[name]
        if name != HOST:
            communicator = create(name, world, served)
            if isinstance(communicator, StreamCommunicator):
                communicator.of_step(step)
        elif host is None:
            communicator = transport.communicator(world, served)
        else:
            communicator = host
        communicators.append(communicator)
        serving.update(dict.fromkeys((channel.id for channel in served), communicator))
    return Connected(tuple(communicators), serving)


def logs_of(communicators: Iterable[StreamCommunicator]) -> list[str]:
    """The names of the logs of transports between devices, each once, for messages."""
    return list(dict.fromkeys(communicator.logs for communicator in communicators))


def faults_of(communicators: Iterable[StreamCommunicator]) -> list[str]:
    """The failures that transports between devices report, in words."""
    return [fault for communicator in communicators for fault in communicator.faults()]
