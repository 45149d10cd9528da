"""Find one order for the messages of all ranks, and pairs that may be one operation.

The programs are run on paper, with sends, receives and collectives on a stream each. The order is
that in which messages begin to travel there. Two messages that cross become one operation if no
rank waits for the first before the second begins: this delays no rank by more than the time for
which they travel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import TypeAlias

from ...ir.ops import Call, Communication, Op, Send
from ...ir.ops.clone import clone
from ...ir.ops.module import Module
from ...ir.verify.communication import Progress
from ...ir.verify.message_matching import Message
from .assign_streams import AssignStreams

WORK, TRAVEL, POST = 1.0, 0.1, 0.001
"""The times of an actor's call, of a message, and of posting a message, in some unit.

Posting takes time, so that a message that is posted behind a wait begins after the awaited one."""

Key: TypeAlias = tuple[int, int]
"""The channel and number of a message."""


def message_order(
    module: Module, channels: Collection[int], pairs: bool
) -> list[tuple[Key, ...]] | None:
    """The messages of some channels in an order that every rank can follow.

    A message comes behind all messages that one of its ranks waits for before it posts the message,
    and behind the previous message of its channel. These begin to travel earlier. If one of them is
    paired with a later message, that message begins before any rank waits for the pair.

    Args:
        module: a scheduled module without streams.
        channels: the ids of channels between two ranks.
        pairs: whether two messages that cross may become one operation.

    Returns:
        Single messages, or pairs that cross, in order; None if the programs do not come to their
        end.
    """
    progress = _on_paper(module)
    if not progress.run():
        return None
    messages = [message for message in progress.messages.values() if message.chan in channels]
    messages.sort(key=lambda message: (message.start, message.chan, message.seq))
    # Single messages and pairs, by their later message and in its order.
    units: dict[Message, tuple[Message, ...]] = {}
    # The latest message of each channel, by source and target, if it is in no pair so far.
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
    """The ranks from which and to which a message goes."""
    (source,) = (rank for rank, op in message.ends.items() if isinstance(op, Send))
    (target,) = (rank for rank in message.ends if rank != source)
    return source, target
