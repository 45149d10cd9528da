"""Agreement of ranks on what they say, and the message where they differ."""

from __future__ import annotations

from typing import Any

import pytest

from cg.backends.agreement.gather import ComparedText, agree
from cg.backends.errors import PlanMismatch
from cg.backends.virtual.world import VirtualWorld
from cg.ir.text.differences import disagreement, named

from .cpu.world import run_ranks


def messages(*parts: dict[str, ComparedText]) -> list[str]:
    """The message that each rank raises where ranks say these parts."""

    def body(world: Any) -> str:
        try:
            agree(world, "the ranks differ", parts[world.rank], "Mend it")
        except PlanMismatch as error:
            return str(error)
        return ""

    return run_ranks(len(parts), body)


def test_equal_texts() -> None:
    assert messages({"a": ComparedText("mine is", "1")}, {"a": ComparedText("yours is", "1")}) == [
        "",
        "",
    ]
    agree(VirtualWorld(2), "the ranks differ", {}, "")


def test_the_first_part_that_all_have_and_that_differs() -> None:
    zero = {
        "only": ComparedText("it is", "x"),
        "a": ComparedText("a is", "1"),
        "b": ComparedText("b is", "2"),
    }
    other = {"a": ComparedText("a is", "1"), "b": ComparedText("b is", "3")}
    (message,) = set(messages(zero, other, other))
    assert message == "the ranks differ: b is 2 on rank 0, and 3 on ranks 1 and 2. Mend it"


def test_a_part_that_some_lack() -> None:
    (message,) = set(messages({"a": ComparedText("a is", "1")}, {}))
    assert message == "the ranks differ: a is 1 on rank 0, and (nothing) on rank 1. Mend it"


def test_another_order() -> None:
    one, other = ComparedText("a is", "1"), ComparedText("b is", "2")
    (message,) = set(messages({"a": one, "b": other}, {"b": other, "a": one}))
    begin = "their order differs: where it begins to, there is a on rank 0, and b on rank 1"
    assert message == f"the ranks differ: {begin}. Mend it"


def test_long_texts() -> None:
    (message,) = set(
        messages({"t": ComparedText("in it", "x\ny\n")}, {"t": ComparedText("in it", "x\nz\n")})
    )
    assert (
        "in it ranks {0} and ranks {1} disagree. The first line that differs is line 2" in message
    )
    assert "ranks {0}: y\n  ranks {1}: z\nMend it" in message


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([2], "rank 2"), ([0, 3], "ranks 0 and 3"), ([0, 1, 4], "ranks 0, 1 and 4")],
)
def test_names_of_ranks(ranks: list[int], words: str) -> None:
    assert named(ranks) == words


def test_ranks_without_a_text_do_not_count() -> None:
    text = disagreement([None, "a\nb", "a\nc", None, "a\nb"])
    assert text.startswith("ranks {1,4} and ranks {2} disagree. The first line that differs is")
    assert text.endswith("line 2:\n  ranks {1,4}: b\n  ranks {2}: c\n")
