"""Check the English of pages and docstrings: `python docs/style.py`, which `make lint` runs.

The rules are those of CONTRIBUTING.md. Words that are no longer used, and what to say for them,
stand in the glossary.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "design"),
    *sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")),
)

CODE = ("ir", "tracer", "passes", "backends", "launch", "examples")
"""The folders whose docstrings are read as well."""

EMPTY = r"""(?ix)\b(simply|obviously|of\ course|basically|clearly|easily|trivially|effortless(ly)?
|seamless(ly)?|leverag(e|es|ing)|utili[sz](e|es|ing)|in\ order\ to|note\ that|blazing(ly)?)\b"""
"""Words that say nothing, or for which there is a plain one."""

LONGEST = 40
"""Words of a sentence."""

CAPITAL = re.compile(r"(?<=[\w,`)]) ([A-Z][a-z]\w*)")
NAMES = re.compile(
    "Ascend|AutoConfig|Compiled|DeepSpeed|Graphs|Jupyter|Kubernetes|Llama|Perfetto|Python|PyTorch|Ray|"
    "Slurm"
)
"""Words of headings with a capital letter; one after a colon, a dot or a number has one, too."""

_GENERATED = re.compile(r"<!-- generated.*?<!-- end -->|^```.*?^```|<!--.*?-->", re.S | re.M)
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n(?=[-*|>#]|\d+\. )|\|")
_RETIRED = re.compile(r"^\| ([^|`]+?) \| .+ \|$", re.M)


def retired(glossary: str) -> list[str]:
    """The words of the glossary's last table."""
    return [
        row for row in _RETIRED.findall(glossary.partition("## Retired")[2]) if row != "retired"
    ]


def problems(text: str, banned: list[str]) -> Iterator[tuple[int, str]]:
    """The lines of a page that should read otherwise, and why; code does not count."""
    blank = _GENERATED.sub(lambda part: "\n" * part[0].count("\n"), text)
    for number, line in enumerate(blank.splitlines(), 1):
        plain = re.sub(r"`[^`]*`", "x", line)
        for word in re.finditer(EMPTY, plain):
            yield number, f"'{word[0]}' says nothing, or has a plain word"
        for word in banned:
            if re.search(rf"(?i)\b{re.escape(word)}s?\b", plain):
                yield number, f"'{word}' is retired: see docs/glossary.md"
        heading = re.match(r"#+ (.*)", plain)
        for word in CAPITAL.findall(heading[1]) if heading else ():
            if not NAMES.match(word):
                yield number, f"'{word}' in a heading begins with a capital letter"
    start = 0
    for end in [*(match.end() for match in _SENTENCE.finditer(blank)), len(blank)]:
        sentence, number = blank[start:end], blank.count("\n", 0, start) + 1
        if len(sentence.split()) > LONGEST:
            yield number, f"a sentence of {len(sentence.split())} words: {sentence.strip()[:50]}…"
        if re.match(r"(?s)\s*(\*\*.*?\*\*)?\s*What [^?]*[^?:\s]\s*$", sentence):
            yield number, f"the subject is a clause with what: {sentence.strip()[:50]}…"
        start = end


def prose(page: Path) -> str:
    """The text of a page, or of a notebook without its code; that of the glossary ends early."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        return "\n\n".join("".join(cell["source"]) for cell in cells)
    return text.partition("## Retired")[0] if page == GLOSSARY else text


def docstrings(file: Path) -> str:
    """The docstrings of a module, each on the lines on which it stands; nothing between them.

    Indented lines of the module's own docstring are commands, and those behind `::` are code: they
    are left out.
    """
    source = file.read_text(encoding="utf-8")
    lines = [""] * (source.count("\n") + 2)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node)
        if text is not None:
            is_code = False
            for number, line in enumerate(text.splitlines(), node.body[0].lineno - 1):
                is_indented = not line or line.startswith("    ")
                is_code = is_indented and (is_code or isinstance(node, ast.Module))
                lines[number] = "" if is_code else _ARGUMENT.sub("", line)
                is_code = is_code or line.endswith("::")
    return "\n".join(lines)


_ARGUMENT = re.compile(r"^ {4}[*\w, ]+: ")
"""The name in front of what a docstring says of an argument."""


def main() -> int:
    """Print what should read otherwise; 1 if there is something."""
    banned = retired(GLOSSARY.read_text(encoding="utf-8"))
    modules = sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py"))
    texts = [(page, prose(page), banned) for page in PAGES]
    # Words that pages do not use any more may be names in the code.
    texts += [(file, docstrings(file), []) for file in modules]
    complaints = [
        f"{file.relative_to(ROOT)}:{number}: {why}"
        for file, text, words in texts
        for number, why in problems(text, words)
    ]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
