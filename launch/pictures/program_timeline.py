"""The times of scheduled programs as a picture, simulated or recorded."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ...ir.ops import Call, Op, Recv, Send
from ...ir.ops.module import Module
from ...ir.pipeline.costs import Costs
from ...ir.verify.message_matching import Message
from ...passes.simulate.program_simulator import ProgramSimulation, simulate_programs
from ...passes.simulate.program_times import ProgramTimes
from .model import NUDGE, End, Picture, TimeSlice, TrackKey, lay_out
from .op_boxes import OpBoxes


def picture_of_programs(times: ProgramTimes, module: Module, note: str = "") -> Picture:
    """The picture of programs: each rank's computation and, on paper, its messages by stream.

    Args:
        times: of the programs of `module`, simulated or recorded.
        module: scheduled.
        note: as in `Picture`.
    """
    boxes = {program.rank or 0: OpBoxes(module, program) for program in module.programs}
    slices: dict[TrackKey, list[TimeSlice]] = defaultdict(list)

    def add(rank: int, op: Op, start: float, end: float) -> None:
        box = boxes[rank].of(op)
        slices[TrackKey(rank, box.stream)].append(replace(box, start=start, end=end))

    for span in times.spans:
        add(span.rank, span.op, span.start, span.end)
    messages = times.messages if isinstance(times, ProgramSimulation) else ()
    for message in messages:
        if message.ready > message.start:
            for rank, op in message.ends.items():
                add(rank, op, message.start, message.ready)

    def track(rank: int, op: Op) -> TrackKey:
        key = TrackKey(rank, boxes[rank].of(op).stream)
        return key if key in slices else TrackKey(rank)

    arrows: list[tuple[End, End]] = []
    for message in messages:
        ends = _ends(message)
        if ends is not None:
            tail, head = (track(rank, message.ends[rank]) for rank in ends)
            travels = message.ready > message.start
            start = message.start if travels else message.start - NUDGE
            end = message.ready - NUDGE if travels else message.ready
            arrows.append(((tail, max(0.0, start)), (head, end)))
    return lay_out(f"@{module.name}", note, boxes, slices, arrows)


def _ends(message: Message) -> tuple[int, int] | None:
    """The sender and the receiver of a message; None for a collective."""
    sender = receiver = None
    for rank, op in message.ends.items():
        if isinstance(op, Send):
            sender = rank
        elif isinstance(op, Recv):
            receiver = rank
    return None if sender is None or receiver is None else (sender, receiver)


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
    simulation = simulate_programs(module, Costs(functions=dict.fromkeys(loose, 1.0)))
    note = "on paper: F, B, W and each call outside of them take 1 ms, transfers none"
    return picture_of_programs(simulation, module, note)
