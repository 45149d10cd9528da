"""Run the tutorials, which are notebooks, and keep in them what their cells print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .snippets import run_parts

_RANKS = 4


def render(notebook: Path) -> str:
    """The notebook with the output of each cell as it is today.

    Raises:
        SnippetError: a cell fails.
    """
    content = json.loads(notebook.read_text(encoding="utf-8"))
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    codes = ["".join(cell["source"]) for cell in cells]
    for cell, output in zip(cells, run_parts(notebook.name, codes, _RANKS), strict=True):
        cell["outputs"] = [_stream(output)] if output else []
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _stream(text: str) -> dict[str, Any]:
    lines = text.splitlines(keepends=True)
    return {"name": "stdout", "output_type": "stream", "text": lines}
