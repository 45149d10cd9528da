"""The processes of the engine's job: watched without polling, and ended.

Each is held by a pidfd (Linux 5.3). It can be read once the process has ended. A signal that is
sent by it reaches that process or none, while the number of a process may be used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("serve")

STEPS = ((signal.SIGTERM, 2.0), (signal.SIGINT, 2.0))
"""Signals for a job that does not end, and seconds to obey. `cg.launch` takes a second signal for
"at once". They are of two kinds, since the system may merge two of one kind."""
REAPING = 5.0
"""Seconds for the system to end killed processes; those that it cannot end by then are left."""


class Processes:
    """Processes that belong together: the end of one is the end of all.

    Args:
        on_death: called at the end of each.
    """

    def __init__(self, on_death: Callable[[], None]) -> None:
        self._on_death = on_death
        self._files: dict[int, int] = {}  # a pidfd for each process, in the order of `add`
        self._death = asyncio.Event()

    def add(self, process: int) -> None:
        """Watch a process; one that has gone counts as dead."""
        if process in self._files:
            return
        try:
            file = os.pidfd_open(process)
        except ProcessLookupError:
            self._on_death()
            return
        self._files[process] = file
        asyncio.get_running_loop().add_reader(file, self._die, process)

    def _die(self, process: int) -> None:
        file = self._files.pop(process)
        asyncio.get_running_loop().remove_reader(file)
        os.close(file)
        self._death.set()
        self._on_death()

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to the first process that is left, which has started the others."""
        for file in list(self._files.values())[:1]:
            _send(file, number)

    async def end(self, grace: float) -> None:
        """Wait so many seconds for all to end by themselves; then end them by signals."""
        if await self._have_ended(grace):
            return
        for number, seconds in STEPS:
            self.tell(number)
            if await self._have_ended(seconds):
                return
        for process, file in self._files.items():
            log.warning("process %d of the engine does not end, and is killed", process)
            _send(file, signal.SIGKILL)
        await self._have_ended(REAPING)

    async def _have_ended(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._files:
                    self._death.clear()
                    await self._death.wait()
        return not self._files


def _send(file: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(file, number)


def of_job(first: int, rank: int) -> list[int]:
    """The processes of a job that are on this machine, each behind the one that started it.

    Args:
        first: the process that started the job.
        rank: the process of one of its ranks, whose siblings are the others.
    """
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent ...; the name may hold spaces and parentheses.
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    above: list[int] = []
    process = rank
    while process != first and process in parents:
        process = parents[process]
        above.insert(0, process)
    if process != first or not above:  # a daemon has started the rank, or it is the first itself
        return [first, rank]
    return [*above, *(sibling for sibling, parent in parents.items() if parent == above[-1])]
