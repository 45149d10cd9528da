"""Fixtures of the tests of passes: modules from text, running passes on them, big modules."""

from __future__ import annotations

import runpy
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from cg.ir.ops.module import Module
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_program
from cg.ir.verify.verifier import verify
from cg.passes.manager.manager import PassManager
from cg.passes.manager.registry import parse_pipeline

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def read() -> Callable[[str], Module]:
    """Parse and verify the text of a module."""

    def parse(text: str) -> Module:
        module = parse_module(textwrap.dedent(text).lstrip())
        verify(module)
        return module

    return parse


@pytest.fixture
def run_passes(read: Callable[[str], Module]) -> Callable[[str, str], list[str]]:
    """Run passes on the text of a module, checks on; the lines of its first program, stripped."""

    def run(pipeline: str, text: str) -> list[str]:
        module = read(text)
        PassManager(parse_pipeline(pipeline), check=True).run(module)
        lines = format_program(module.programs[0]).splitlines()
        return [line.strip() for line in lines[1:-1]]

    return run


@pytest.fixture(scope="session")
def pipeline_module() -> Callable[[int, int], Module]:
    """`benchmarks/synthetic.py`'s maker of large traced modules: (ranks, microbatches)."""
    made: Callable[[int, int], Module]
    made = runpy.run_path(str(ROOT / "benchmarks" / "synthetic.py"))["pipeline_module"]
    return made
