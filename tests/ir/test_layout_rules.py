"""The verifier's messages for layouts, for ops that do not know them, and for summands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cg.ir.layout import Cut, Layout
from cg.ir.ops import Call, Collective, Value
from cg.ir.ops.module import Module
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.types import Mesh, TensorType
from cg.ir.verify.verifier import verify

from .valid_modules import broken, errors

TRACED = """module @m phase=traced world=4 {
  mesh @a {dp = 2, tp = 2, ranks = {0..3}}
  mesh @b {dp = 2, ranks = {2..3}}
  function @up(f32[8/dp,4], f32[4,3*2/tp]) -> (f32[8/dp,3*2/tp]) {actor = s0, effect = read}
  function @down(f32[8/dp,3*2/tp]) -> (f32[8/dp,4|+tp])
  function @add(f32[8/dp,4|+tp]) -> (unit) {actor = s0, effect = accumulate}
  function @next(f32[8/dp,4]) -> (f32[])
  program @m(%x: f32[8,4]@{0..3}, %w: f32[4,6]@a) {
    %x0 = transfer(%x) : f32[8/dp,4]@a
    %v = view(%x0) {dim = 1, length = 2, start = 0} : f32[8/dp,2]@a
    %c = copy(%v) : f32[8/dp,2]@a
    %w0 = transfer(%w) : f32[4,3*2/tp]@a
    %h = call(%x0, %w0) {fn = @up} : f32[8/dp,3*2/tp]@a
    %y = call(%h) {fn = @down} : f32[8/dp,4|+tp]@a
    %u = call(%y) {fn = @add} : unit@a
    %z = transfer(%y) : f32[8/dp,4]@a
    %l = call(%z) {fn = @next} : f32[]@b
    %ones = constant() {fill = 1.0} : f32[4/dp]@b
    %s = transfer(%x) : f32[8,4|+dp.tp]@a
    %t = transfer(%s) {via = cpu} : f32[8,4|+dp.tp]@a
    return(%l) {at = {0}}
  }
}
"""

HELD = "copies are what every op takes: %y = transfer("
SENT = "%t = transfer(%s) {via = cpu} : f32[8,4|+dp.tp]@a"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # types
        ("%w: f32[4,6]@a", "%w: f32[4/dp,6]@{0..3}", "uses the axis dp; those of @{0..3} are *"),
        ("%w: f32[4,6]@a", "%w: f32[4/tp,6]@b", "uses the axis tp; those of @b are dp"),
        ("%w: f32[4,6]@a", "%w: f32[4/dp,6/dp]@a", "the layout of %w uses an axis twice: dp, dp"),
        ("%w: f32[4,6]@a", "%w: f32[4/dp,6|+dp]@a", "the layout of %w uses an axis twice: dp, dp"),
        ("%w: f32[4,6]@a", "%w: f32[4,6|avg:dp]@a", "%w has averages among summands, which are"),
        ("%w: f32[4,6]@a", "%w: f32[4,6|+tp.dp]@a",
         "%w has summands along tp.dp, not in the order of @a"),
        ("{2..3}}", "{3..4}}", "mesh @b has ranks (3, 4), the world has 4"),
        ("@next(f32[8/dp,4])", "@next(f32[8/dp,4/dp])", "function @next has a layout that uses an"),
        ("effect = accumulate", "effect = accumulate, ranks = {0..3}",
         "function @add has ranks, in phase traced; its calls say where it runs"),
        ("@next(f32[8/dp,4])", "@next(f32[8,4]@a)", "function @next has a place in its signature"),
        # calls take the layouts of their functions
        ("call(%x0, %w0)", "call(%x, %w0)", "%x is f32[8,4], but @up takes as input 0 f32[8/dp,4]"),
        ("call(%x0, %w0)", "call(%x, %w0)",
         "a transfer changes the layout: %y = transfer(%x) : f32[8/dp,4]@{0..3}"),
        (": f32[8/dp,4|+tp]@a", ": f32[8/dp,4]@a", "%y is f32[8/dp,4], but @down returns as"),
        (SENT, "%t = call(%y) {fn = @next} : f32[]@a",
         "%y is f32[8/dp,4|+tp], but @next takes as input 0 f32[8/dp,4]"),
        # ops that do not know them
        ("return(%l)", "return(%z)", "return of a tensor that is laid out, %z: f32[8/dp,4]@a"),
        ("return(%l)", "return(%z)", f"{HELD}%z) : f32[8,4]@a"),
        (SENT, "backward(%s)", "backward of a tensor that is laid out, %s"),
        (SENT, "%t = broadcast(%z) {group = {0..3}, root = 0} : f32[8,4]@{0..3}",
         "broadcast of a tensor that is laid out, %z"),
        (SENT, "%t = all_reduce(%x, %x) {group = {0..1}, op = sum} : f32[8/*,4]@{0..1}",
         "all_reduce of a tensor that is laid out, %t: f32[8/*,4]@{0..1}"),
        (SENT, "%t = constant() {fill = 1.0} : f32[4|+dp]@a", "constant of summands, %t"),
        (SENT, "%t = constant() {ref = @c} : f32[4/dp]@a", "a constant by name, and laid out"),
        (SENT, "%t = copy(%y) : f32[8/dp,4|+tp]@a", "copy of summands, %y: f32[8/dp,4|+tp]@a"),
        (SENT, "%t = view(%x0) {dim = 0, length = 2, start = 0} : f32[2/dp,4]@a",
         "view of dimension 0 of f32[8/dp,4], which is cut"),
        (SENT, "%t = view(%x0) {dim = 1, length = 2, start = 0} : f32[8,2]@a",
         "%t is f32[8,2], but this view makes f32[8/dp,2]"),
        (SENT, "%t = copy(%ones) : f32[4/dp]@{2..3}", "uses the axis dp; those of @{2..3} are *"),
        (SENT, "%t = copy(%z) : f32[8/dp,4]@b", "%z is laid out over @a, but copy runs at @b"),
        # transfers
        (SENT, "%t = transfer(%s) : f32[8,5|+dp.tp]@a", "%t is f32[8,5|+dp.tp], but transfer"),
        (SENT, "%t = transfer(%z) : f64[8,4]@a", "%t is f64[8,4], but transfer keeps the"),
        (SENT, "%t = transfer(%z) : f32[8,4|+dp.tp]@a",
         "the transfer makes summands along dp.tp of f32[8/dp,4], which is cut along dp"),
        (SENT, "%t = transfer(%x) : f32[8,4]@0", "a transfer in phase traced only says how"),
    ],
)  # fmt: skip
def test_layouts(old: str, new: str, message: str) -> None:
    verify(parse_module(TRACED))
    assert message in broken(TRACED, old, new)


def test_a_call_runs_where_its_operands_are_laid_out() -> None:
    placed = TRACED.replace("phase=traced", "phase=placed")
    message = "%z is laid out over @a, but call runs at @b"
    assert message in broken(placed, "(%x0)", "(%x0)")
    cut = "    %z1 = transfer(%z) : f32[8/dp,4]@b\n    %l = call(%z1)"
    brought = placed.replace("    %l = call(%z)", cut)
    brought = brought.replace("{at = {0}}", "{at = {2}}")
    verify(parse_module(brought))
    smaller = "%t = transfer(%y) : f32[8/dp,4|+tp]@d"
    mesh = "mesh @d {dp = 2, tp = 1, ranks = {0..1}}\n  mesh @b"
    assert "the transfer makes summands along tp of f32[8/dp,4|+tp], which is cut" in broken(
        brought.replace("mesh @b", mesh), SENT, smaller
    )


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        (lambda t: replace(t, layout=Layout((Cut(("dp",)),))), "has 1 cuts, the shape 2"),
        (lambda t: replace(t, layout=Layout((Cut(("dp",), 3), Cut()))), "has 3 blocks of units"),
        (lambda t: replace(t, layout=Layout((Cut(("dp",), 0), Cut()))), "has 0 blocks of units"),
        (lambda t: replace(t, place=replace(t.place, grid=(("dp", 4),))),
         "%x is at mesh @a, which is not the one that the module declares"),
    ],
)  # fmt: skip
def test_types_that_no_text_has(type_: object, message: str) -> None:
    module = parse_module(TRACED)
    value = module.program.params[0]
    assert callable(type_)
    whole = TensorType(value.type.dtype, (8, 4), module.meshes["a"])  # type: ignore[union-attr]
    value.type = type_(whole)
    assert message in errors(module)


def test_a_mesh_stands_in_the_table_under_its_name() -> None:
    module = parse_module(TRACED)
    module.meshes["c"] = Mesh((0, 1), "d", (("dp", 2),))
    assert "mesh @d is in the table as @c" in errors(module)


SCHEDULED = """module @m phase=scheduled world=1 {
  function @f(f32[4]) -> (f32[4])
  program @0(%x: f32[4]) {
    %y = call(%x) {fn = @f} : f32[4]
    return(%y)
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("%x: f32[4]", "%x: f32[4/*]", "the type of %x has a layout, in a scheduled program"),
        ("@f(f32[4])", "@f(f32[4/dp])", "function @f has a layout in its signature, in phase"),
    ],
)
def test_scheduled_programs_have_no_layouts(old: str, new: str, message: str) -> None:
    assert message in broken(SCHEDULED, old, new)


# The summands of %p along tp: a reduction of the rows of dp = 0, terms by message and by addition
# of those of dp = 1, and a reduction in two steps of %q, whose summands are along both axes.
SUMMANDS = """module @m phase=placed world=4 {
  mesh @a {dp = 2, tp = 2, ranks = {0..3}}
  mesh @c {tp = 1, ranks = {1}}
  function @down() -> (f32[7/dp,4|+tp], f32[4|+dp.tp])
  function @f(f32[3,4]) -> (f32[3,4])
  function @builtin.add.f32.4x4(f32[4,4], f32[4,4]) -> (f32[4,4]) {kind = builtin}
  program @m() {
    %p, %q = call() {fn = @down} : f32[7/dp,4|+tp]@a, f32[4|+dp.tp]@a
    %p0 = slice(%p) {region = [0:3,0:4]} : f32[3,4]@0
    %p1 = slice(%p) {region = [0:3,0:4]} : f32[3,4]@1
    %r = all_reduce(%p0, %p1) {group = {0..1}, op = sum} : f32[3,4]@{0..1}
    %p2 = slice(%p) {region = [3:7,0:4]} : f32[4,4]@2
    %p3 = slice(%p) {region = [3:7,0:4]} : f32[4,4]@3
    %at2 = transfer(%p3) : f32[4,4]@2
    %copy = copy(%at2) : f32[4,4]@2
    %z2 = constant() {fill = 0} : f32[4,4]@2
    %s = call(%p2, %copy) {fn = @builtin.add.f32.4x4} : f32[4,4]@2
    %at3 = transfer(%s) : f32[4,4]@3
    %y = assemble(%r, %s, %at3) {regions = {[0:3,0:4], [3:7,0:4], [3:7,0:4]}} : f32[7/dp,4]@a
    %q0 = slice(%q) {region = [0:4]} : f32[4]@0
    %q1 = slice(%q) {region = [0:4]} : f32[4]@1
    %q2 = slice(%q) {region = [0:4]} : f32[4]@2
    %q3 = slice(%q) {region = [0:4]} : f32[4]@3
    %t0, %t2 = reduce_scatter(%q0, %q2) {dim = 0, group = {0,2}, op = sum} : f32[2]@0, f32[2]@2
    %t1, %t3 = reduce_scatter(%q1, %q3) {dim = 0, group = {1,3}, op = sum} : f32[2]@1, f32[2]@3
    %u = all_reduce(%t0, %t1) {group = {0..1}, op = sum} : f32[2]@{0..1}
    %u3 = slice(%t3) {region = [1:2]} : f32[1]@3
    %u2 = slice(%t2) {region = [1:2]} : f32[1]@2
    %b = broadcast(%u3) {group = {2,3}, root = 3} : f32[1]@{2,3}
    %v = all_reduce(%u2, %b) {group = {2..3}, op = sum} : f32[1]@{2..3}
    %h = call(%r) {fn = @f} : f32[3,4]@0
    return(%v) {at = {2,3}}
  }
}
"""


SCATTER = (
    "%t1, %t3 = reduce_scatter(%q1, %q3) {dim = 0, group = {1,3}, op = sum} : f32[2]@1, f32[2]@3"
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("call(%r)", "call(%p0)",
         "call of %p0, which is 1 of the 2 summands of [0:3,0:4] of %p alone"),
        ("return(%v)", "return(%b)", "return of %b, which is 2 of the 4 summands of [3:4] of %q"),
        ("assemble(%r, %s", "assemble(%r, %p2", "assemble of %p2, which is 1 of the 2 summands"),
        ("op = sum} : f32[3,4]", "op = max} : f32[3,4]", "all_reduce of %p0, which is 1 of"),
        ("op = sum} : f32[3,4]", "op = avg} : f32[3,4]", "all_reduce of %p0, which is 1 of"),
        ("    return(%v)", "    %p4 = assemble(%p1) {regions = {[0:3,0:4]}} : f32[3/tp,4]@c\n"
         "    return(%v)", "assemble of %p1, which is 1 of the 2 summands of [0:3,0:4] of %p"),
        ("    return(%v)", "    %p4 = assemble(%z2, %p2) {regions = {[0:4,0:4], [4:8,0:4]}} : "
         "f32[8,4]@2\n    return(%v)", "%p2, 1 of the 2 summands of [3:7,0:4] of %p, and of %z2"),
        ("%u2 = slice(%t2) {region = [1:2]}", "%u2 = slice(%t2) {region = [0:1]}",
         "all_reduce of %u2, 2 of the 4 summands of [2:3] of %q, and of %b, 2 of the 4 summands of "
         "[3:4] of %q"),
        ("(%p2, %copy)", "(%p2, %p2)", "call takes a summand of %p twice"),
        ("(%p2, %copy)", "(%p2, %z2)", "call of %p2, 1 of the 2 summands of [3:7,0:4] of %p, "
         "and of %z2, which is no summand"),
        ("    return(%v)", "    %p4 = transfer(%p3) : f32[4/*,4]@{2..3}\n    return(%v)",
         "transfer of %p3, which is 1 of the 2 summands of [3:7,0:4] of %p alone"),
        ("slice(%t2) {region = [1:2]}", "view(%t2) {dim = 0, length = 1, start = 1}",
         "view of %t2, which is 2 of the 4 summands of [2:4] of %q alone"),
        (SCATTER, "%a1, %a3 = all_to_all(%q1, %q3) {dim = 0, group = {1,3}} : f32[4]@1, f32[4]@3\n"
         f"    {SCATTER}", "all_to_all of %q1, which is 1 of the 4 summands of [0:4] of %q alone"),
    ],
)  # fmt: skip
def test_summands(old: str, new: str, message: str) -> None:
    verify(parse_module(SUMMANDS))
    found = broken(SUMMANDS, old, new)
    assert message in found
    assert "reduce it first" in found


def reductions(module: Module) -> Iterator[tuple[Value, Value]]:
    """Each result of an op that combines, with each operand that could stand for it."""
    for op in module.program.ops:
        adds = isinstance(op, Call) and op.fn.name.startswith("builtin.add")
        if adds or (isinstance(op, Collective) and op.exchange.reduce is not None):
            for result in op.results:
                for operand in op.operands:
                    yield result, operand


def test_a_program_that_leaves_out_a_reduction_is_refused() -> None:
    refused = 0
    for number in range(len(list(reductions(parse_module(SUMMANDS))))):
        module = parse_module(SUMMANDS)
        result, operand = list(reductions(module))[number]
        users = [op for op in module.program.ops if result in op.operands]
        for op in users:
            op.operands = tuple(operand if v is result else v for v in op.operands)
        if users:
            errors(module)
            refused += 1
    assert refused == 14


ASYNC = """module @m phase=async world=2 {
  channel 0 {ranks = {1,0}}
  function @down() -> (f32[4|max:*])
  program @m() {
    %p = call() {fn = @down} : f32[4|max:*]@{0..1}
    %p1 = slice(%p) {region = [0:4]} : f32[4]@1
    %s = send(%p1) {chan = 0, peer = 0, seq = 0} : future<unit@1>
    %r = recv() {chan = 0, peer = 1, seq = 0} : future<f32[4]@0>
    wait(%s)
    %at0 = wait(%r) : f32[4]@0
    return() {at = {0}}
  }
}
"""


def test_messages_carry_summands() -> None:
    verify(parse_module(ASYNC))
    message = "return of %at0, which is 1 of the 2 summands of [0:4] of %p alone"
    assert message in broken(ASYNC, "return()", "return(%at0)")
    send = ASYNC[ASYNC.index("    %s =") : ASYNC.index("    %r =")]
    late = ASYNC.replace(send, "").replace("    wait(%s)\n", f"{send}    wait(%s)\n")
    with pytest.raises(IRError, match="recv 0 of channel 0 stands above its send"):
        verify(parse_module(late))


KEPT = """module @m phase=placed world=4 {
  mesh @a {dp = 2, tp = 2, ranks = {0..3}}
  mesh @b {tp = 2, ranks = {0..1}}
  program @m(%x: f32[4]@a, %p: f32[4|+tp]@b, %q: f32[4|+tp]@b) {
    %x0 = slice(%x) {region = [0:2]} : f32[2]@0
    %x2 = slice(%x) {region = [2:4]} : f32[2]@2
    %x1 = slice(%x) {region = [0:2]} : f32[2]@1
    %z1 = constant() {fill = 0.0} : f32[2]@1
    %z3 = constant() {fill = 0.0} : f32[2]@3
    %s = assemble(%x0, %x2, %z1, %z3) {regions = {[0:2], [2:4], [0:2], [2:4]}} : f32[4/dp|+tp]@a
    %m = assemble(%x0, %x1) {regions = {[0:2], [0:2]}} : f32[2|max:tp]@b
    %p0 = slice(%p) {region = [0:4]} : f32[4]@0
    %p1 = slice(%p) {region = [0:4]} : f32[4]@1
    %q1 = slice(%q) {region = [0:4]} : f32[4]@1
    %t2 = transfer(%p0) : f32[4]@2
    %t3 = transfer(%p1) : f32[4]@3
    %k = assemble(%t2, %t3) {regions = {[0:4], [0:4]}} : f32[4|+*]@{2..3}
    return() {at = {0}}
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{fill = 0.0} : f32[2]@3", "{fill = 1.0} : f32[2]@3",
         "the ranks along tp do not have each summand of %s once"),
        ("f32[2|max:tp]@b", "f32[2|prod:tp]@b", "the ranks along tp do not have each summand"),
        ("f32[2|max:tp]@b", "f32[2|prod:tp]@b", "have constant() {fill = 1}"),
        ("|+*]@{2..3}", "|max:*]@{2..3}", "assemble of %t2, which is 1 of the 2 summands"),
        ("|+*]@{2..3}", "]@{2..3}", "assemble of %t2, 1 of the 2 summands of [0:4] of %p, and of"),
        ("transfer(%p1)", "transfer(%p0)", "the ranks along * do not have each summand of %k"),
        ("transfer(%p1)", "transfer(%q1)", "assemble of %t2, 1 of the 2 summands of [0:4] of %p, "
         "and of %t3, 1 of the 2 summands of [0:4] of %q"),
    ],
)  # fmt: skip
def test_summands_that_an_assemble_makes(old: str, new: str, message: str) -> None:
    verify(parse_module(KEPT))
    assert message in broken(KEPT, old, new)


# Of the summands along dp and tp, those along tp are combined: in halves, which are gathered at
# dp = 0 and sent at dp = 1. The others stay summands.
PARTLY = """module @m phase=placed world=4 {
  mesh @a {dp = 2, tp = 2, ranks = {0..3}}
  program @m(%p: f32[4|+dp.tp]@a) {
    %p0 = slice(%p) {region = [0:4]} : f32[4]@0
    %p1 = slice(%p) {region = [0:4]} : f32[4]@1
    %p2 = slice(%p) {region = [0:4]} : f32[4]@2
    %p3 = slice(%p) {region = [0:4]} : f32[4]@3
    %r0, %r1 = reduce_scatter(%p0, %p1) {dim = 0, group = {0..1}, op = sum} : f32[2]@0, f32[2]@1
    %r2, %r3 = reduce_scatter(%p2, %p3) {dim = 0, group = {2..3}, op = sum} : f32[2]@2, f32[2]@3
    %g = all_gather(%r0, %r1) {dim = 0, group = {0..1}} : f32[4]@{0..1}
    %t2 = transfer(%r3) : f32[2]@2
    %t3 = transfer(%r2) : f32[2]@3
    %k3 = assemble(%t3, %r3) {regions = {[0:2], [2:4]}} : f32[4]@3
    %y = assemble(%g, %r2, %t2, %k3)
      {regions = {[0:4], [0:2], [2:4], [0:4]}} : f32[4|+dp]@a
    return() {at = {0}}
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("all_gather(%r0, %r1) {dim = 0, group = {0..1}} : f32[4]@{0..1}",
         "all_gather(%r1, %r0) {dim = 0, group = {1,0}} : f32[4]@{1,0}",
         "all_gather of %r1, 2 of the 4 summands of [2:4] of %p, which is not part 0 of 2"),
        ("assemble(%t3, %r3) {regions = {[0:2], [2:4]}}",
         "assemble(%t3, %r3) {regions = {[2:4], [0:2]}}",
         "assemble takes %t3, 2 of the 4 summands of [0:2] of %p, as [2:4]"),
        ("%g, %r2, %t2, %k3)\n      {regions = {[0:4], [0:2], [2:4], [0:4]}}",
         "%g, %r2, %t2, %k3)\n      {regions = {[0:4], [2:4], [0:2], [0:4]}}",
         "assemble takes %r2, 2 of the 4 summands of [0:2] of %p, as [2:4]"),
        ("assemble(%t3, %r3)", "assemble(%z, %r3)",
         "assemble of %r3, 2 of the 4 summands of [2:4] of %p, and of %z, which is no summand"),
        ("[4|+dp]@a", "[4|+tp]@a", "the ranks along tp do not have each summand of %y once"),
        ("[4|+dp]@a", "[4]@a", "assemble of %g, 2 of the 4 summands of [0:4] of %p, and of %r2, 2"),
    ],
)  # fmt: skip
def test_summands_that_are_partly_reduced(old: str, new: str, message: str) -> None:
    zero = "    %z = constant() {fill = 0} : f32[2]@3\n    %k3 ="
    valid = PARTLY.replace("    %k3 =", zero)
    verify(parse_module(valid))
    assert message in broken(valid, old, new)


GROUP = """module @m phase=scheduled world=3 {
  function @f() -> (unit) {actor = a, effect = write, ranks = {0..1}}
  program @0() {
    %u = call() {fn = @f} : unit
    return()
  }
  program @1() {
    %u = call() {fn = @f} : unit
    return()
  }
  program @2() {
    return()
  }
}
"""


def test_an_actor_of_scheduled_programs_may_be_on_several_ranks() -> None:
    verify(parse_module(GROUP))
    alone = GROUP.replace(", ranks = {0..1}", "")
    message = "a call on actor a at @1, which lives at @0"
    assert message in broken(alone, "phase", "phase")
    stranger = GROUP.replace("@2() {", "@2() {\n    %u = call() {fn = @f} : unit")
    message = "a call on actor a at @2, which lives at @{0..1}"
    assert message in broken(stranger, "phase", "phase")
