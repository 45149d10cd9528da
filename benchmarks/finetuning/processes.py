"""Runs a command in a process group of its own, and ends all of it when its time is over."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

GRACE = 5.0
"""Seconds between asking a command to end, and ending it."""

_ERROR = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Deadlock|Timeout|Exit)\b(?::.*|$))")
_FOLLOWING = ("ChildFailedError", "SignalException", "Connection closed by", "Connection reset")
"""Parts of the errors that launchers and other ranks have because a rank had one."""


def run(command: Sequence[str], variables: Mapping[str, str], log: Path, seconds: float) -> str:
    """Run it, all its output into a file, for so many seconds at most.

    Returns:
        Nothing if it has ended well; otherwise why not: the last line that names an error.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            end(process)
            return f"timeout: ended after {seconds:.0f} s"
        except BaseException:
            end(process)
            raise
    return "" if code == 0 else last_error(log.read_text(errors="replace"), code)


def last_error(text: str, code: int) -> str:
    """The last line of an output that names an error which does not follow from another rank's."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        named = _ERROR.search(line)
        if named and not any(name in line for name in _FOLLOWING):
            return named[1][:400]
    return f"exit code {code}: {lines[-1][:400] if lines else 'no output'}"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command, and the processes that it has started, by their ids."""
    members = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    running = [pid for pid, began in members.items() if is_running(pid, began)]
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    limit = time.monotonic() + GRACE
    while time.monotonic() < limit and any(is_running(pid, members[pid]) for pid in running):
        time.sleep(0.05)  # the next job needs the memory of their GPUs


def is_running(pid: int, began: str) -> bool:
    """Whether a process has not ended; another may have got its id since."""
    status = _status(pid)
    return status is not None and status.began == began and status.state != "Z"


def descendants(ancestor: int) -> dict[int, str]:
    """The processes under one, also those in other groups: when each began, by its id."""
    statuses = {
        int(folder.name): status
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and (status := _status(int(folder.name))) is not None
    }
    below: dict[int, str] = {}
    parents = {ancestor}
    while parents:
        parents = {pid for pid, status in statuses.items() if status.parent in parents}
        below |= {pid: statuses[pid].began for pid in parents}
    return below


class _Status(NamedTuple):
    """Of a process; `began` is in ticks of the kernel."""

    state: str
    parent: int
    began: str


def _status(pid: int) -> _Status | None:
    """None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return _Status(fields[0], int(fields[1]), fields[19])
