"""Dimensions that are cut between units of several indices."""

from __future__ import annotations

import pytest

from cg.ir.layout import Cut
from cg.ir.text.literals import parse_type
from cg.ir.types import Mesh, TensorType

MESH = Mesh((0, 1, 2), "m", (("dp", 3),))


@pytest.mark.parametrize(
    ("text", "regions"),
    [
        ("f32[8x7/dp]@m", [((0, 14),), ((14, 35),), ((35, 56),)]),
        ("f32[2*4x2/dp]@m", [((0, 2), (8, 10)), ((2, 4), (10, 12)), ((4, 8), (12, 16))]),
        ("f32[2x5/dp]@m", [(), ((0, 5),), ((5, 10),)]),
    ],
)
def test_pieces_are_whole_units(text: str, regions: list[object]) -> None:
    read = parse_type(text, {"m": MESH})
    assert isinstance(read, TensorType)
    assert str(read) == text
    assert [read.region(rank)[0] for rank in MESH.ranks] == regions


def test_units_of_one_index_are_the_plain_cut() -> None:
    position = {"dp": (1, 3)}
    assert Cut(("dp",), 1, 1).piece(8, position) == Cut(("dp",)).piece(8, position) == ((2, 5),)


@pytest.mark.parametrize("text", ["f32[8x7]@m", "f32[8x0/dp]@m"])
def test_a_unit_without_a_cut_or_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a type|units of 0"):
        parse_type(text, {"m": MESH})
