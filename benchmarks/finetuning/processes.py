"""Runs a command in a process group of its own, and ends all of it when its time is over."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

GRACE = 5.0
"""Seconds between asking a command to end, and ending it."""

_ERROR = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Deadlock|Timeout|Exit)\b(?::.*|$))")
_OF_LAUNCHERS = ("ChildFailedError", "SignalException")


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
    """The last line of an output that names an error, but for those of launchers."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        named = _ERROR.search(line)
        if named and not any(name in line for name in _OF_LAUNCHERS):
            return named[1][:400]
    return f"exit code {code}: {lines[-1][:400] if lines else 'no output'}"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command, and the processes that it has started, by their ids."""
    members = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE)
    for pid, started in members.items():
        if _parent_and_start(pid)[1] == started:  # no other process has got this id since
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def descendants(ancestor: int) -> dict[int, str]:
    """The processes under one, also those in other groups: when each has started, by its id."""
    running = {
        int(folder.name): _parent_and_start(int(folder.name))
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit()
    }
    below: dict[int, str] = {}
    parents = {ancestor}
    while parents:
        parents = {pid for pid, (parent, _) in running.items() if parent in parents}
        below |= {pid: running[pid][1] for pid in parents}
    return below


def _parent_and_start(pid: int) -> tuple[int, str]:
    """The parent's id, and when it started in the kernel's ticks; of no process -1 and nothing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1, ""
    return int(fields[1]), fields[19]
