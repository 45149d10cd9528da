"""Let several scheduled modules run over the same channels, one execution after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ir.attributes import Traffic
from ...ir.ops import Collective, Recv, Send
from ...ir.ops.module import Channel, Module

_Key = tuple[tuple[int, ...], bool, str | None, Traffic | None, int]


def share_channels(modules: Sequence[Module]) -> list[Channel]:
    """Number the channels of all modules anew, so that modules share channels that are alike.

    Channels are alike if they join the same ranks by the same transport, for the same traffic; the
    n-th such channel of one module is the n-th of another. A shared channel is large enough for all
    its modules.

    Returns:
        The channels, in ascending order of their new ids.
    """
    shared: dict[_Key, Channel] = {}
    for module in modules:
        ids = {}
        seen: dict[object, int] = {}
        for channel in sorted(module.channels.values(), key=lambda channel: channel.id):
            kind = (channel.ranks, channel.collective, channel.via, channel.traffic)
            count = seen[kind] = seen.get(kind, -1) + 1
            known = shared.get((*kind, count))
            if known is None:
                known = replace(channel, id=len(shared))
            shared[(*kind, count)] = _larger(known, channel)
            ids[channel.id] = known.id
        _renumber(module, ids)
    channels = {channel.id: channel for channel in shared.values()}
    for module in modules:
        module.channels = {id_: channels[id_] for id_ in sorted(module.channels)}
    return list(channels.values())


def _larger(one: Channel, other: Channel) -> Channel:
    if one.slots is None or other.slots is None:
        return one
    slot_bytes = max(one.slot_bytes or 0, other.slot_bytes or 0)
    return replace(one, slots=max(one.slots, other.slots), slot_bytes=slot_bytes)


def _renumber(module: Module, ids: dict[int, int]) -> None:
    module.channels = {ids[id_]: channel for id_, channel in module.channels.items()}
    for program in module.programs:
        for op in program.ops:
            if isinstance(op, (Send, Recv, Collective)) and op.chan is not None:
                op.chan = ids[op.chan]
