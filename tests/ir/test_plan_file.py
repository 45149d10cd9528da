"""Plans as text: what comes back, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.text.plan_file import PlanFile, PlanFileError
from cg.ir.text.printer import format_module

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


def test_what_is_written_is_read() -> None:
    text = str(PLAN)
    read = PlanFile.of(text, "step.plan")
    assert read.is_proven
    assert format_module(read.module) == SCHEDULED
    assert (read.traced, read.facts, read.devices) == (TRACED, PLAN.facts, PLAN.devices)
    assert str(read) == text
    assert format_module(parse_module(text)) == SCHEDULED, "it is a module with comments"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("program @1(%x: f32[2])", "program @1(%x: f32[3])"),
        ('"fuse": null', '"fuse": "inductor"'),
        ('"ranks": "-+-"', '"ranks": "nccl+nccl"'),
        ("//   program @step(%x: f32[2]@{0..1})", "//   program @step(%x: f32[3]@{0..1})"),
    ],
)
def test_a_change_is_noticed(before: str, after: str) -> None:
    text = str(PLAN)
    assert text.count(before) == 1
    changed = PlanFile.of(text.replace(before, after), "step.plan")
    assert not changed.is_proven
    assert PlanFile.of(str(changed), "step.plan").is_proven, "who writes it has proven it"


def test_comments_and_spaces_change_nothing() -> None:
    text = str(PLAN).replace("  program @1", "  // the other one\n\n  program @1")
    assert PlanFile.of(text, "step.plan").is_proven


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "step.plan is no plan, or a part of it is missing: save it again"),
        (SCHEDULED, "step.plan is no plan"),
        (str(PLAN).replace("cg plan 1", "cg plan 2"), "a plan of version 2, and this cg reads"),
        (str(PLAN).replace('{"fuse"', "{fuse"), "step.plan is damaged: .*; save it again"),
        (str(replace(PLAN, module=parse_module(TRACED))), "has programs that are not scheduled"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanFileError, match=message):
        PlanFile.of(text, "step.plan")


def test_a_long_file_without_its_end_is_refused() -> None:
    """In one pass over its lines: not by all ways to group them."""
    text = str(replace(PLAN, traced=TRACED * 30))
    assert PlanFile.of(text, "step.plan").is_proven
    with pytest.raises(PlanFileError, match="a part of it is missing"):
        PlanFile.of(text.removesuffix("\n"), "step.plan")


def test_an_error_names_the_line_of_the_file() -> None:
    text = str(PLAN).replace("return(%x)\n  }\n  program", "give_back(%x)\n  }\n  program")
    with pytest.raises(IRError, match=r"step.plan:7:5: error: 'give_back' is no op"):
        PlanFile.of(text, "step.plan")


def test_no_damaged_file_passes_for_a_whole_one() -> None:
    """Cut off or changed anywhere: never other programs that pass for proven."""
    text, draw = str(PLAN), random.Random(0)
    damaged = [text[:length] for length in range(len(text))]
    for _ in range(1000):
        at = draw.randrange(len(text))
        damaged.append(text[:at] + chr(draw.randrange(32, 127)) + text[at + 1 :])
    refused = 0
    for each in damaged:
        try:
            read = PlanFile.of(each, "step.plan")
        except (PlanFileError, IRError):
            refused += 1
            continue
        same = (format_module(read.module), read.traced, read.facts, read.devices) == (
            (SCHEDULED, TRACED, PLAN.facts, PLAN.devices)
        )
        assert read.is_proven <= same, each
    assert refused > 1000
