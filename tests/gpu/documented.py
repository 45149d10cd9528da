"""The commands that the documentation shows, read from pages and from docstrings of examples.

A page shows them in blocks of `sh`, and a docstring in lines of code or between backticks. So a new
command is tested as soon as it is written down.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
EXAMPLES = tuple(sorted((ROOT / "examples").rglob("*.py")))

_SHELL = re.compile(r"^```(?:sh|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_STARTS = r"(?:[A-Z_]+=\S+ +)*(?:python|mpirun|mpiexec)\b"
_CODE_LINE = re.compile(rf"^    ({_STARTS}.*)$", re.MULTILINE)
_BACKTICKS = re.compile(rf"`({_STARTS}[^`]*)`")
_WHOLE = re.compile(
    r"[^\n]*<<'END'\n.*?^END\n|curl (?:[^'\n\\]|'[^']*'|\\\n)*\n|(?:[^\n]*\\\n)*[^\n]*\n",
    re.DOTALL | re.MULTILINE,
)
"""A line with what it goes on by: a backslash, a document up to END, or quotes of curl."""
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z_0-9]*=.*", re.DOTALL)


@dataclass(frozen=True)
class Shown:
    """A line of shell, and where it stands.

    Attributes:
        text: without its comment.
        file: the page or the example, relative to the checkout.
        line: the number of its line in a page; 0 for docstrings.
    """

    text: str
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Command:
    """A command that starts a Python program.

    Attributes:
        variables: of the environment, in front of it.
        launcher: `mpirun`, `cg.launch`, `own` of a program whose `-n` starts ranks, or nothing.
        ranks: their number behind `-n`; 1 if it names none.
        program: a script, or `-m` and a module.
        arguments: of the program; without the `-n` of an `own` launcher.
    """

    variables: tuple[tuple[str, str], ...]
    launcher: str
    ranks: int
    program: tuple[str, ...]
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.variables]
        number = ["-n", str(self.ranks)]
        if self.launcher == "mpirun":
            words += ["mpirun", *number, "python", *self.program]
        elif self.launcher == "cg.launch":
            words += ["python", "-m", "cg.launch", *number, *self.program]
        else:
            words += ["python", *self.program, *(number if self.launcher == "own" else ())]
        return shlex.join([*words, *self.arguments])

    @property
    def name(self) -> str:
        """The program, in a word: `train_gpt`, `serve`."""
        return Path(self.program[-1].replace("examples.", "")).stem

    def option(self, name: str) -> str | None:
        """The word behind an option; None if it is not there."""
        if name not in self.arguments:
            return None
        return self.arguments[self.arguments.index(name) + 1]

    def without(self, name: str) -> Command:
        """The command without an option of one word."""
        if name not in self.arguments:
            return self
        at = self.arguments.index(name)
        return replace(self, arguments=self.arguments[:at] + self.arguments[at + 2 :])


def lines_of_pages() -> Iterator[Shown]:
    """Each command of each block of shell; one may go over several lines."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in _SHELL.finditer(text):
            number = text[: block.start(1)].count("\n") + 1
            for whole in _WHOLE.findall(block[1]):
                if bare := _without_comment(whole.replace("\\\n", " ").partition("\n")[0]):
                    yield Shown(bare, str(page.relative_to(ROOT)), number)
                number += whole.count("\n")


def lines_of_examples() -> Iterator[Shown]:
    """The commands in the docstring of each example."""
    for example in EXAMPLES:
        text = ast.get_docstring(ast.parse(example.read_text("utf-8")), clean=False) or ""
        for code in (*_CODE_LINE.findall(text), *_BACKTICKS.findall(text)):
            yield Shown(_without_comment(code), str(example.relative_to(ROOT)), 0)


@cache
def shown() -> tuple[Shown, ...]:
    """All of them, in the order of pages."""
    return (*lines_of_pages(), *lines_of_examples())


def parse(text: str) -> Command | None:
    """The command of a line of shell; None if it does not start a Python program alone."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation that goes over several lines
        return None
    variables = []
    while words and _ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables.append((name, value))
    launcher, ranks = "", 1
    if words[:2] in (["mpirun", "-n"], ["mpiexec", "-n"]) and words[2:3] and words[2].isdigit():
        launcher, ranks, words = "mpirun", int(words[2]), words[3:]
    if words[:1] != ["python"] or {"|", ">", "&", ";", "2>&1"} & set(words):
        return None
    words = words[1:]
    if words[:3] == ["-m", "cg.launch", "-n"] and words[3:4] and words[3].isdigit():
        launcher, ranks, words = "cg.launch", int(words[3]), words[4:]
    length = 2 if words[:1] == ["-m"] else 1
    program, arguments = words[:length], words[length:]
    if not program or (program[0].startswith("-") and length == 1):
        return None
    if program[-1] == "examples.serve":
        launcher = "own"
        if "-n" in arguments:
            at = arguments.index("-n")
            ranks = int(arguments[at + 1])
            del arguments[at : at + 2]
    return Command(tuple(variables), launcher, ranks, tuple(program), tuple(arguments))


def _without_comment(line: str) -> str:
    """A line of shell without the comment at its end."""
    return re.sub(r"(^|\s)#.*$", "", line).strip()
