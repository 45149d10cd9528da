"""Programs of a text are read when they are asked for, and are those of the whole module."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cg.backends.agreement.plan_hash import plan_hash
from cg.ir.ops.module import Module
from cg.ir.phases import Phase
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module, without_locations
from cg.ir.text.stored_programs import open_module

from ..sampling import scaled
from .strategies import modules

TEXT = """module @m phase=scheduled world=2 {
  function @f(f32[2]) -> (f32[2]) {effect = pure, kind = graph} loc("a b.py":3 in "<lambda>")
  program @0(%x: f32[2]) {
    %a = call(%x) {fn = @f} : f32[2] loc("a \\"b\\".py":3)
    return(%a)
  }
  program @1(%x: f32[2]) {
    return(%y) loc("a.py":4 in f.g)
  }
}
"""


@given(module=st.sampled_from(Phase).flatmap(modules))
@settings(max_examples=scaled(100))
def test_locations_are_all_that_goes(module: Module) -> None:
    assert without_locations(format_module(module, locations=True)) == format_module(module)


@given(module=modules(Phase.SCHEDULED))
@settings(max_examples=scaled(100))
def test_programs_are_those_of_the_module(module: Module) -> None:
    module.programs = sorted(module.programs, key=lambda program: program.rank or 0)
    text = format_module(module, locations=True)
    opened = open_module(text, "a text")
    assert plan_hash(opened) == plan_hash(module)
    assert format_module(opened, locations=True) == text
    assert format_module(parse_module(text), locations=True) == text


def test_a_program_is_read_when_it_is_asked_for() -> None:
    module = open_module(TEXT, "a text")
    assert module.program_of(0).ops[0].loc is not None
    with pytest.raises(IRError, match="a text, rank 1"):
        module.program_of(1)


def test_locations_with_quotes_go() -> None:
    assert "loc(" not in without_locations(TEXT)
    assert without_locations(TEXT).count("\n") == TEXT.count("\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("program @0", "program @2"),
        lambda text: text.partition("  program")[0] + "}\n",
        lambda text: text.rstrip().removesuffix("}"),
    ],
)
def test_programs_in_another_form_are_refused(change: object) -> None:
    assert callable(change)
    with pytest.raises(ValueError, match="a text"):
        open_module(change(TEXT), "a text").program_of(0)
