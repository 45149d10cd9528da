"""The times of scheduled programs as a picture, simulated or recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ...ir.communication import Message
from ...ir.module import Module
from ...ir.ops import Call, Recv, Send
from ...ir.pipeline.costs import Costs
from ...passes.simulate.program_simulator import ProgramSimulation, simulate_programs
from ...passes.simulate.program_times import ProgramTimes
from .model import NUDGE, Arrow, Picture, Row, Slice, Spot, Track
from .op_boxes import Looks


def picture_of_programs(
    times: ProgramTimes, module: Module, title: str = "", note: str = ""
) -> Picture:
    """Programs: for each rank its computation and, on paper, the messages on its other streams.

    Args:
        times: of the programs of `module`, simulated or recorded.
        module: scheduled.
        title: the name of the step, if it is empty.
        note: as in `Picture`.
    """
    looks = {program.rank or 0: Looks(module, program) for program in module.programs}
    boxes: dict[tuple[int, str], list[Slice]] = defaultdict(list)
    for span in times.spans:
        look = looks[span.rank].of(span.op)
        boxes[span.rank, look.stream].append(look.slice(span.start, span.end))
    messages = times.messages if isinstance(times, ProgramSimulation) else ()
    for message in messages:
        if message.ready > message.start:
            for rank, op in message.ends.items():
                look = looks[rank].of(op)
                boxes[rank, look.stream].append(look.slice(message.start, message.ready))
    rows = []
    places: dict[tuple[int, str], tuple[int, int]] = {}
    for index, rank in enumerate(sorted(looks)):
        streams = sorted((s for r, s in boxes if r == rank), key=stream_order) or ["compute"]
        for at, stream in enumerate(streams):
            places[rank, stream] = (index, at)
        tracks = [
            Track(stream, tuple(sorted(boxes[rank, stream], key=lambda s: (s.start, s.end))))
            for stream in streams
        ]
        rows.append(Row(rank, tuple(tracks)))
    arrows = _message_arrows(messages, looks, places)
    return Picture(title or f"@{module.name}", tuple(rows), note, tuple(arrows))


def _message_arrows(
    messages: Iterable[Message],
    looks: dict[int, Looks],
    places: dict[tuple[int, str], tuple[int, int]],
) -> list[Arrow]:
    arrows = []
    for message in messages:
        ends = _ends(message)
        if ends is None:
            continue
        sender, receiver = ends
        streams = (
            looks[sender].of(message.ends[sender]).stream,
            looks[receiver].of(message.ends[receiver]).stream,
        )
        tail = places.get((sender, streams[0])) or places.get((sender, "compute"))
        head = places.get((receiver, streams[1])) or places.get((receiver, "compute"))
        if tail is not None and head is not None:
            travels = message.ready > message.start
            start = message.start if travels else message.start - NUDGE
            end = message.ready - NUDGE if travels else message.ready
            arrows.append(Arrow(Spot(*tail, max(0.0, start)), Spot(*head, end)))
    return arrows


def _ends(message: Message) -> tuple[int, int] | None:
    """The sender and the receiver of a message; None for a collective."""
    sender = receiver = None
    for rank, op in message.ends.items():
        if isinstance(op, Send):
            sender = rank
        elif isinstance(op, Recv):
            receiver = rank
    return None if sender is None or receiver is None else (sender, receiver)


_STREAMS = ("compute", "send", "recv", "collective", "copy")


def stream_order(stream: str) -> int:
    """Where a stream stands among those of its rank."""
    return _STREAMS.index(stream) if stream in _STREAMS else len(_STREAMS)


def picture_in_units(module: Module) -> Picture:
    """A scheduled module on paper, when nothing is known of its costs.

    Each of F, B and W takes a millisecond (a B that is not split, two), and so does each call of
    an actor outside of tasks; transfers take none.
    """
    loose = {
        op.fn.name
        for program in module.programs
        for op in program.ops
        if isinstance(op, Call)
        and op.task is None
        and module.functions[op.fn.name].actor is not None
    }
    found = simulate_programs(module, Costs(functions=dict.fromkeys(loose, 1.0)))
    note = "on paper: F, B, W and each call outside of them take 1 ms, transfers none"
    return picture_of_programs(found, module, note=note)
