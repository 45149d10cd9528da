"""Hooks of MkDocs: colours for blocks of IR, and the changelog as a page of the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    """Show the changelog of the repository, whose links begin at its root."""
    if page.file.src_uri != "changelog.md":
        return markdown
    text = (Path(__file__).resolve().parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    return text.replace("](docs/", "](")
