"""Starts programs under mpiexec, with a deadline, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import cg

from . import warm as interpreting

ROOT = Path(__file__).resolve().parents[2]


def launcher() -> str | None:
    """The mpiexec beside this Python, or else on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


needs_mpi = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        launcher() is None, reason="no mpiexec beside this Python or on PATH: pip install mpich"
    ),
]
"""For `pytestmark` of modules that start jobs."""


@dataclass(frozen=True)
class Ended:
    """How a job has ended.

    Attributes:
        code: its exit code.
        output: what all ranks wrote, to standard output and error.
        seconds: how long it took.
    """

    code: int
    output: str
    seconds: float


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """For programs that import `cg` as this process does, one thread each."""
    package = Path(cg.__file__).resolve().parent
    found = package.parent if package.name == "cg" else package / ".dev"
    path = [str(found), *filter(None, [os.environ.get("PYTHONPATH")])]
    left_out = ("CG_", interpreting.INTERPRETERS)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "",  # a line is written in one piece, between those of other ranks
        "OMP_NUM_THREADS": "1",
        "CG_DEVICE": "cpu",  # wherever the tests run; those of GPUs say otherwise
        "CG_CACHE": "",
        # What Open MPI wants to be told before it does what MPICH does.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **(extra or {}),
    }


def start(
    ranks: int,
    program: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    warm: bool = False,
) -> subprocess.Popen[str]:
    """Start a Python program (its arguments after `python`) on so many ranks; 0: without MPI.

    Args:
        warm: whether each rank is a fork of an interpreter that has imported torch and cg
            (`warm.py`). That saves seconds of each rank. A test that says something of how ranks
            start, of signals or of GPUs starts them as users do.
    """
    found = launcher()
    assert found is not None or ranks == 0
    command = [] if ranks == 0 else [str(found), "-n", str(ranks)]
    python = [sys.executable]
    if warm:
        python += ["-I", "-S", interpreting.__file__]
        alone = {interpreting.ALONE: "1"} if ranks == 0 else {}
        variables = {**(variables or {}), **of_interpreters(), **alone}
    return subprocess.Popen(
        [*command, *python, *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(variables),
        cwd=folder,
        start_new_session=True,
    )


def of_interpreters() -> dict[str, str]:
    """The variables by which `warm.py` finds those of which to fork ranks.

    They are those that the process which hands out tests has started for all others, if it has.
    """
    addresses = os.environ.get(interpreting.INTERPRETERS)
    return {interpreting.INTERPRETERS: addresses or start_interpreters()}


@cache
def start_interpreters() -> str:
    """Start two, which end when their standard input does, with this process; their addresses."""
    return os.pathsep.join([_start_interpreter(), _start_interpreter()])


_INTERPRETERS: list[subprocess.Popen[bytes]] = []


def end_interpreters() -> None:
    """End those that this process has started."""
    for process in _INTERPRETERS:
        process.communicate()  # which closes its standard input


def _start_interpreter() -> str:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # to an address of the system's choice, without a file
        listener.listen(64)
        number = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, interpreting.__file__, "serve", str(number)],
            stdin=subprocess.PIPE,
            env=environment({"PYTHONHASHSEED": "random"}),
            pass_fds=[number],
            start_new_session=True,
        )
        _INTERPRETERS.append(process)
        return listener.getsockname()[1:].decode()


def finish(process: subprocess.Popen[str], seconds: float) -> Ended:
    """Wait for a job to end by itself.

    Raises:
        AssertionError: it has not ended in so many seconds, and has been killed.
    """
    began = time.monotonic()
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        output = _kill(process)
        raise AssertionError(f"the job has not ended in {seconds} s; it wrote:\n{output}") from None
    return Ended(process.returncode, output, time.monotonic() - began)


def _kill(process: subprocess.Popen[str]) -> str:
    """End a job: by the launcher if it does so, which knows its ranks, else the hard way."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def run(
    ranks: int,
    program: Sequence[str],
    *,
    seconds: float,
    variables: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    warm: bool = False,
) -> Ended:
    """Run a job to its end; see `start` and `finish`."""
    process = start(ranks, program, variables=variables, folder=folder, warm=warm)
    return finish(process, seconds)


def counts_of_agreement(output: str) -> list[int]:
    """The counts that the ranks of `oracle_job` print: steps that they have compared, each."""
    return [int(n) for n in re.findall(r"rank \d: (\d+) of \d+ agree", output)]
