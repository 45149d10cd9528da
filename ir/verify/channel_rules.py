"""Check channels: their declarations, and that each message has all its ends.

`check_channel_op` checks one op. `unmatched` compares, over all programs of a module, the two ends
of each channel, or the ends of all ranks of a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from itertools import pairwise, zip_longest
from operator import attrgetter
from typing import Any, TypeAlias

from ..alike.alike_programs import AlikePrograms
from ..ops import (
    OP_CLASSES,
    Collective,
    Communication,
    Op,
    PointToPoint,
    Recv,
    Send,
    attribute_names,
)
from ..ops.module import Channel, Module, Program
from ..ops.rules import Problem, bare, same_but_place
from ..phases import Phase, has_futures
from ..text.diagnostics import Diagnostic
from ..types import ValueType, promised, tensor_bytes
from .batch_rules import unlike_batches

_End: TypeAlias = tuple[Program, Communication]


def check_channel(channel: Channel, module: Module) -> str | None:
    """The problem with the declaration of a channel, if there is one."""
    if not has_futures(module.phase):
        return f"channel {channel.id} in phase {module.phase}, which has none"
    if not channel.collective and len(channel.ranks) != 2:
        return f"channel {channel.id} is an edge: it has two ranks, not {len(channel.ranks)}"
    if len(set(channel.ranks)) != len(channel.ranks):
        return f"channel {channel.id} names a rank twice"
    if not all(0 <= rank < module.world for rank in channel.ranks):
        return f"channel {channel.id} has ranks {channel.ranks}, the world has {module.world}"
    for name, count in (("slots", channel.slots), ("slot_bytes", channel.slot_bytes)):
        if count is not None and count < 0:
            return f"channel {channel.id} has {name} = {count}, which is less than 0"
    return None


def check_channel_op(op: Communication, module: Module, rank: int | None) -> None:
    """Check that a communication op agrees with the declaration of its channel.

    Args:
        op: the op.
        module: its module, which declares the channel.
        rank: the rank of its program; None for a program over all ranks.

    Raises:
        Problem: the op does not agree.
    """
    if isinstance(op, Collective) and not _collective_has_channel(op, module):
        return
    assert op.chan is not None
    channel = module.channels.get(op.chan)
    if channel is None:
        raise Problem(f"{op.opcode} on channel {op.chan}, which the module does not declare")
    if channel.collective != isinstance(op, Collective):
        kind = "a group's" if channel.collective else "an edge's"
        raise Problem(f"{op.opcode} on channel {op.chan}, which is {kind}")
    if isinstance(op, Collective):
        if op.group.ranks != channel.ranks:
            raise Problem(f"the group is {op.group}, channel {op.chan} serves {channel.ranks}")
        if rank is not None and rank not in channel.ranks:
            raise Problem(f"rank {rank} takes part in {op.opcode} of the group {op.group}")
        return
    _check_edge(op, channel, rank)


def _collective_has_channel(op: Collective, module: Module) -> bool:
    needed = has_futures(module.phase)
    if needed and (op.chan is None or op.seq is None):
        raise Problem(
            f"{op.opcode} has no chan or no seq, in phase {module.phase}",
            "split-transfers gives each group a channel, and numbers its collectives",
        )
    if not needed and (op.chan is not None or op.seq is not None):
        raise Problem(
            f"{op.opcode} has a channel, in phase {module.phase}",
            "leave out chan and seq; split-transfers sets them",
        )
    return needed


def _check_edge(op: PointToPoint, channel: Channel, rank: int | None) -> None:
    if len(channel.ranks) != 2:
        return  # reported with the declaration
    source, destination = channel.ranks
    here, peer = (source, destination) if isinstance(op, Send) else (destination, source)
    if op.peer != peer:
        raise Problem(
            f"{op.opcode} with peer {op.peer} on channel {op.chan}, "
            f"which goes from rank {source} to rank {destination}",
            f"write peer = {peer}",
        )
    place = op.results[0].type.place
    at = place.ranks if place is not None else () if rank is None else (rank,)
    if at != (here,):
        raise Problem(
            f"{op.opcode} at {at} on channel {op.chan}, whose {op.opcode}s are on rank {here}"
        )


def unmatched(module: Module) -> Iterator[Diagnostic]:
    """Messages that lack an end, are out of order, or have different types at their ends."""
    sends: dict[int, list[_End]] = defaultdict(list)
    receives: dict[int, list[_End]] = defaultdict(list)
    collectives: dict[int, dict[int, list[_End]]] = defaultdict(lambda: defaultdict(list))
    for program in module.programs:
        for op in program.ops:
            if isinstance(op, Send):
                sends[op.chan].append((program, op))
            elif isinstance(op, Recv):
                receives[op.chan].append((program, op))
            elif isinstance(op, Collective) and op.chan is not None:
                collectives[op.chan][program.rank or 0].append((program, op))
    ordered = module.phase is Phase.SCHEDULED
    positions = {} if ordered else _positions(module)
    for chan in sorted(sends.keys() | receives.keys()):
        for ends in (sends[chan], receives[chan]):
            yield from _out_of_order(ends, ordered)
            yield from _on_several_streams(ends)
        for sent, received in zip_longest(sends[chan], receives[chan]):
            yield from _unlike_ends(sent, received)
            if sent is None or received is None:
                continue
            if not ordered:
                yield from _received_too_early(sent, received, positions)
            yield from _unlike_slot(received, module.channels.get(chan))
    for chan, by_rank in sorted(collectives.items()):
        yield from _unlike_group(by_rank, module.channels.get(chan), ordered)


def unmatched_alike(module: Module, alike: AlikePrograms) -> Iterator[Diagnostic]:
    """As `unmatched`, of the programs that stand for those that are alike.

    Messages of a junction are compared, whichever of its ends have a channel in common.
    """
    for id_, channel in module.channels.items():
        absent = [rank for rank in channel.ranks if (rank, id_) not in alike.ends]
        if absent and len(absent) < len(channel.ranks):
            yield Diagnostic(f"rank {absent[0]} has no end of channel {id_}, and others have")
    ends: dict[tuple[int, int | None], list[_End]] = defaultdict(list)
    for program in alike.representatives:
        for op in program.ops:
            if isinstance(op, Communication) and op.chan is not None:
                ends[program.rank or 0, op.chan].append((program, op))
    junctions: dict[int, list[list[_End]]] = defaultdict(list)
    for end, number in alike.junctions.items():
        yield from _out_of_order(ends[end], ordered=True)
        yield from _on_several_streams(ends[end])
        junctions[number].append(ends[end])
    for joined in junctions.values():
        yield from _unlike_junction(joined, module)


def _unlike_junction(joined: list[list[_End]], module: Module) -> Iterator[Diagnostic]:
    """Messages that differ at the ends of a junction; each end is compared with a first one."""
    sent = [end for end in joined if isinstance(end[0][1], Send)]
    received = [end for end in joined if isinstance(end[0][1], Recv)]
    groups = [end for end in joined if isinstance(end[0][1], Collective)]
    pairs = [(sent[0], end) for end in received] if sent else []
    pairs += [(end, received[0]) for end in sent] if received else []
    if len(sent) + len(received) + len(groups) != len(joined) or bool(sent) != bool(received):
        program, op = joined[0][0]
        yield Diagnostic(
            f"channel {op.chan} has ends of different kinds, or lacks some", op, program
        )
    for sends, receives in pairs:
        for one, other in zip_longest(sends, receives):
            yield from _unlike_ends(one, other)
            if other is not None:
                yield from _unlike_slot(other, module.channels.get(other[1].chan or 0))
    for end in groups[1:]:
        for one, other in zip_longest(groups[0], end):
            if one is None or other is None or not _mean_the_same(one[1], other[1], _EQUAL):
                yield _disagreement(one or end[0], other or end[0])


def _out_of_order(ends: list[_End], ordered: bool) -> Iterator[Diagnostic]:
    """The first end whose `seq` is wrong: they count from 0, in scheduled programs in order."""
    if not ordered:
        ends.sort(key=lambda end: _seq(end[1]))
    for expected, (program, op) in enumerate(ends):
        if _seq(op) != expected:
            yield Diagnostic(
                f"{op.opcode} has seq {_seq(op)}, the next of channel {op.chan} is {expected}",
                op,
                program,
                help="messages of a channel are numbered 0, 1, ... in program order",
            )
            return


def _on_several_streams(ends: list[_End]) -> Iterator[Diagnostic]:
    """The first end of a channel that is on another stream than the end before it.

    A channel keeps its messages in order. On several streams, a message would wait for earlier
    messages of its stream, and also for earlier messages of its channel, which may be behind
    others on another stream.
    """
    for (_, before), (program, op) in pairwise(ends):
        if op.stream is not before.stream and None not in (op.stream, before.stream):
            yield Diagnostic(
                f"{op.opcode} {_seq(op)} of channel {op.chan} is on another stream than the one "
                "before it",
                op,
                program,
                help="a channel does its messages one after the other: keep them on one stream",
                notes=(Diagnostic("the one before it is here", before, program),),
            )
            return


def _unlike_ends(sent: _End | None, received: _End | None) -> Iterator[Diagnostic]:
    if sent is None or received is None:
        yield from (_alone(end) for end in (sent, received) if end is not None)
        return
    sent_type, received_type = sent[1].operands[0].type, promised(received[1].result.type)
    if not same_but_place(sent_type, received_type):
        program, op = received
        yield Diagnostic(
            f"recv {_seq(op)} of channel {op.chan} is {bare(received_type)}, "
            f"but what is sent is {bare(sent_type)}",
            op,
            program,
            notes=(Diagnostic("sent here", sent[1], sent[0]),),
        )
    elif sent[1].mb != received[1].mb:
        program, op = received
        yield Diagnostic(
            f"recv {_seq(op)} of channel {op.chan} is {_of_microbatch(op)}, "
            f"but what is sent is {_of_microbatch(sent[1])}",
            op,
            program,
            help="a message is of one microbatch: put the messages of both ranks in one order",
            notes=(Diagnostic("sent here", sent[1], sent[0]),),
        )
    yield from unlike_batches(sent, received)


def _of_microbatch(op: Communication) -> str:
    return "of no microbatch" if op.mb is None else f"of microbatch {op.mb}"


def _unlike_slot(received: _End, channel: Channel | None) -> Iterator[Diagnostic]:
    """The problem, if any, that a message is larger than the `slot_bytes` of its channel."""
    program, op = received
    if channel is None or channel.slot_bytes is None or not isinstance(op, Recv):
        return
    nbytes, is_in_buffer = tensor_bytes(op.result.type), not channel.slots and op.operands
    if (op.slot is not None or is_in_buffer) and nbytes > channel.slot_bytes:
        yield Diagnostic(
            f"recv {_seq(op)} of channel {op.chan} takes {nbytes} bytes, and the channel's "
            f"slot_bytes are {channel.slot_bytes}",
            op,
            program,
            help=f"write slot_bytes = {nbytes} or more in the channel's declaration",
        )


def _positions(module: Module) -> dict[Communication, int]:
    """The index of each communication op in the program over all ranks."""
    return {
        op: index for index, op in enumerate(module.program.ops) if isinstance(op, Communication)
    }


def _received_too_early(
    sent: _End, received: _End, positions: Mapping[Communication, int]
) -> Iterator[Diagnostic]:
    """The problem, if any, that a receive stands above its send in a program over all ranks."""
    (program, op), send = received, sent[1]
    if positions[op] < positions[send]:
        yield Diagnostic(
            f"recv {_seq(op)} of channel {op.chan} stands above its send",
            op,
            program,
            help="put the send first: a program over all ranks is in the order of its messages",
            notes=(Diagnostic("sent here", send, sent[0]),),
        )


def _alone(end: _End) -> Diagnostic:
    program, op = end
    counterpart = "recv" if isinstance(op, Send) else "send"
    return Diagnostic(
        f"{op.opcode} {_seq(op)} of channel {op.chan} has no {counterpart}",
        op,
        program,
        help=f"its peer must {counterpart} it, or both must go",
    )


def _unlike_group(
    by_rank: dict[int, list[_End]], channel: Channel | None, ordered: bool
) -> Iterator[Diagnostic]:
    for ends in by_rank.values():
        yield from _out_of_order(ends, ordered)
        yield from _on_several_streams(ends)
    if not ordered or channel is None:
        return
    first = by_rank.get(channel.ranks[0], [])
    for rank in channel.ranks[1:]:
        for one, other in zip_longest(first, by_rank.get(rank, [])):
            if one is None and other is not None:
                yield _absent(other, channel.ranks[0])
            elif one is not None and other is None:
                yield _absent(one, rank)
            elif one is None or other is None:
                continue
            elif not _mean_the_same(one[1], other[1], _SHARED):
                yield _disagreement(one, other)


_GROUP_HELP = "all ranks of a group issue the same collectives in the same order"


def _absent(end: _End, rank: int) -> Diagnostic:
    program, op = end
    return Diagnostic(
        f"rank {rank} does not take part in {op.opcode} {_seq(op)} of channel {op.chan}",
        op,
        program,
        help=_GROUP_HELP,
    )


def _disagreement(one: _End, other: _End) -> Diagnostic:
    return Diagnostic(
        f"the ranks of channel {one[1].chan} do not agree on collective {_seq(one[1])}",
        one[1],
        one[0],
        help=_GROUP_HELP,
        notes=(Diagnostic("the other rank has this", other[1], other[0]),),
    )


_Attributes: TypeAlias = Callable[[Communication], Any]


def _all_but(names: Set[str]) -> dict[type[Op], _Attributes]:
    return {
        cls: attrgetter(*(name for name in attribute_names(cls) if name not in names))
        for cls in OP_CLASSES.values()
        if issubclass(cls, Communication)
    }


_LOCAL = frozenset({"task", "stream", "graph"})
_SHARED = _all_but(_LOCAL)
"""The attributes that are equal at all ranks of a collective; microbatches tell like ones apart."""
_EQUAL = _all_but(_LOCAL | {"chan", "group"})
"""Those that are equal at ranks that stand for others, each of which has groups of its own."""


def _mean_the_same(
    one: Communication, other: Communication, shared: Mapping[type[Op], _Attributes]
) -> bool:
    """True if two ranks' ops may be the same collective, as far as some attributes tell."""
    cls = type(one)
    if type(other) is not cls or shared[cls](one) != shared[cls](other):
        return False
    one_types, other_types = _shared_types(one), _shared_types(other)
    return len(one_types) == len(other_types) and all(map(same_but_place, one_types, other_types))


def _shared_types(op: Communication) -> list[ValueType]:
    """The types that an op has at all ranks: of its results, or else of its operands.

    If some ranks only give and others only receive, operands are neither cut nor concatenated, so
    what is given and what is received have one type.
    """
    gives = isinstance(op, Collective) and not op.exchange.has_one_result_type and op.operands
    return [promised(value.type) for value in (op.operands if gives else op.results)]


def _seq(op: Communication) -> int:
    return op.seq or 0
