"""One order for the messages of all ranks, and which of them may be one operation.

The programs are run on paper, with sends, receives and collectives on a stream each. Messages are
put in the order in which they begin to travel there. Two that cross are one where the first is not
wanted before the second begins: that costs nobody more than the time in which they travel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import TypeAlias

from ...ir.ops import Call, Communication, Op, Send
from ...ir.ops.clone import clone
from ...ir.ops.module import Module
from ...ir.verify.communication import Message, Progress
from .assign_streams import AssignStreams

WORK, TRAVEL, POST = 1.0, 0.1, 0.001
"""The time of an actor's call, of a message, and of posting one, in some unit.

That posting takes time puts what is posted behind a wait behind what has been waited for."""

Key: TypeAlias = tuple[int, int]
"""Channel and number of a message."""


def message_order(
    module: Module, channels: Collection[int], pairs: bool = True
) -> list[tuple[Key, ...]] | None:
    """The messages of some channels in an order that every rank can follow.

    A message comes behind all that one of its ranks waits for before it posts it, and behind the
    last one of its channel: these begin earlier, and what they have been put off to begins before
    anybody wants them.

    Args:
        module: scheduled, without streams.
        channels: edges.
        pairs: whether two that cross may be one.

    Returns:
        Messages alone, or two that cross; None if the programs do not come to their end.
    """
    progress = _on_paper(module)
    if not progress.run():
        return None
    messages = [message for message in progress.messages.values() if message.chan in channels]
    messages.sort(key=lambda message: (message.start, message.chan, message.seq))
    # By the later message of each, in the order of these.
    units: dict[Message, tuple[Message, ...]] = {}
    # The latest message of each channel, by source and destination, if it is alone so far.
    alone: defaultdict[tuple[int, int], dict[int, Message]] = defaultdict(dict)
    for message in messages:
        source, target = _edge(message)
        alone[source, target].pop(message.chan, None)
        crossing = alone[target, source]
        partner = next((m for m in crossing.values() if m.wanted >= message.start), None)
        if partner is None or not pairs:
            alone[source, target][message.chan] = message
            units[message] = (message,)
        else:
            del crossing[partner.chan], units[partner]
            units[message] = (partner, message)
    return [tuple((part.chan, part.seq) for part in unit) for unit in units.values()]


def _on_paper(module: Module) -> Progress:
    twin = clone(module)
    AssignStreams().run(twin)
    return Progress(twin, _cost(twin), lambda message: TRAVEL)


def _cost(module: Module) -> Callable[[Op], float]:
    actors = {name for name, function in module.functions.items() if function.actor is not None}

    def cost(op: Op) -> float:
        if isinstance(op, Communication):
            return POST
        return WORK if isinstance(op, Call) and op.fn.name in actors else 0.0

    return cost


def _edge(message: Message) -> tuple[int, int]:
    """From which rank to which a message goes."""
    (source,) = (rank for rank, op in message.ends.items() if isinstance(op, Send))
    (target,) = (rank for rank in message.ends if rank != source)
    return source, target
