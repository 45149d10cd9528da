"""The README's program prints the same losses in one process and under MPI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .jobs import ROOT, needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(200)]


def program() -> str:
    """The README's first Python program."""
    found = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert found
    return found[1]


def losses(output: str) -> set[str]:
    """What the ranks have printed as their loss."""
    return set(re.findall(r"^\d (\d+\.\d+)$", output, re.MULTILINE))


def test_its_losses_are_the_same_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "step.py"
    file.write_text(program())
    virtual = run(0, [str(file)], seconds=80, variables={"CG_RANKS": "3"})
    under_mpi = run(3, [str(file)], seconds=80)
    assert virtual.code == under_mpi.code == 0, virtual.output + under_mpi.output
    assert len(losses(virtual.output)) == 1
    assert losses(under_mpi.output) == losses(virtual.output)
