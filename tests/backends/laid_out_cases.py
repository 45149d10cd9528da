"""Transfers between layouts as programs: what a communicator has to do for groups of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from cg.ir.ops import Call, Return
from cg.ir.ops.module import Module
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module
from cg.passes.manager.manager import PassManager
from cg.passes.manager.registry import parse_pipeline

PIPELINE = "insert-transfers,lower-transfers,split-transfers,schedule"

Transfer = tuple[str, str, str]
"""A name, and the types before and after; `@` stands for all ranks, `@<` for the first ones."""

ON_TWO: tuple[Transfer, ...] = (
    ("rows-columns", "f32[8,6/*]@", "f32[8/*,6]@"),
    ("rows-copies", "f32[8/*,6]@", "f32[8,6]@"),
    ("uneven-rows-copies", "f32[7/*,6]@", "f32[7,6]@"),
    ("columns-uneven-rows", "f32[7,5/*]@", "f32[7/*,5]@"),
    ("sums-copies", "f32[8,6|+*]@", "f32[8,6]@"),
    ("sums-rows", "f32[8,6|+*]@", "f32[8/*,6]@"),
    ("sums-columns", "f32[3,8|+*]@", "f32[3,8/*]@"),
    ("sums-uneven-rows", "f32[7,6|+*]@", "f32[7/*,6]@"),
    ("sums-packed-rows", "f32[24,2|+*]@", "f32[3*8/*,2]@"),
    ("sums-of-no-rows", "f32[1,6|+*]@", "f32[1/*,6]@"),
    ("packed-rows-copies", "f32[3*8/*,2]@", "f32[24,2]@"),
    ("maxima-copies", "f32[8,6|max:*]@", "f32[8,6]@"),
    ("half-all", "f32[9/*,4]@<", "f32[9/*,4]@"),
    ("all-half", "f32[9/*,4]@", "f32[9,4]@<"),
)
ON_FOUR: tuple[Transfer, ...] = (
    ("three-four", "f32[12/*,4]@{0..2}", "f32[12/*,4]@{0..3}"),
    ("two-two-others", "f32[8/*,4]@{0..1}", "f32[8/*,4]@{2..3}"),
    ("copies-on-others", "f32[8,4]@{0..1}", "f32[8/*,4]@{1..3}"),
    ("sums-on-others", "f32[12,4|+*]@{0..1}", "f32[12/*,4]@{1..3}"),
    ("grid-gather", "f32[8/dp,6/tp]@grid", "f32[8,6]@grid"),
    ("grid-sums", "f32[8/dp,6|+tp]@grid", "f32[8/dp.tp,6]@grid"),
    ("grid-two-axes", "f32[8,6|+dp.tp]@grid", "f32[8/tp,6]@grid"),
    ("grid-order", "f32[16/dp.tp,2]@grid", "f32[16/tp.dp,2]@grid"),
)


def programs(world: int) -> Iterator[tuple[str, str, bool]]:
    """Of each transfer the name, the scheduled module, and whether it reduces.

    Each rank returns what it holds in the end.
    """
    for name, before, after in (*ON_TWO, *(ON_FOUR if world == 4 else ())):
        module = _module(world, _placed(before, world), _placed(after, world))
        PassManager(parse_pipeline(PIPELINE)).run(module)
        yield f"layout-{name}", _returning(module), "|" in before


def _placed(type_: str, world: int) -> str:
    first = f"@{{0..{world // 2 - 1}}}" if world > 2 else "@{0..0}"
    if type_.endswith("@<"):
        return type_.removesuffix("@<") + first
    return f"{type_}{{0..{world - 1}}}" if type_.endswith("@") else type_


def _module(world: int, before: str, after: str) -> Module:
    mesh = "  mesh @grid {dp = 2, tp = 2, ranks = {0..3}}\n" if "@grid" in before else ""
    local, _, place = after.partition("@")
    return parse_module(
        f"module @m phase=traced world={world} {{\n{mesh}"
        f"  function @take({local}) -> (unit) {{effect = write, kind = opaque}}\n"
        f"  program @m(%x: {before}) {{\n"
        f"    %y = transfer(%x) : {after}\n"
        f"    %u = call(%y) {{fn = @take}} : unit@{place}\n"
        "    return() {at = {0}}\n  }\n}\n"
    )


def _returning(module: Module) -> str:
    """The module, of which each program returns what it was to give to `take`."""
    for program in module.programs:
        taken = tuple(op.operands[0] for op in program.ops if _takes(op))
        program.ops[:] = [op for op in program.ops if not _takes(op)]
        program.ops[-1] = Return(taken, ())
    for name in [name for name in module.functions if name.startswith("take")]:
        del module.functions[name]
    return format_module(module)


def _takes(op: object) -> bool:
    return isinstance(op, Call) and op.fn.name.startswith("take")
