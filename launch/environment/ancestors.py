"""Find the processes above this one in the process table, and the one that set its variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path


def above(process: int, root: Path = Path("/")) -> Iterator[int]:
    """The parent of a process, its parent, and so on, as far as the process table shows them."""
    while process > 1:
        try:
            # pid (name) state parent ...; the name may hold spaces and parentheses.
            fields = (root / f"proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return
        process = int(fields[1])
        if process > 0:
            yield process


def inheritors(variables: Mapping[str, str], root: Path = Path("/")) -> tuple[list[int], int]:
    """Find the processes that handed these variables on to this one, and the one that set them.

    A launcher does not have the variables that it gives to a process. The processes that this
    process starts inherit them, with the same values.

    Args:
        variables: names and values, as this process has them.
        root: the directory that holds `proc`.

    Returns:
        The processes above this one that were started with the same variables, nearest first; and
        the process above those, 0 where it is not known.
    """
    between: list[int] = []
    for process in above(os.getpid(), root):
        if not _was_started_with(process, variables, root):
            return between, process
        between.append(process)
    return between, 0


def runs_python(process: int, root: Path = Path("/")) -> bool:
    """True if a process is a Python interpreter."""
    try:
        return "python" in (root / f"proc/{process}/exe").readlink().name
    except OSError:
        return False


def _was_started_with(process: int, variables: Mapping[str, str], root: Path) -> bool:
    """True if a process was started with these variables; False also if that cannot be seen."""
    try:
        items = (root / f"proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return {f"{name}={value}".encode() for name, value in variables.items()} <= set(items)
