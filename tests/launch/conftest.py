"""Starts jobs of several processes, bounded in time, and looks for what they leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pytest

import cg
from cg.launch.environment.ancestors import above

from ..mpi import jobs as mpi
from ..mpi import warm as interpreting

PROGRAMS = Path(__file__).parent / "programs"
LIMIT = 60.0
"""Seconds after which a job counts as hung."""
MARK = "TEST_JOB_MARK"
"""A variable that all processes of a job inherit."""
LISTENING = "0A"
"""The state of a socket that takes connections, in /proc/net/tcp."""


@dataclass
class Job:
    """A job that runs, or has run."""

    process: subprocess.Popen[str]
    mark: str
    output: str = ""
    lines: list[str] = field(default_factory=list)

    def wait_for(self, text: str, times: int) -> None:
        """Read output until `text` has come so many times."""
        assert self.process.stdout is not None
        seen = 0
        while seen < times:
            line = self.process.stdout.readline()
            assert line, f"the job ended early:\n{self.output}"
            self.output += line
            seen += line.count(text)

    def finish(self) -> int:
        """Wait for the end; the exit code. Fails if the job hangs or leaves a process."""
        try:
            rest, _ = self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            rest = kill_all(self)
            raise AssertionError(f"the job hangs; it wrote:\n{self.output}{rest}") from None
        self.output += rest
        until = time.monotonic() + LIMIT
        while (alive := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive, f"processes are left: {alive}"
        return self.process.returncode

    def processes(self) -> list[int]:
        """All processes of this job that are alive, the launcher included."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return sorted(found)

    def managers(self) -> list[int]:
        """The processes of the launcher that have started ranks; no shells in between."""
        ranks = re.findall(r"process=\d+:(\d+)", self.output)
        return sorted({next(filter(is_no_shell, above(int(rank)))) for rank in ranks})

    def ports(self) -> list[tuple[str, int]]:
        """The TCP ports at which processes of this job wait, and an address of each."""
        inodes = set()
        for process in self.processes():
            for path in Path(f"/proc/{process}/fd").glob("*"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(path))
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        listening = (fields for line in lines if (fields := line.split())[3] == LISTENING)
        return sorted(
            (socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16))
            for fields in listening
            if f"socket:[{fields[9]}]" in inodes
            for address, port in [fields[1].split(":")]
        )

    def segments(self) -> list[str]:
        """The shared memory files of the job that still exist, of those that it printed."""
        names = {
            word.partition("=")[2]
            for word in self.output.split()
            if word.startswith("segment=/dev/shm/")
        }
        assert names or "segment=" not in self.output
        return sorted(name for name in names if Path(name).exists())


def is_no_shell(process: int) -> bool:
    return Path(f"/proc/{process}/comm").read_text().strip() != "sh"


def kill_all(job: Job) -> str:
    """End every process of the job by force; what it wrote meanwhile."""
    for process in job.processes():
        os.kill(process, signal.SIGKILL)
    rest, _ = job.process.communicate(timeout=LIMIT)
    return rest


Start = Callable[..., Job]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command as a job: `start([...], NAME="value")`."""
    jobs: list[Job] = []

    def begin(command: Sequence[str | Path], **variables: str) -> Job:
        mark = uuid.uuid4().hex
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CG_", "PMI", "OMPI_", "OMP_NUM"))
        }
        environment["PYTHONPATH"] = str(Path(cg.__file__).absolute().parent.parent)
        environment["CG_DEVICE"] = "cpu"  # wherever the tests run
        environment["CG_CACHE"] = ""
        environment[MARK] = mark
        process = subprocess.Popen(
            list(map(str, command)),
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        jobs.append(Job(process, mark))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            kill_all(job)


class Launch(Protocol):
    """Starts a program of `programs/` by our launcher, on so many ranks."""

    def __call__(
        self,
        ranks: int,
        name: str,
        *arguments: str,
        options: Sequence[str] = (),
        warm: bool = False,
        **variables: str,
    ) -> Job:
        """With `warm`, ranks are forks (`mpi/warm.py`): of no use where processes are looked at."""
        ...


@pytest.fixture
def launch(start: Start) -> Launch:
    """Starts a program of `programs/` by our launcher: `launch(ranks, "name", "arg")`."""

    def begin(
        ranks: int,
        name: str,
        *arguments: str,
        options: Sequence[str] = (),
        warm: bool = False,
        **variables: str,
    ) -> Job:
        launcher = [sys.executable, "-m", "cg.launch", "-n", str(ranks), *options]
        program: list[str | Path] = [PROGRAMS / name, *arguments]
        if warm:
            program.insert(0, interpreting.__file__)
            variables |= mpi.of_interpreters()
        return start([*launcher, *program], **variables)

    return begin
