"""A hook of MkDocs: the first use of a term on a page leads to the glossary, which it reads."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

GLOSSARY = Path(__file__).with_name("glossary.md")
LINKED = ("index.md", "start/", "tutorials/", "guide/", "howto/", "migrate/", "backends/")
"""Pages whose terms are linked, by the beginnings of their names."""

ORDINARY = frozenset(
    re.findall(
        r"\w+",
        """block body code command effect engine event function heap instance lend method module
        order phase piece place plan poison port post program queue region slot task trace
        traffic value""",
    )
)
"""Terms that pages use in their ordinary sense, too; links at these would often be wrong."""

_ROW = re.compile(r"^\| ([^|`]+?) \| (.+) \|$", re.MULTILINE)
_CELL = re.compile(r"<td>([^<]+)</td>(?=\s*<td>)")
_UNLINKED = re.compile(r"(<(a|h[1-6]|code|pre|svg|summary|th)\b.*?</\2>|<[^>]+>)", re.DOTALL)


def terms(text: str) -> dict[str, str]:
    """What each term of the glossary means; a row such as `rank, world` has two."""
    rows = _ROW.findall(re.sub(r"\n## Retired.*", "\n", text, flags=re.DOTALL))
    meanings = {name: means for names, means in rows for name in names.split(", ")}
    del meanings["term"]
    return meanings


def anchor(term: str) -> str:
    """The anchor of a term on the page of the glossary."""
    return f"term-{term.replace(' ', '-')}"


def link_terms(content: str, meanings: dict[str, str], glossary: str) -> str:
    """Link the first use of each term.

    Args:
        content: HTML. Headings, code and links in it stay as they are.
        meanings: by term; one of several words goes before the words in it.
        glossary: the address of its page, from this one.
    """
    left = {term: means for term, means in meanings.items() if term not in ORDINARY}
    names = "|".join(re.escape(term) for term in sorted(left, key=len, reverse=True))
    uses = re.compile(rf"(?<![\w./-])({names})(s?)(?![\w/-]|\.\w)", re.IGNORECASE)

    def link(use: re.Match[str]) -> str:
        means = left.pop(use[1].lower(), None)
        if means is None:
            return use[0]
        title = html.escape(re.sub(r"[`*]|\]\([^)]*\)|\[", "", means))
        address = f"{glossary}#{anchor(use[1].lower())}"
        return f'<a class="term" href="{address}" title="{title}">{use[0]}</a>'

    # Of three parts the first is text, the second is kept, and the third is the tag's name.
    parts = _UNLINKED.split(content)
    return "".join(
        uses.sub(link, text) + kept
        for text, kept in zip(parts[::3], [*parts[1::3], ""], strict=True)
    )


def mark_terms(content: str) -> str:
    """Give each term of the glossary's page its anchor."""

    def mark(cell: re.Match[str]) -> str:
        names = [f'<span id="{anchor(name)}">{name}</span>' for name in cell[1].split(", ")]
        return f"<td>{', '.join(names)}</td>"

    return _CELL.sub(mark, content)


def on_page_content(content: str, *, page: Any, **_: object) -> str:
    """What MkDocs calls with the HTML of each page."""
    name = page.file.src_uri
    if name == GLOSSARY.name:
        return mark_terms(content)
    if not name.startswith(LINKED):
        return content
    glossary = "../" * page.url.count("/") + "glossary/"
    return link_terms(content, terms(GLOSSARY.read_text(encoding="utf-8")), glossary)
