"""A world over mpi4py for the scenarios of `cpu_scenarios.py`, and how to start them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import cg

T = TypeVar("T")
SCENARIOS = Path(__file__).with_name("cpu_scenarios.py")


class TestWorld:
    """The ranks of a job; `nodes` pretends that they run on the machines of that number."""

    __test__ = False
    is_virtual = False

    def __init__(self, comm: Any, nodes: Sequence[int]) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.nodes = tuple(nodes)

    def plays(self, rank: int) -> bool:
        return rank == self.rank

    def broadcast(self, value: T | None, root: int) -> T:
        result: T = self.comm.bcast(value, root)
        return result

    def allgather(self, value: T) -> list[T]:
        result: list[T] = self.comm.allgather(value)
        return result

    def barrier(self) -> None:
        self.comm.Barrier()


def run_job(
    scenario: str, nodes: Sequence[int], *, code: int = 0, survive: bool = False, seconds: int = 60
) -> dict[int, Any]:
    """Run a scenario on one rank for each entry of `nodes`.

    Args:
        scenario: name of a function of `cpu_scenarios.py`.
        nodes: for each rank the machine that it pretends to be on.
        code: the exit code that the job must have.
        survive: whether the launcher leaves other ranks alone when one dies.
        seconds: after which the job is killed and the test fails.

    Returns:
        What each rank reported.
    """
    mpiexec = Path(sys.executable).with_name("mpiexec")
    launcher = str(mpiexec) if mpiexec.exists() else shutil.which("mpiexec")
    assert launcher is not None, "the tests need an MPI: pip install mpich"
    command = [launcher, "-n", str(len(nodes))]
    if survive:
        command.append("-disable-auto-cleanup")
    folder = tempfile.TemporaryDirectory()
    command += [sys.executable, str(SCENARIOS), scenario, json.dumps(list(nodes)), folder.name]
    root = Path(cg.__file__).resolve().parent
    package = root.parent if root.name == "cg" else root / ".dev"
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    before = shared_files()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"{scenario} did not end in {seconds} s\n{out}\n{err}") from None
    assert process.returncode == code, f"{scenario}: {process.returncode}\n{out}\n{err}"
    assert shared_files() <= before
    with folder:
        files = list(Path(folder.name).iterdir())
        return {int(file.name): json.loads(file.read_text()) for file in files}


def shared_files() -> set[str]:
    """This package's names in the shared memory file system."""
    return {path.name for path in Path("/dev/shm").glob("cg-*")}


def report(rank: int, value: Any) -> None:
    """Give a JSON value to the test, through a file: a launcher may lose what is printed."""
    Path(sys.argv[3], str(rank)).write_text(json.dumps(value))
