"""The parser reads back the text of the printer as it was, in every phase."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cg.ir.ops.compare import difference, equal
from cg.ir.ops.module import Module
from cg.ir.phases import Phase
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module, format_op, format_program

from ..sampling import scaled
from .strategies import modules

bounded = settings(max_examples=scaled(80))


@pytest.mark.parametrize("phase", Phase)
@given(data=st.data())
@bounded
def test_round_trip(phase: Phase, data: st.DataObject) -> None:
    module = data.draw(modules(phase))
    again = parse_module(format_module(module))
    assert difference(module, again) is None
    assert module == again
    assert format_module(again) == format_module(module)


@given(modules(Phase.ASYNC))
@bounded
def test_round_trip_with_locations(module: Module) -> None:
    text = format_module(module, locations=True)
    again = parse_module(text)
    assert format_module(again, locations=True) == text
    locations = [op.loc for program in module.programs for op in program.ops]
    assert [op.loc for program in again.programs for op in program.ops] == locations


@given(modules(Phase.SCHEDULED))
@bounded
def test_a_copy_is_equal_and_equality_is_that_of_the_text(module: Module) -> None:
    other = copy.deepcopy(module)
    assert equal(module, other)
    assert format_module(module) == format_module(other)


def test_parts_print_as_they_do_in_the_module() -> None:
    text = (
        "module @m phase=traced world=2 {\n"
        "  program @m(%x: f32[2]@{0..1}) {\n"
        "    %y, %z = call(%x, %x) {fn = @f, mb = 3} : f32[2]@1, object@1\n"
        "    return(%y) {at = {1}}\n"
        "  }\n"
        "}\n"
    )
    program = parse_module(text).program
    assert format_op(program.ops[1]) == "return(%y) {at = {1}}"
    inner = [line[2:] for line in text.splitlines()[1:-1]]
    assert format_program(program) == "\n".join(inner) + "\n"


def test_line_breaks_spaces_and_comments_are_free() -> None:
    tight = "module @m phase=traced world=1{program @m(%x:f32[2, 3]@0){return(%x){at={0}}}}"
    loose = """
    // a comment
    module @m  phase = traced world
      = 1 { program @m(
        %x : f32[2,3]@0   // another
      ) { return ( %x ) { at = { 0 } } }
    }
    // the last line"""
    assert parse_module(tight) == parse_module(loose)


def test_a_location_and_attributes_may_have_other_spaces() -> None:
    head = "module @m phase=traced world=2 {\n  program @m(%x: f32[2]@0) {\n"
    attributes = "{fn = @f, mb = 3}", "{ fn = @f ,\n mb = 3 }"
    locations = 'loc("a.py":3 in f)', 'loc ( "a.py" : 3\n in f )', 'loc("a\\u002epy":3 in "f")'
    texts = {
        f"{head}    %y = call(%x) {first} : f32[2]@0 {loc}\n"
        f"    %z = call(%y) {second} : f32[2]@0 {loc}\n    return(%z) {{at = {{0}}}}\n  }}\n}}\n"
        for first in attributes
        for second in attributes
        for loc in locations
    }
    assert len(texts) == 12
    (printed,) = {format_module(parse_module(text), locations=True) for text in texts}
    assert printed.count('{fn = @f, mb = 3} : f32[2]@0 loc("a.py":3 in f)') == 2


def test_attributes_of_one_text_are_those_of_each_op() -> None:
    text = (
        "module @m phase=traced world=2 {\n"
        "  program @m(%x: f32[2]@0) {\n"
        "    %a = broadcast(%x) {group = {0..1}, root = 0} : f32[2]@{0..1}\n"
        "    %b = broadcast(%x) {group = {0..1}, root = 0} : f32[2]@{0..1}\n"
        "    %c = broadcast(%x) {group = {0..1}, mb = 1, root = 0} : f32[2]@{0..1}\n"
        "    return(%c) {at = {0}}\n"
        "  }\n"
        "}\n"
    )
    assert format_module(parse_module(text)) == text
    lacking = text.replace("%b = broadcast(%x) {group = {0..1}, root = 0}", "%b = broadcast(%x)")
    with pytest.raises(IRError, match="broadcast lacks group, root"):
        parse_module(lacking)
