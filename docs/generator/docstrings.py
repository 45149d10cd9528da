"""Turn a docstring into Markdown."""

from __future__ import annotations

import inspect
import re
import textwrap

_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Source):\s*(.*)")
_ENTRY = re.compile(r"([\w*][\w.*, ]*): (.*)", re.DOTALL)
_LITERAL = "::"


def to_markdown(doc: str | None, skip: tuple[str, ...] = (), language: str = "text") -> str:
    """Paragraphs as they are, `Args:` and the like as lists, what follows `::` as code.

    Args:
        doc: the docstring.
        skip: sections to leave out.
        language: of the code blocks.
    """
    parts: list[str] = []
    blocks = _blocks(inspect.cleandoc(doc or ""))
    while blocks:
        block = blocks.pop(0)
        heading = _SECTION.match(block)
        if heading is not None:
            if heading[1] not in skip:
                parts.append(_section(heading[1], block[heading.end(1) + 1 :]))
        elif block.endswith(_LITERAL):
            code = []
            while blocks and blocks[0].startswith(" "):
                code.append(blocks.pop(0))
            body = textwrap.dedent("\n\n".join(code))
            parts.append(f"{block.removesuffix(_LITERAL)}:\n\n```{language}\n{body}\n```")
        else:
            parts.append(block)
    return "\n\n".join(parts)


def first_sentence(doc: str | None) -> str:
    """The docstring's first paragraph on one line."""
    return " ".join(inspect.cleandoc(doc or "").partition("\n\n")[0].split())


def _blocks(text: str) -> list[str]:
    return [block for block in re.split(r"\n\s*\n", text.strip("\n")) if block.strip()]


def _section(name: str, body: str) -> str:
    """`Args:` and its kin; each entry begins where the indentation is least."""
    body = textwrap.dedent(body.strip("\n")) if body.startswith("\n") else body.strip()
    title = {"Args": "Arguments"}.get(name, name)
    if name in ("Returns", "Source"):
        return f"*{title}*: {' '.join(body.split())}"
    entries = re.split(r"\n(?=\S)", body)
    lines = [f"*{title}*:", ""]
    for entry in entries:
        text = " ".join(entry.split())
        match = _ENTRY.fullmatch(text)
        names = ", ".join(f"`{part.strip()}`" for part in match[1].split(",")) if match else ""
        lines.append(f"- {names}: {match[2]}" if match else f"- {text}")
    return "\n".join(lines)
