"""Tutorials whose text names an `mpirun` run as files, on ranks in processes of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ..mpi import jobs

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
needs_mpi = pytest.mark.skipif(jobs.launcher() is None, reason="no mpiexec on this machine")
pytestmark = [pytest.mark.slow, pytest.mark.mpi, needs_mpi]


def cells(notebook: Path) -> list[Any]:
    return list(json.loads(notebook.read_text(encoding="utf-8"))["cells"])


def ranks_of(notebook: Path) -> int:
    """The number behind `mpirun -n` in the text; 0 if there is none."""
    text = "".join("".join(c["source"]) for c in cells(notebook) if c["cell_type"] == "markdown")
    return max(map(int, re.findall(r"mpirun -n (\d+)", text)), default=0)


NAMED = [notebook for notebook in sorted(TUTORIALS.glob("*.ipynb")) if ranks_of(notebook)]


def test_some_tutorials_name_a_job() -> None:
    assert len(NAMED) >= 2


@pytest.mark.parametrize("notebook", NAMED, ids=lambda notebook: notebook.stem)
def test_a_tutorial_runs_as_a_file_on_ranks(notebook: Path, tmp_path: Path) -> None:
    code = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    file = tmp_path / f"{notebook.stem}.py"
    file.write_text("\n".join("".join(cell["source"]) for cell in code), encoding="utf-8")
    ended = jobs.run(ranks_of(notebook), [str(file)], seconds=240, folder=tmp_path)
    assert ended.code == 0, ended.output
    printed = [
        line
        for cell in code
        for out in cell["outputs"]
        for line in "".join(out["text"]).splitlines()
    ]
    assert [line for line in printed if line.strip() and line not in ended.output] == []
