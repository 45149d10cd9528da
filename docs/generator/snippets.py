"""Run the snippets of a page, and put their output where the page shows it.

A comment before a block says what is to be done with it:

    <!-- run -->             run it: Python in the virtual world, sh in bash
    <!-- run raises -->      the same; it has to fail, and the error is its output
    <!-- run needs=g++ -->   the same, but as it is, with its output, where there is no such program
    <!-- output -->          hold the output of the last snippet that was run
    <!-- ir -->              parse and verify the module

A page is one program: its Python snippets share their names, its commands a directory. The first
`<!-- run -->` may set the size of the world, as `ranks=3`, and each the name of its file, as
`file=train.py`. No snippet sees the environment's CG_ variables.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.text.parser import parse_module
from cg.ir.verify.verifier import verify
from cg.launch.world.world import use_world, world
from cg.tracer.record.actors.factory import ActorFactory

_BLOCK = re.compile(
    r"^<!-- (?P<what>run|output|ir)(?P<options>[^\n]*?) -->\n+"
    r"```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_SHELL = """
python() { "$PYTHON" "$@"; }
cg-opt() { python -m cg.launch.tools.opt "$@"; }
cg-sim() { python -m cg.launch.tools.sim "$@"; }
"""
_ROOT = Path(__file__).resolve().parents[2]
_ENTRIES = (_ROOT, *(Path(entry).resolve() for entry in sys.path if entry))
_PATHS = os.pathsep.join(map(str, _ENTRIES))
"""Where programs that snippets start find cg, and the examples of the checkout."""
_SECONDS = 120


class SnippetError(AssertionError):
    """A snippet of the documentation does not do what the page says."""


@dataclass
class _Page:
    """One page while its snippets run."""

    name: str
    directory: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    output: str | None = None
    ran: int = 0
    is_left_out: bool = False

    def replace(self, match: re.Match[str]) -> str:
        what, body = match["what"], match["body"]
        if what == "output":
            if self.is_left_out:
                return match[0]
            if self.output is None:
                raise SnippetError(f"{self.name}: an output, but no snippet has run before it")
            head = match[0].partition("```")[0]
            return f"{head}```{match['language']}\n{textwrap.dedent(self.output).strip()}\n```"
        if what == "ir":
            verify(parse_module(body, self.name))
        else:
            self._run(match["language"], body, match["options"].split())
        return match[0]

    def _run(self, language: str, body: str, options: list[str]) -> None:
        self.ran += 1
        given = dict(option.partition("=")[::2] for option in options)
        self.is_left_out = "needs" in given and shutil.which(given["needs"]) is None
        if self.is_left_out:
            return
        file = self.directory / given.get("file", f"snippet{self.ran}.py")
        if language == "python":
            file.write_text(body, encoding="utf-8")
            output, error = _run_python(file, self.names)
        else:
            output, error = _run_shell(body, self.directory)
        if ("raises" in given) is (error is None):
            outcome = "did not fail" if error is None else f"failed:\n{output}{error}"
            raise SnippetError(f"{self.name}: snippet {self.ran} {outcome}")
        self.output = (output + (error or "")).replace(f"{self.directory}{os.sep}", "")


def run_page(text: str, name: Path) -> str:
    """Run what a page marks; the page with its outputs brought up to date.

    Raises:
        SnippetError: a snippet fails, or should have.
        IRError: a module that is shown is wrong.
    """
    blocks = list(_BLOCK.finditer(text))
    if not blocks:
        return text
    ranks = [int(n) for block in blocks for n in re.findall(r"ranks=(\d+)", block["options"])]
    with _sandbox(*ranks[:1]) as directory:
        return _BLOCK.sub(_Page(str(name), directory).replace, text)


def dumped(page: Path, name: str, ranks: int) -> str:
    """A file of the dump of the first snippet of a page that is to be run, on that many ranks."""
    block = next(match for match in _BLOCK.finditer(page.read_text(encoding="utf-8")))
    with _sandbox(ranks) as directory, mock.patch.dict(os.environ, {"CG_DUMP": str(directory)}):
        file = directory / "step.py"
        file.write_text(block["body"], encoding="utf-8")
        _, error = _run_python(file, {"__name__": "__main__"})
        if error is not None:
            raise SnippetError(f"{page.name}: {error}")
        text = (directory / name).read_text(encoding="utf-8")
        return text.replace(f"{directory}{os.sep}", "")


def run_parts(name: str, parts: list[str], ranks: int) -> list[str]:
    """Run the parts of a program one after the other; what each prints.

    Raises:
        SnippetError: a part fails.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    with _sandbox(ranks) as directory:
        for number, part in enumerate(parts):
            file = directory / f"part{number}.py"
            file.write_text(part, encoding="utf-8")
            output, error = _run_python(file, names)
            if error is not None:
                raise SnippetError(f"{name}: {part}\n{error}")
            outputs.append(output.replace(f"{directory}{os.sep}", ""))
    return outputs


@contextlib.contextmanager
def _sandbox(ranks: int = 2) -> Iterator[Path]:
    """A directory, a world and a numbering of actors of the page's own."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("CG_")}
    ours["PYTHONPATH"] = _PATHS
    before = Path.cwd()
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.dict(os.environ, ours, clear=True),
        mock.patch.object(cg, "actor", ActorFactory(world)),
        use_world(VirtualWorld(ranks)),
        torch.random.fork_rng(),
    ):
        torch.manual_seed(0)
        os.chdir(directory)
        try:
            yield Path(directory).resolve()
        finally:
            os.chdir(before)


def _run_python(file: Path, names: dict[str, Any]) -> tuple[str, str | None]:
    code = compile(file.read_text(encoding="utf-8"), str(file), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            exec(code, names)
        except Exception as error:
            cls = type(error)
            module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
            return output.getvalue(), f"{module}{cls.__qualname__}: {error}"
    return output.getvalue(), None


def _run_shell(body: str, directory: Path) -> tuple[str, str | None]:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", _SHELL + body],
        cwd=directory,
        env=os.environ
        | {
            "PYTHON": sys.executable,
            "PYTHONWARNINGS": "ignore",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    return done.stdout, "" if done.returncode else None
