"""Transfers and collectives that move the rows of a rank's experts: what they refuse."""

from __future__ import annotations

import pytest

from cg.ir.layout import Region
from cg.ir.ops.row_collectives import expected_share
from cg.ir.text.parser import parse_module

from .valid_modules import ROWS, errors

GATHER = "experts = {[0:3+5:6], [0:0]}, group = {0..1}, lead = 1"
REFUSED = {
    "no ids": ("%y = transfer(%x, %i)", "%y = transfer(%x)", "one operand; with experts, ids too"),
    "ids of some ranks": (
        "experts = {[0:3], [3:8], [0:3], [3:8]}, lead = 1",
        "experts = {[0:3], [3:8]}, lead = 1",
        "rows travel between the ranks of one mesh",
    ),
    "no rows": (GATHER, GATHER.replace("lead = 1", "lead = 3"), "whose first 3 dimensions"),
    "rows that ids lack": (
        GATHER,
        GATHER.replace("lead = 1", "lead = 2"),
        "has 16 rows, and the ids %i0 are i64[4,2]",
    ),
    "two dimensions of experts": (
        GATHER,
        GATHER.replace("[0:0]", "[0:0,0:1]"),
        "experts are regions of one dimension, here one has 2",
    ),
    "experts of two ranks in part": (
        GATHER,
        GATHER.replace("[0:0]", "[2:4]"),
        "some experts in common, and not all",
    ),
    "experts of one rank": (GATHER, GATHER.replace(", [0:0]", ""), "has the experts of 1"),
    "other ids at another rank": (
        "%i1 = slice(%i) {region = [0:4,0:2]} : i64[4,2]@1",
        "%i1 = slice(%i) {region = [0:4,0:1]} : i64[4,1]@1",
        "ranks have different ids",
    ),
    "floating ids": ("%i: i64[8/dp,2]@m", "%i: f32[8/dp,2]@m", "ids are integers"),
    "no ids of a rank": ("(%x0, %x1, %i0, %i1)", "(%x0, %x1, %i0)", "one tensor and the ids for"),
    "a sum of a cut tensor": (
        "{experts = {[0:3], [3:8]}, group = {0..1}, lead = 2} : f32[2,2,4]@0, f32[2,2,4]@1",
        "{experts = {[0:3], [3:8]}, group = {0..1}, lead = 2} : f32[4,2,4]@0, f32[4,2,4]@1",
        "this reduce_scatter_rows makes f32[2,2,4]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    old, new, message = REFUSED[name]
    assert old in ROWS
    text = ROWS.replace(old, new)
    if name == "floating ids":
        text = text.replace("i64", "f32")
    assert message in errors(parse_module(text))


@pytest.mark.parametrize(
    ("experts", "count", "choices", "share"),
    [
        (((0, 4),), 8, 1, 1 / 2),
        (((0, 2),), 4, 2, 1 - 1 / 6),  # of six pairs, one avoids both
        (((0, 2), (5, 7)), 8, 8, 1.0),
        ((), 8, 2, 0.0),
        (((0, 1),), 4, 4, 1.0),
    ],
)
def test_the_share_of_rows_that_travel(
    experts: tuple[tuple[int, int], ...], count: int, choices: int, share: float
) -> None:
    region: Region = (experts,)
    assert expected_share(region, count, choices) == pytest.approx(share)
