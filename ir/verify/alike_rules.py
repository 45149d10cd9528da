"""Check what tells programs that are alike apart: names, ends of channels, regions and actors."""

from __future__ import annotations

from collections.abc import Iterator

from ..alike.alike_programs import RankGroup
from ..alike.pattern import RankVariation, end_of, move_to_end
from ..ops import Call, Communication, Op, Slice
from ..ops.clone import copy_op
from ..ops.module import Module, Program
from ..ops.rules import CheckContext, Problem
from ..text.diagnostics import Diagnostic
from .channel_rules import check_channel_op


def check_variations(module: Module, group: RankGroup) -> Iterator[Diagnostic]:
    """The problems of ranks whose programs are like that of their representative, which is right.

    A rule on an op depends on the rank by nothing but the op's end of a channel and its region. So
    one op of each end is checked, and each slice.
    """
    program = group.pattern.program
    messages: dict[int | None, Op] = {}
    for op in program.ops:
        if (end := end_of(op)) is not None:
            messages.setdefault(end[0], op)
    slices = [op for op in program.ops if isinstance(op, Slice)]
    actors = _actors_of(module, program)
    for rank, variation in group.variations.items():
        if len(set(variation.names)) != len(variation.names):
            yield Diagnostic(f"a value of rank {rank} is defined twice", program=program)
        for name, ranks in actors.items():
            if len(group.variations) > 1 and rank not in ranks:
                yield Diagnostic(f"actor {name} does not live at rank {rank}", program=program)
        local = Program(program.name, rank=rank)
        for op in _local_ops(group, variation, messages, slices):
            try:
                op.check(CheckContext(module, local))
                if isinstance(op, Communication):
                    check_channel_op(op, module, rank)
            except Problem as problem:
                yield Diagnostic(problem.message, op, program)


def _local_ops(
    group: RankGroup,
    variation: RankVariation,
    messages: dict[int | None, Op],
    slices: list[Slice],
) -> Iterator[Op]:
    """One op of each end of a channel, and all slices, as a rank has them."""
    for chan, end in zip(group.pattern.ends, variation.ends, strict=True):
        message = copy_op(messages[chan], messages[chan].operands, messages[chan].results)
        move_to_end(message, end)
        yield message
    regions = dict(zip(group.pattern.slices, variation.regions, strict=True))
    for piece in slices:
        local = copy_op(piece, piece.operands, piece.results)
        assert isinstance(local, Slice), "a copy is of the same class"
        local.region = regions[piece]
        yield local


def _actors_of(module: Module, program: Program) -> dict[str, tuple[int, ...]]:
    """The actors that a program calls, with the ranks of each."""
    actors: dict[str, tuple[int, ...]] = {}
    for op in program.ops:
        function = module.functions.get(op.fn.name) if isinstance(op, Call) else None
        if function is not None and function.actor is not None:
            actors[function.actor] = function.ranks
    return actors
