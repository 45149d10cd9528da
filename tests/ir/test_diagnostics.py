"""The form of errors about IR."""

from __future__ import annotations

from pathlib import Path

import pytest

from cg.ir.location import Location
from cg.ir.text.diagnostics import Diagnostic, IRError, error
from cg.ir.text.parser import parse_module

TEXT = """module @m phase=traced world=2 {
  program @step(%h: f32[2]@0, %h.1: f32[2]@0) {
    %x = call(%h.1, %h) {fn = @f} : f32[2]@0
    %y, %x.1 = call(%x) {fn = @f} : f32[2]@0, f32[2]@0
    return(%y)
  }
}
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text("def step(x):\n    h = stage.forward(x)\n    return h\n")
    return file


def test_the_op_is_drawn_with_the_user_s_line(user_file: Path) -> None:
    program = parse_module(TEXT).program
    op = program.ops[1]
    op.loc = Location(str(user_file), 2, "step")
    diagnostic = Diagnostic("it is wrong", op, program, help="make it right")
    assert diagnostic.render().splitlines() == [
        "error: it is wrong",
        "  in program @step:",
        "    %x = call(%h.1, %h) {fn = @f} : f32[2]@0",
        "    %y, %x.1 = call(%x) {fn = @f} : f32[2]@0, f32[2]@0",
        "    " + "^" * 50,
        f"  written at {user_file}:2, in step:",
        "    h = stage.forward(x)",
        "  help: make it right",
    ]


def underlined(diagnostic: Diagnostic) -> str:
    lines = diagnostic.render().splitlines()
    (marks,) = (i for i, line in enumerate(lines) if set(line) == {" ", "^"})
    start = lines[marks].index("^")
    return lines[marks - 1][start : len(lines[marks])]


@pytest.mark.parametrize(
    ("op", "value", "text", "column"),
    [
        (0, "%h", "%h", 20),
        (0, "%h.1", "%h.1", 14),
        (0, "%x", "%x", 4),
        (1, "%x", "%x", 20),
        (1, "%x.1", "%x.1", 8),
        (1, "%y", "%y", 4),
        (2, "%y", "%y", 11),
    ],
)
def test_a_value_is_underlined_where_it_stands(op: int, value: str, text: str, column: int) -> None:
    program = parse_module(TEXT).program
    values = {f"%{v.name}": v for o in program.ops for v in (*o.operands, *o.results)}
    diagnostic = Diagnostic("wrong", program.ops[op], program, value=values[value])
    assert underlined(diagnostic) == text
    marks = next(line for line in diagnostic.render().splitlines() if set(line) == {" ", "^"})
    assert marks.index("^") == column


def test_without_the_file_only_the_place_is_named() -> None:
    diagnostic = Diagnostic("wrong", loc=Location("/nowhere/train.py", 3))
    assert diagnostic.render() == "error: wrong\n  written at /nowhere/train.py:3"


def test_a_program_without_an_op_is_named() -> None:
    assert "in program @step" in Diagnostic("wrong", program=parse_module(TEXT).program).render()


def test_notes_are_indented() -> None:
    program = parse_module(TEXT).program
    note = Diagnostic("the other one", program.ops[2], program)
    lines = str(Diagnostic("wrong", notes=(note,))).splitlines()
    assert lines[:3] == ["error: wrong", "  note: the other one", "    in program @step:"]


def test_an_error_shows_the_first_diagnostics_and_counts_the_rest() -> None:
    many = IRError(*(Diagnostic(f"number {i}") for i in range(25)))
    lines = str(many).splitlines()
    assert lines[0] == "error: number 0"
    assert lines[-1] == "... and 5 more errors"
    assert len(lines) == 21


def test_error_makes_one_diagnostic() -> None:
    with pytest.raises(IRError, match="error: wrong\n  help: do this") as caught:
        raise error("wrong", help="do this")
    assert len(caught.value.diagnostics) == 1
