"""Hooks of MkDocs: colours for blocks of IR, and the changelog and the notebooks as pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pygments import lexers, token
from pygments.lexer import RegexLexer


class IRLexer(RegexLexer):
    """The text form of the IR, one op a line."""

    name = "cg IR"
    aliases = ["cg"]  # noqa: RUF012 (Pygments declares it as a list)
    tokens = {  # noqa: RUF012
        "root": [
            (r"//[^\n]*", token.Comment.Single),
            (r'"[^"\n]*"', token.String),
            (r"%[\w.]+", token.Name.Variable),
            (r"@\{[^}\n]*\}|@[\w.]+", token.Name.Label),
            (r"\b(module|program|function|body|channel|mesh|world|phase)\b", token.Keyword),
            (r"\b(?:f|bf|i|u|c)\d+\w*(?=\[)|\b(?:bool|object|future|unit)\b", token.Keyword.Type),
            (r"\b[a-z_]+(?=\()", token.Name.Function),
            (r"\b[a-z_]+(?= =)", token.Name.Attribute),
            (r"\b\d+\b", token.Number),
            (r"\s+", token.Whitespace),
            (r".", token.Text),
        ]
    }


def on_startup(**_: object) -> None:
    """Let Pygments find the lexer by its name."""
    lexers.LEXERS["IRLexer"] = (__name__, IRLexer.name, tuple(IRLexer.aliases), (), ())
    lexers._lexer_cache[IRLexer.name] = IRLexer


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Links to notebooks lead to their pages; the changelog is the repository's, at its root."""
    if page.file.src_uri == "changelog.md":
        text = (Path(__file__).resolve().parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
        markdown = text.replace("](docs/", "](")
    return re.sub(r"\]\((?!\./)([\w./-]+)\.ipynb\)", r"](\1.md)", markdown)


def on_files(files: Any, *, config: Any, **_: object) -> Any:
    """Add a page for each notebook of the tutorials."""
    for notebook in sorted((Path(__file__).parent / "tutorials").glob("*.ipynb")):
        content = _as_markdown(json.loads(notebook.read_text(encoding="utf-8")), notebook.name)
        page = f"tutorials/{notebook.stem}.md"
        files.append(File.generated(config, page, content=content))
    return files


def _as_markdown(notebook: Any, name: str) -> str:
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join(line for out in cell["outputs"] for line in out["text"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    parts.append(f"[Download this page as a notebook](./{name})")
    return "\n\n".join(parts)
