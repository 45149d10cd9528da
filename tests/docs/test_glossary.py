"""Names of classes against the glossary, which promises one meaning for each term."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import style  # noqa: E402
import terms  # noqa: E402

ROOMS = ("ir", "tracer", "passes", "backends", "launch")
GLOSSARY = terms.GLOSSARY.read_text(encoding="utf-8")
MEANINGS = terms.terms(GLOSSARY)

_COMMON = frozenset(
    re.findall(
        r"\w+",
        """a all an and another any are as at be by can do each for from has have if in is it its
        may no not of on one or other rank so that the their them these this those to what where
        which who with""",
    )
)
"""Words that tell no two meanings apart."""


@dataclass(frozen=True)
class NamedClass:
    """A class of the product."""

    name: str
    file: str
    docstring: str

    @property
    def words(self) -> str:
        """Its name in words: `RankScheduler` is a rank scheduler."""
        parts = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+", self.name)
        return " ".join(parts).lower()


@cache
def classes() -> tuple[NamedClass, ...]:
    return tuple(_classes())


def _classes() -> Iterator[NamedClass]:
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    path = str(file.relative_to(ROOT))
                    yield NamedClass(node.name, path, ast.get_docstring(node) or "")


def stems(text: str) -> frozenset[str]:
    words = re.findall(r"[a-z]{2,}", text.lower())
    endings = re.compile(r"(ions?|ings?|ed|es|s|e)$")
    return frozenset(endings.sub("", word) for word in words if word.rstrip("s") not in _COMMON)


def retired(named: NamedClass, words: list[str]) -> str | None:
    """The retired word that a class is named by."""
    return next((w for w in words if re.search(rf"\b{re.escape(w)}s?\b", named.words)), None)


def bare(named: NamedClass, meanings: Mapping[str, str]) -> str | None:
    """The term of several words by whose last one alone a class is named.

    A word that the glossary has with an adjective alone has several meanings in the field.
    """
    several = (term for term in meanings if " " in term)
    return next((term for term in several if term.split()[-1] == named.words), None)


def is_about(named: NamedClass, meanings: Mapping[str, str]) -> bool:
    """Whether a class that is named as a term is described by a word of the term's meaning."""
    if named.words not in meanings:
        return True
    shared = stems(named.docstring) & stems(meanings[named.words])
    return bool(shared - stems(named.words))


def test_no_class_has_a_retired_name() -> None:
    words = style.retired(GLOSSARY)
    named = {f"{c.file}: {c.name}": word for c in classes() if (word := retired(c, words))}
    assert named == {}, "the glossary says what to call them"


def test_no_class_leaves_the_adjective_of_a_term_out() -> None:
    several = {term: means for term, means in MEANINGS.items() if term.split()[-1] not in MEANINGS}
    named = {f"{c.file}: {c.name}": term for c in classes() if (term := bare(c, several))}
    assert named == {}, "name them by what tells them apart from the term"


def test_a_class_that_is_named_as_a_term_is_what_the_term_means() -> None:
    others = {
        f"{c.file}: {c.name}": MEANINGS[c.words] for c in classes() if not is_about(c, MEANINGS)
    }
    assert others == {}, "rename them, or say in their docstrings how they are what the term means"


def test_what_the_glossary_points_to_exists() -> None:
    quoted = set(re.findall(r"`([^`\s]+)`", " ".join(MEANINGS.values())))
    names = {c.name for c in classes()}
    missing = {
        text
        for text in quoted
        if (text.endswith(".py") and not (ROOT / text).is_file())
        or (re.fullmatch(r"[A-Z][a-z]\w+", text) and text not in names)
    }
    assert missing == set()


@pytest.mark.parametrize(
    ("name", "docstring", "is_wrong"),
    [
        ("RecordRings", "", retired),
        ("_Ring", "", bare),
        ("Slot", "The attribute that a tensor hangs on.", is_about),
    ],
)
def test_a_wrong_name_is_seen(name: str, docstring: str, is_wrong: object) -> None:
    named = NamedClass(name, "somewhere.py", docstring)
    meanings = {"command ring": "a ring buffer", "slot": "room for one message of a channel"}
    assert retired(named, ["record ring"]) == ("record ring" if is_wrong is retired else None)
    assert bare(named, meanings) == ("command ring" if is_wrong is bare else None)
    assert is_about(named, meanings) == (is_wrong is not is_about)
    room = NamedClass("Slot", "somewhere.py", "Room for a message.")
    assert is_about(room, meanings)
