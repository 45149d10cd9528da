"""Processes that each do a share of something, and begin at one time.

Each gets its share as a line of JSON on standard input, says that it is ready, gets the time to
begin as a second line, and writes what it has found as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

READY = "ready"
LEAD = 0.05
"""Seconds from the order to begin to the beginning."""


class ClientError(RuntimeError):
    """A process has not done its share."""


def deal(command: Sequence[str], shares: Sequence[Any], deadline: float) -> list[Any]:
    """Start a process for each share, let all begin at one time, and give what they have found.

    Args:
        command: of each.
        shares: as JSON has them.
        deadline: seconds for everything. No process is left afterwards, whatever has happened.

    Raises:
        ClientError: one has ended without a result, or not by the deadline.
    """
    return asyncio.run(_deal(command, shares, deadline))


def take(work: Callable[[Any, float], Any]) -> None:
    """Be such a process.

    Args:
        work: takes the share and the time to begin, by the monotonic clock of the machine.
    """
    share = json.loads(sys.stdin.readline())
    print(READY, flush=True)
    line = sys.stdin.readline()
    if not line:
        sys.exit("the process that was to say when to begin has gone")
    print(json.dumps(work(share, float(line))))


async def _deal(command: Sequence[str], shares: Sequence[Any], deadline: float) -> list[Any]:
    clients: list[_Client] = []
    aim = "ready"
    try:
        async with asyncio.timeout(deadline):
            for number in range(len(shares)):
                clients.append(await _Client.start(number, command))
            pairs = zip(clients, shares, strict=True)
            await asyncio.gather(*(each.prepare(share) for each, share in pairs))
            aim = "through"
            start = monotonic() + LEAD
            return list(await asyncio.gather(*(each.fetch(start) for each in clients)))
    except TimeoutError:
        late = ", ".join(str(each.number) for each in clients if each.is_late)
        raise ClientError(f"not {aim} after {deadline:g} s: client {late}") from None
    finally:
        for each in clients:
            await each.end()


class _Client:
    """One of the processes, as the one that started it sees it."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number, self._process = number, process
        self.is_late = True  # until it has done what it was last told

    @staticmethod
    async def start(number: int, command: Sequence[str]) -> _Client:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        return _Client(number, process)

    async def prepare(self, share: Any) -> None:
        """Give it its share, and wait until it is ready."""
        await self._tell(json.dumps(share))
        assert self._process.stdout is not None
        if await self._process.stdout.readline() != f"{READY}\n".encode():
            raise ClientError(f"client {self.number} is not ready: {await self._outcome()}")
        self.is_late = False

    async def fetch(self, start: float) -> Any:
        """Let it begin, and take what it has found."""
        self.is_late = True
        await self._tell(repr(start))
        assert self._process.stdout is not None
        found = await self._process.stdout.read()
        if await self._process.wait() != 0:
            raise ClientError(f"client {self.number} has found nothing: {await self._outcome()}")
        self.is_late = False
        return json.loads(found)

    async def end(self) -> None:
        """Leave no process behind."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()

    async def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has gone, and what it answers shows it
            self._process.stdin.write(f"{line}\n".encode())
            await self._process.stdin.drain()

    async def _outcome(self) -> str:
        return f"it has ended with code {await self._process.wait()}"
