"""The checker of English finds what its rules forbid, and the pages keep to them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import style  # noqa: E402


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("It simply works.", "'simply' says nothing"),
        ("Utilize it in\norder.", "'Utilize' says nothing"),
        ("Each seat has two loans.", "'loan' is retired"),
        ("## How to Write It", "'Write' in a heading begins with a capital letter"),
        ("word " * 41 + "end.", "a sentence of 42 words"),
        ("One. What it keeps is gone.", "the subject is a clause with what"),
    ],
)
def test_a_rule_finds_what_it_forbids(text: str, why: str) -> None:
    assert why in next(found for _, found in style.problems(text, ["loan"]))


@pytest.mark.parametrize(
    "text",
    [
        "`simply` and `seat` are code.",
        "```text\nIt simply works.\n```",
        "<!-- generated: x -->\nIt simply works.\n<!-- end -->",
        "## 2. Write it: The PyTorch way, with Ray",
        "word " * 30 + "end. " + "word " * 30 + "end.",
        "| " + "word " * 30 + " | " + "word " * 30 + " |",
        "What does it keep? A seatbelt.",
    ],
)
def test_what_the_rules_allow_is_left_alone(text: str) -> None:
    assert list(style.problems(text, ["seat"])) == []


def test_lines_are_counted_as_in_the_page() -> None:
    text = "# A\n\n```sh\nsimply\n```\n\nIt works.\nIt obviously works.\n"
    assert [number for number, _ in style.problems(text, [])] == [8]


def test_all_pages_keep_to_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert style.main() == 0, capsys.readouterr().out


def test_the_glossary_lists_retired_words() -> None:
    words = style.retired(style.GLOSSARY.read_text(encoding="utf-8"))
    assert len(words) > 5
    assert "---" not in words
