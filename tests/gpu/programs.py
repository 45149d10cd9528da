"""Programs that pages write down: their Python snippets, one behind the other, as a file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .documented import ROOT

_SNIPPET = re.compile(
    r"^<!-- run(?P<options>[^\n]*) -->\n+```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_NAMES_A_RANK = re.compile(r"\.on\((?:[1-9]|[^\n]* in range\([2-9])")


@dataclass(frozen=True)
class Program:
    """What the Python snippets of a page make up.

    Attributes:
        page: that writes it down, relative to the checkout.
        text: its source.
        ranks: that it is for; the page says so in its first snippet.
        needs: programs that its snippets need.
    """

    page: str
    text: str
    ranks: int
    needs: tuple[str, ...] = ()

    @property
    def scales(self) -> bool:
        """True if it asks how many ranks there are, and names none, so it runs on any number."""
        return "cg.world_size()" in self.text and not _NAMES_A_RANK.search(self.text)


def of_page(page: str, above: int | None = None) -> Program | None:
    """The program of a page, or of its part above a line; None if there is no snippet to run.

    Snippets that have to fail, and those of shell, are no part of it.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    text = text if above is None else "".join(text.splitlines(keepends=True)[: above - 1])
    blocks = [b for b in _SNIPPET.finditer(text) if b["language"] == "python"]
    run = [block["body"] for block in blocks if "raises" not in block["options"].split()]
    if not run:
        return None
    ranks = re.search(r"ranks=(\d+)", blocks[0]["options"])
    needs = tuple(n for block in blocks for n in re.findall(r"needs=(\S+)", block["options"]))
    return Program(page, "\n".join(run), int(ranks[1]) if ranks else 2, needs)


def above(page: str, line: int) -> Program:
    """The program that a command on a page starts: that of the page above, else the README's."""
    found = of_page(page, line) or of_page("README.md")
    assert found is not None
    return found


SEEDED = "import torch\n\ntorch.manual_seed(0)\n"
"""What the generator of pages does before a page's first snippet, so that ranks draw alike."""


def write(program: Program, file: Path) -> None:
    file.write_text(SEEDED + program.text, encoding="utf-8")
