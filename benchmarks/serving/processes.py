"""Servers that benchmarks start: their addresses, their CPU time and their memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cg.launch.job.job import descendants  # noqa: E402 - of the checkout

READY = 600.0
"""Seconds for servers to be ready."""
ASKING = 2.0
"""Seconds for a server to answer, which it cannot while its front's process compiles."""
PATIENCE = 900.0
"""Seconds for a server of any kind to answer, and to be idle."""
LEAVING = 60.0
"""Seconds for a server to end after SIGTERM."""
PR_SET_PDEATHSIG = 1
"""By which a process asks Linux for a signal at its parent's death."""
TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Wanted:
    """A server to start: its command, its switches, and the file of its log."""

    command: Sequence[str]
    features: str
    log: Path


@dataclass(frozen=True)
class Running:
    """A server: where it serves, the process of its front, and when it was ready.

    Attributes:
        ready: seconds after its start.
    """

    url: str
    pid: int
    ready: float

    def cpu(self) -> float:
        """Seconds of the front, in user mode and in the kernel."""
        return _cpu(self.pid)

    def cpu_of_all(self) -> float:
        """The same of the front, the launcher and the ranks together."""
        return sum(map(_cpu, (self.pid, *descendants(self.pid))))

    def resident(self) -> float:
        """MiB of the front."""
        rows = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(row for row in rows if row.startswith("VmRSS")).split()[1]) / 1024

    def files(self) -> int:
        """Descriptors of the front."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@contextlib.contextmanager
def serving(
    command: Sequence[str], features: str, log: Path, seconds: float = READY
) -> Iterator[Running]:
    """A server with these switches, once it is ready; ended afterwards.

    Raises:
        RuntimeError: as `together`.
    """
    with together([Wanted(command, features, log)], seconds) as (server,):
        yield server


@contextlib.contextmanager
def together(wanted: Sequence[Wanted], seconds: float = READY) -> Iterator[list[Running]]:
    """Servers that are started at one time, once all are ready; ended afterwards.

    Raises:
        RuntimeError: one has ended, or is not ready after so many seconds; or one does not end.
    """
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        started = [(each.log, stack.enter_context(_started(each))) for each in wanted]
        found: dict[Path, Running] = {}
        while len(found) < len(started):
            time.sleep(0.05)
            after = time.monotonic() - began
            for log, process in started:
                if log in found:
                    continue
                if process.poll() is not None or after > seconds:
                    end = log.read_text()[-3000:]
                    raise RuntimeError(f"the server is not ready after {after:.0f} s:\n{end}")
                url = _address(log)
                if url is not None and get(f"{url}/ready", ASKING) is not None:
                    found[log] = Running(url, process.pid, time.monotonic() - began)
        yield [found[log] for log, _ in started]


@contextlib.contextmanager
def _started(wanted: Wanted) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a group of processes of its own, which Ctrl-C does not reach.

    It is told to end as well if this process dies.
    """
    line = [*wanted.command, *([f"--features={wanted.features}"] if wanted.features else [])]
    paths = [str(ROOT), str(ROOT / "examples"), *os.environ.get("PYTHONPATH", "").split(":")]
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths))}
    prctl = ctypes.CDLL(None).prctl
    with wanted.log.open("w") as file:
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(LEAVING)
        except subprocess.TimeoutExpired:
            for each in (*descendants(process.pid), process.pid):  # which it has started
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            process.wait()
            message = f"the server has not ended within {LEAVING:g} s of SIGTERM, and was killed"
            raise RuntimeError(message) from None


@contextlib.contextmanager
def served(words: str, log: Path | None = None) -> Iterator[Running]:
    """A server of any kind, once it answers at `/health`; ended afterwards.

    Args:
        words: its command, which says `--port`.
        log: a file for what it writes.

    Raises:
        RuntimeError: it has ended before, or does not answer for `PATIENCE`.
    """
    command = shlex.split(words)
    if command[0] == "python":
        command[0] = sys.executable
    url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
    with log.open("w+") if log else tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        began = time.monotonic()
        try:
            while get(f"{url}/health") is None:
                if process.poll() is not None or time.monotonic() > began + PATIENCE:
                    file.seek(0)
                    raise RuntimeError(f"{words} does not answer:\n{file.read()[-3000:]}")
                time.sleep(0.2)
            yield Running(url, process.pid, time.monotonic() - began)
        finally:
            process.terminate()
            process.wait(LEAVING)


def _address(log: Path) -> str | None:
    """Where a server listens, by its log."""
    found = log.read_text().partition(" at http://")[2]
    return f"http://{found.split('/')[0]}" if "/" in found else None


def get(url: str, seconds: float = 10.0) -> str | None:
    """What is there, or None if nothing comes for so many seconds."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return str(answer.read().decode())
    except OSError:
        return None


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK
