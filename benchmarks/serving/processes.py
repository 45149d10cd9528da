"""Servers that benchmarks start: their addresses, their CPU time and their memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cg.launch.job.job import descendants  # noqa: E402 - of the checkout

READY = 600.0
"""Seconds for a server to be ready."""
TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Running:
    """A server: where it serves, and the process of its front."""

    url: str
    pid: int

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
def serving(command: Sequence[str], features: str, log: Path) -> Iterator[Running]:
    """A server with these switches, once it is ready; ended afterwards."""
    line = [*command, *([f"--features={features}"] if features else [])]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    with log.open("w") as file:
        process = subprocess.Popen(line, cwd=ROOT, stdout=file, stderr=file, env=environment)
    try:
        end = time.monotonic() + READY
        url = ""
        while not (url and get(f"{url}/ready") is not None):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server is not ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
            found = log.read_text().partition(" at http://")[2]
            url = f"http://{found.split('/')[0]}" if "/" in found else ""
        yield Running(url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def get(url: str) -> str | None:
    """What is there, or None."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return None


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK
