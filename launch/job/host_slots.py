"""The hosts that a user has named, their room for ranks, and those of them that still answer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

PATIENCE = 15.0
"""Seconds in which a host answers."""
_SLOTS = re.compile(r"\bslots\s*=\s*([0-9]+)|:([0-9]+)(?:\s|$)")
"""The number of ranks in a line of a file of hosts, in the words of Open MPI and of MPICH."""


@dataclass(frozen=True)
class HostSlots:
    """Hosts as `--hosts` or `--hostfile` names them.

    Attributes:
        entries: the words for each host, as the launcher reads them.
        file: where lines of a file go; None: they are words with commas between them.
    """

    entries: Sequence[str]
    file: Path | None = None

    @staticmethod
    def of(hosts: str | None, file: str | None) -> HostSlots:
        """Read the user's options, which `on_hosts` has found right; one of them is given."""
        if hosts is not None:
            return HostSlots(hosts.split(","))
        path = Path(str(file))
        lines = path.read_text(encoding="utf-8").splitlines()
        texts = (line.partition("#")[0].strip() for line in lines)
        return HostSlots([text for text in texts if text], path)

    @property
    def slots(self) -> int:
        """Room for ranks on all of them; a host without a number has room for one."""
        matches = map(_SLOTS.search, self.entries)
        return sum(1 if match is None else int(match[1] or match[2]) for match in matches)

    @property
    def options(self) -> tuple[str | None, str | None]:
        """The user's options for them: names, or a file."""
        return (",".join(self.entries), None) if self.file is None else (None, str(self.file))

    def answering(self, answers: Callable[[str], bool], folder: Path) -> HostSlots:
        """Those that answer.

        Args:
            answers: asks a host, by its name.
            folder: for a file of them.
        """
        names = [re.split(r":[0-9*]+$", entry.split()[0])[0] for entry in self.entries]
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            alive = list(pool.map(answers, names))
        left = [entry for entry, is_alive in zip(self.entries, alive, strict=True) if is_alive]
        if self.file is None:
            return HostSlots(left)
        file = folder / "hosts"
        file.write_text("".join(f"{entry}\n" for entry in left), encoding="utf-8")
        return replace(self, entries=left, file=file)


def ends_well(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """True if a command ends with exit code 0, soon."""
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(PATIENCE) == 0
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
