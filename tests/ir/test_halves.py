"""The verifier's rules for the halves of a backward."""

from __future__ import annotations

import pytest

from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module
from cg.ir.verify.verifier import verify

MODULE = """module @m phase=traced world=1 {
  function @f(f32[4]) -> (f32[2]) {actor = a, effect = read}
  function @f.fwd(f32[4]) -> (f32[2], f32[8], i64[]) {actor = a, effect = read}
  function @f.bwd(f32[8], i64[], f32[2]) -> (f32[4]) {actor = a, effect = accumulate}
  function @f.b(f32[8], i64[], f32[2]) -> (f32[4], f32[3]) {actor = a, effect = accumulate}
  function @f.w(f32[8], f32[2], f32[3]) -> (unit) {actor = a, effect = accumulate}
  function @e.bwd(f32[8], i64[], f32[2]) -> (unit) {actor = a, effect = accumulate}
  vjp @v {backward = @f.bwd, forward = @f.fwd, grad_inputs = {0}, grad_outputs = {0}, \
input = @f.b, kept = {0,2}, weight = @f.w}
  vjp @e {backward = @e.bwd, forward = @f.fwd, grad_inputs = {}, grad_outputs = {0}, \
kept = {0..2}, weight = @e.bwd}
  program @m(%x: f32[4]@0) {
    return(%x)
  }
}
"""


def test_halves_are_declared() -> None:
    module = parse_module(MODULE)
    verify(module)
    assert parse_module(format_module(module)) == module
    vjp = module.vjps["v"]
    assert (vjp.input, vjp.weight, vjp.kept) == ("f.b", "f.w", (0, 2))
    assert vjp.functions == ("f.fwd", "f.bwd", "f.b", "f.w")
    assert module.vjps["e"].functions == ("f.fwd", "e.bwd")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("input = @f.b", "input = @no", "the module does not declare its function @no"),
        ("weight = @f.w", "weight = @no", "the module does not declare its function @no"),
        (", weight = @f.w", "", "it has input, but no weight"),
        ("kept = {0,2}", "kept = {2,0}", "kept are not ascending indices of the 3 inputs"),
        ("kept = {0,2}", "kept = {0,3}", "kept are not ascending indices of the 3 inputs"),
        ("kept = {0,2}", "kept = {0}", "the inputs of @f.w are not what is kept, then what"),
        ("-> (f32[4], f32[3])", "-> (f32[4])", "the inputs of @f.w are not what is kept"),
        ("@f.b(f32[8], i64[], f32[2])", "@f.b(f32[8])", "@f.b does not take what @f.bwd takes"),
        ("-> (f32[4], f32[3])", "-> (f32[3], f32[4])", "@f.b do not begin with the cotangents"),
        ("f32[3]) -> (unit)", "f32[3]) -> (f32[3])", "@f.w does not return unit"),
        ("input = @f.b, ", "", "it has weight and grad_inputs, but no input"),
    ],
)
def test_halves_must_fit(old: str, new: str, message: str) -> None:
    assert MODULE.count(old) == 1
    with pytest.raises(IRError) as caught:
        verify(parse_module(MODULE.replace(old, new)))
    assert message in str(caught.value)
    assert "vjp @v" in str(caught.value)
