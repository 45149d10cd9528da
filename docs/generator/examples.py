"""Run the examples of the API reference, and show each with what it prints."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from .snippets import run_parts

FILE = Path(__file__).resolve().parents[1] / "api_examples.py"
_NAME = re.compile(r"^# cg\.(\w+)$", re.MULTILINE)


@functools.cache
def examples() -> dict[str, str]:
    """The Markdown of each name's example, and that of the prelude by the empty name.

    Raises:
        SnippetError: an example fails.
    """
    text = FILE.read_text(encoding="utf-8").partition('"""\n\n')[2]
    parts = _NAME.split(text)
    names, codes = ["", *parts[1::2]], [parts[0], *parts[2::2]]
    outputs = run_parts(FILE.name, codes, ranks=4)
    return {
        name: _block("python", code) + (f"\n\n{_block('text', out)}" if out.strip() else "")
        for name, code, out in zip(names, codes, outputs, strict=True)
    }


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```"
