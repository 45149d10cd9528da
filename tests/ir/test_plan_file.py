"""Plans as text: what comes back, what a rank reads of it, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.text.plan_file import PlanFile, PlanFileError
from cg.ir.text.printer import format_module, format_program
from cg.ir.text.stored_plan import StoredPlan

TRACED = """module @step phase=traced world=2 {
  program @step(%x: f32[2]@{0..1}) {
    return(%x) {at = {0..1}}
  }
}
"""
SCHEDULED = """module @step phase=scheduled world=2 {
  program @0(%x: f32[2]) {
    return(%x)
  }
  program @1(%x: f32[2]) {
    return(%x)
  }
}
"""
PLAN = PlanFile(parse_module(SCHEDULED), TRACED, {"fuse": None, "remat": ["a0"]}, {"ranks": "-+-"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step.plan"
    path.write_text(str(PLAN))
    return path


def test_what_is_written_is_read(file: Path) -> None:
    text = str(PLAN)
    read, stored = PlanFile.of(text, "step.plan"), StoredPlan.open(file)
    for plan in (read, stored):
        assert format_module(plan.module) == SCHEDULED
        assert (plan.traced, plan.facts, plan.devices) == (TRACED, PLAN.facts, PLAN.devices)
    assert str(read) == text
    assert format_module(parse_module(text)) == SCHEDULED, "it is a module with comments"


def test_a_rank_reads_its_own_program_alone(file: Path) -> None:
    """Which it checks; a change in another is for the rank that reads that."""
    text = file.read_text()
    start = text.index("  program @0")
    file.write_text(text[:start] + text[start:].replace("return(%x)", "return(%y)", 1))
    module = StoredPlan.open(file).module
    program = module.program_of(1)
    assert format_program(program) == "program @1(%x: f32[2]) {\n  return(%x)\n}\n"
    assert module.program_of(1) is program
    with pytest.raises(PlanFileError, match="was changed since its programs were proven"):
        module.program_of(0)
    with pytest.raises(PlanFileError, match="was changed since its programs were proven"):
        list(module.programs)


def test_programs_are_those_of_the_file_that_was_opened(file: Path) -> None:
    module = StoredPlan.open(file).module
    other = file.with_name("other.plan")
    other.write_text(str(PLAN).replace("%x", "%y"))
    other.replace(file)
    assert [value.name for value in module.program_of(0).params] == ["x"]
    file.unlink()
    assert [value.name for value in module.program_of(1).params] == ["x"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("program @1(%x: f32[2])", "program @1(%x: f32[3])"),
        ('"fuse": null', '"fuse": "inductor"'),
        ('"ranks": "-+-"', '"ranks": "nccl+nccl"'),
        ("//   program @step(%x: f32[2]@{0..1})", "//   program @step(%x: f32[3]@{0..1})"),
        ("  program @1", "  // the other one\n  program @1"),
        ("// index 0000", "// index 0001"),
        ("// parts\n", "// parts\n// 0 " + "0" * 64 + "\n"),
    ],
)
def test_a_change_is_noticed(file: Path, before: str, after: str) -> None:
    text = str(PLAN)
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))
    with pytest.raises(PlanFileError, match=r"was changed since .*: cg-opt .*step\.plan > new"):
        list(StoredPlan.open(file).module.programs)
    proven = PlanFile.of(file.read_text(), "step.plan")  # cg-opt reads and writes it so
    file.write_text(str(proven))
    assert len(list(StoredPlan.open(file).module.programs)) == 2


def test_programs_are_written_by_rank(file: Path) -> None:
    """So that the n-th is that of rank n, in whatever order an editor has put them."""
    module = parse_module(SCHEDULED)
    module.programs = list(reversed(module.programs))
    file.write_text(str(replace(PLAN, module=module)))
    assert [program.rank for program in StoredPlan.open(file).module.programs] == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "step.plan is no plan, or a part of it is missing: save it again"),
        (SCHEDULED, "step.plan is no plan"),
        (str(PLAN).replace("cg plan 2", "cg plan 1"), "a plan of version 1, and this cg reads"),
        (str(PLAN).replace('{"fuse"', "{fuse"), "step.plan is damaged: .*; save it again"),
        (str(PLAN).replace("// parts\n", "// Parts\n"), "step.plan is no plan"),
        (str(PLAN).replace("null", "[" * 20_000), "step.plan is damaged: .*; save it again"),
        (str(PLAN).replace("null", "1" * 5000), "step.plan is damaged: .*; save it again"),
        (str(PLAN).replace("plan 2", "plan " + "2" * 5000), "step.plan is no plan"),
        (str(replace(PLAN, module=parse_module(TRACED))), "has programs that are not scheduled"),
    ],
)
def test_what_is_no_plan_is_refused(file: Path, text: str, message: str) -> None:
    with pytest.raises(PlanFileError, match=message):
        PlanFile.of(text, "step.plan")
    file.write_text(text)
    with pytest.raises(PlanFileError, match=message):
        StoredPlan.open(file)


def test_a_long_file_without_its_end_is_refused(file: Path) -> None:
    """In one pass over its lines: not by all ways to group them."""
    text = str(replace(PLAN, traced=TRACED * 30, facts={"limits": {"f" * 5000: 1}}))
    file.write_text(text)
    assert StoredPlan.open(file).traced == TRACED * 30
    file.write_text(text.removesuffix("\n"))
    with pytest.raises(PlanFileError, match="was changed"):
        StoredPlan.open(file)
    with pytest.raises(PlanFileError, match="a part of it is missing"):
        PlanFile.of(text.partition("// parts")[0], "step.plan")


def test_an_error_names_the_line_of_the_file() -> None:
    text = str(PLAN).replace("return(%x)\n  }\n  program", "give_back(%x)\n  }\n  program")
    with pytest.raises(IRError, match=r"step.plan:7:5: error: 'give_back' is no op"):
        PlanFile.of(text, "step.plan")


def test_no_damaged_file_passes_for_a_whole_one(file: Path) -> None:
    """Cut off or changed anywhere: never other programs that pass for proven."""
    text, draw = str(PLAN), random.Random(0)
    damaged = [text[:length] for length in range(len(text))]
    for _ in range(1000):
        at = draw.randrange(len(text))
        damaged.append(text[:at] + chr(draw.randrange(32, 127)) + text[at + 1 :])
    refused = 0
    for changed in damaged:
        if changed == text:
            continue
        file.write_text(changed)
        try:
            read = StoredPlan.open(file)
            programs = format_module(read.module)
        except PlanFileError:
            refused += 1
            continue
        same = (programs, read.traced, read.facts, read.devices)
        assert same == (SCHEDULED, TRACED, PLAN.facts, PLAN.devices), changed
    assert refused > len(text) + 900
