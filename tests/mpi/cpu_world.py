"""A world over mpi4py for the scenarios of `cpu_scenarios.py`, and how to start them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cg

T = TypeVar("T")
SCENARIOS = Path(__file__).with_name("cpu_scenarios.py")


class TestWorld:
    """The ranks of a job; `nodes` pretends that they run on the machines of that number."""

    __test__ = False
    is_virtual = False
    device = None

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

    def at_end(self, is_done: Callable[[], bool]) -> None:
        """Nothing: MPI ends here without a meeting of all."""

    def answer_by(self, teller: Callable[[], object]) -> None:
        """Nobody asks."""

    def look(self, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """Nobody answers."""
        return {}

    def observe(self, observer: object) -> None:
        """Calls are MPI's own, and nobody hears of them."""


class FileWorld(TestWorld):
    """Ranks that meet through files in a folder; there is no MPI, and nobody to end the job."""

    def __init__(self, folder: Path, rank: int, nodes: Sequence[int]) -> None:
        self.comm = None
        self.rank = rank
        self.size = len(nodes)
        self.nodes = tuple(nodes)
        self._folder = folder
        self._calls = 0

    def broadcast(self, value: T | None, root: int) -> T:
        found = self.allgather(value)[root]
        assert found is not None
        return found

    def allgather(self, value: T) -> list[T]:
        self._calls += 1
        mine = self._file(self.rank).with_suffix(".part")
        mine.write_bytes(pickle.dumps(value))
        mine.rename(self._file(self.rank))
        while not all(self._file(rank).exists() for rank in range(self.size)):
            time.sleep(0.001)
        return [pickle.loads(self._file(rank).read_bytes()) for rank in range(self.size)]

    def barrier(self) -> None:
        self.allgather(None)

    def _file(self, rank: int) -> Path:
        return self._folder / f"call-{self._calls}-{rank}.pickle"


def run_job(
    scenarios: Sequence[str], nodes: Sequence[int], *, launched: bool = True, seconds: int = 120
) -> dict[str, dict[int, Any]]:
    """Run scenarios, one after the other, on one rank for each entry of `nodes`.

    Args:
        scenarios: names of functions of `cpu_scenarios.py`.
        nodes: for each rank the machine that it pretends to be on.
        launched: whether by mpiexec. Without it there is no MPI, the ranks meet through files,
            and nobody ends the other ranks when one dies.
        seconds: after which the job is killed and the test fails.

    Returns:
        What each rank reported, by scenario.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = ",".join(scenarios)
        script = [sys.executable, str(SCENARIOS), names, json.dumps(list(nodes)), folder]
        if launched:
            commands = [[_launcher(), "-n", str(len(nodes)), *script]]
        else:
            commands = [[*script, str(rank)] for rank in range(len(nodes))]
        before = shared_files()
        _run(commands, seconds)
        assert shared_files() <= before
        reports: dict[str, dict[int, Any]] = {name: {} for name in scenarios}
        for file in Path(folder).glob("report-*"):
            _, scenario, rank = file.name.split("-")
            reports[scenario][int(rank)] = json.loads(file.read_text())
        return reports


def _launcher() -> str:
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert found is not None, "the tests need an MPI: pip install mpich"
    return found


def _run(commands: Sequence[Sequence[str]], seconds: float) -> None:
    """Run processes to their ends; all must exit by 0, or by the signal that they sent."""
    root = Path(cg.__file__).resolve().parent
    package = root.parent if root.name == "cg" else root / ".dev"
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    deadline = time.monotonic() + seconds
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        for command in commands
    ]
    problems = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            problems.append(f"killed after {seconds} s:\n{output}")
        else:
            if process.returncode not in (0, -signal.SIGKILL):
                problems.append(f"exit code {process.returncode}:\n{output}")
    assert not problems, "\n".join(problems)


def shared_files() -> set[str]:
    """This package's names in the shared memory file system."""
    return {path.name for path in Path("/dev/shm").glob("cg-*")}


def report(rank: int, scenario: str, value: Any) -> None:
    """Give a JSON value to the test, through a file: a launcher may lose what is printed."""
    Path(sys.argv[3], f"report-{scenario}-{rank}").write_text(json.dumps(value))
