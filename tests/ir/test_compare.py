"""`difference` names the first thing in which two modules differ."""

from __future__ import annotations

import pytest

from cg.ir.ops.compare import difference
from cg.ir.ops.module import Module
from cg.ir.text.parser import parse_module

TEXT = """
module @m phase=scheduled world=2 {
  mesh @g {dp = 2, ranks = {0..1}}
  function @f(f32[2]) -> (f32[2])
  vjp @v {backward = @f, forward = @f, grad_inputs = {0}, grad_outputs = {0}}
  channel 0 {ranks = {0,1}}
  program @0(%x: f32[2]) {
    %y = call(%x) {fn = @f, mb = 0} : f32[2] loc("a.py":1)
    %c = constant() {fill = 1} : f32[2]
    return(%y)
  }
  program @1() {
    return()
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("@m", "@n", "module: name: 'm' in the first, 'n' in the second"),
        ("world=2", "world=3", "module: world"),
        ("mesh @g {dp", "mesh @g {tp", "mesh g"),
        ("@f(f32[2])", "@f(f32[3])", "function f"),
        ("  function @f(f32[2]) -> (f32[2])\n", "", "function f: only in the first"),
        ("grad_inputs = {0}", "grad_inputs = {}", "vjp v"),
        ("ranks = {0,1}", "ranks = {1,0}", "channel 0"),
        ("channel 0", "channel 1", "channel"),
        ("program @1() {\n    return()\n  }", "", "number of programs"),
        ("program @1", "program @2", "program: rank: 1 in the first, 2 in the second"),
        ("%x: f32[2]", "%x: f32[3]", "program @0: parameter 0: %x: f32[2]"),
        ("constant() {fill = 1}", "copy(%x)", "program @0, op 1: opcode"),
        ("fill = 1", "fill = 1.0", "program @0, op 1: constant: fill: 1 in the first, 1.0"),
        ("fill = 1", "fill = true", "fill"),
        ("mb = 0", "mb = 1", "program @0, op 0: call: mb"),
        ("call(%x)", "call(%x, %x)", "number of operands: 1 in the first, 2 in the second"),
        ("return(%y)", "return(%c)", "program @0, op 2: operand 0"),
        (
            "return(%y)",
            "return(%y)\n    return()",
            "program @0: number of ops: 3 in the first, 4 in the second",
        ),
    ],
)
def test_difference(old: str, new: str, message: str) -> None:
    assert old in TEXT
    one, other = parse_module(TEXT), parse_module(TEXT.replace(old, new))
    found = difference(one, other)
    assert found is not None
    assert message in found
    assert one != other


def test_locations_and_the_order_of_declarations_do_not_count() -> None:
    one = parse_module(TEXT)
    assert one == parse_module(TEXT.replace('loc("a.py":1)', 'loc("b.py":2 in f)'))
    moved = TEXT.replace("  channel 0 {ranks = {0,1}}\n", "")
    moved = moved.replace("  function", "  channel 0 {ranks = {0,1}}\n  function")
    assert one == parse_module(moved)


def test_a_nan_equals_itself() -> None:
    nan = TEXT.replace("fill = 1", "fill = nan")
    assert parse_module(nan) == parse_module(nan)
    assert parse_module(nan) != parse_module(TEXT)


def test_a_module_is_no_other_thing() -> None:
    module = parse_module(TEXT)
    assert module != TEXT
    with pytest.raises(TypeError, match="unhashable"):
        hash(module)
    assert isinstance(module, Module)
