"""Programs that are read by lines are those that are read by tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cg.ir.phases import Phase
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module, parse_tokens
from cg.ir.text.printed_programs import NotPrinted, split_module, split_programs
from cg.ir.text.printer import format_module

from ..sampling import scaled
from .strategies import modules

PIECES = [
    *' \n%@(){}",:=/-0\\',
    "//",
    "loc(",
    " : ",
    " = ",
    '%"',
    '"',
    "%x",
    "{mb = 1}",
    "program @0(",
]


def outcome(read: object, text: str) -> str:
    """The text of the module that is read, or of the error."""
    try:
        assert callable(read)
        return format_module(read(text), locations=True)
    except IRError as error:
        return f"error: {error}"


@given(module=modules(Phase.SCHEDULED), data=st.data())
@settings(max_examples=scaled(150))
def test_a_changed_text_is_read_as_its_tokens_are(module: object, data: st.DataObject) -> None:
    text = format_module(module, locations=True)  # type: ignore[arg-type]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        end = min(len(text), at + data.draw(st.integers(0, 4)))
        text = text[:at] + data.draw(st.sampled_from(["", *PIECES, text[at : at + 9]])) + text[end:]
    assert outcome(parse_module, text) == outcome(parse_tokens, text)


PROGRAM = """module @m phase=traced world=2 {
  program @m(%x: f32[2]@0) {
    %a, %b = call(%x) {fn = @f, mb = 3} : f32[2]@0, f32[2]@0 loc("a.py":3 in f)
    return(%b) {at = {0}}
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%a, %b =", "%a, %a ="),
        ("%a, %b =", "%x, %b ="),
        ("%a, %b =", "%a b, %b ="),
        ("%a, %b =", "%a,%b ="),
        ("%a, %b =", '%"a", %b ='),
        ("%a, %b =", "%a ="),
        ("%a, %b = ", ""),
        ("call(%x)", "call(%b)"),
        ("call(%x)", "call(%x"),
        ("call(%x)", "call %x)"),
        ("call(%x)", "cal(%x)"),
        ("call(%x)", "call(%x // %a)"),
        ("mb = 3}", "mb = 3, mb = 3}"),
        ("mb = 3}", "mb = 3"),
        ("mb = 3}", "mb = 3}}"),
        ("fn = @f, ", ""),
        (" : f32[2]@0, f32[2]@0", ""),
        (" : f32[2]@0, f32[2]@0", " : "),
        (" : f32[2]@0, f32[2]@0", " : f32[2]@0, f32[2]@0, f32[2]@0"),
        (" : f32[2]@0, f32[2]@0", " : f32[2]@0, f32[2]@0 // loc"),
        ('loc("a.py":3 in f)', 'loc("a.py":3 in f) loc("a.py":3 in f)'),
        ('loc("a.py":3 in f)', 'loc("a.py":3 in f'),
        ('loc("a.py":3 in f)', 'loc("a\\u002epy":3 in f)'),
        ("return(%b) {at = {0}}", "return(%b) {at = {0}} return(%b) {at = {0}}"),
        ("  }\n}\n", "  }\n"),
        ("  }\n}\n", "}\n"),
        ("  }\n}\n", "  }\n}\n}\n"),
        ("  }\n}\n", "  }\n  channel 0 {}\n}\n"),
        ("  }\n}\n", "  }\n}\n// the end\n"),
    ],
)
def test_a_line_in_another_form_is_read_as_its_tokens_are(old: str, new: str) -> None:
    assert old in PROGRAM
    text = PROGRAM.replace(old, new)
    assert outcome(parse_module, text) == outcome(parse_tokens, text)


@given(modules(Phase.SCHEDULED))
@settings(max_examples=scaled(20))
def test_what_is_printed_is_read_by_lines(module: object) -> None:
    text = format_module(module, locations=True)  # type: ignore[arg-type]
    try:
        parts = list(split_programs(split_module(text)[1]))
    except NotPrinted:
        assert '%"' in text or "//" in text
    else:
        assert sum(len(lines) for _, lines in parts) == text.count("\n    ")
