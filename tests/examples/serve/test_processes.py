"""Processes of an engine's job: each death is told, and none outlives the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from examples.serve.front import processes
from examples.serve.front.processes import Processes, of_job

from .servers import PATIENCE, children

DEAF = """
import signal
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: print(number, flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""
PARENT = """
import os, signal
for _ in range(2):
    os.fork() or signal.pause()
print("ready", flush=True)
signal.pause()
"""


@contextmanager
def running(script: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await story()

    asyncio.run(bounded())


def test_deaths_are_told() -> None:
    async def story() -> None:
        deaths: asyncio.Queue[None] = asyncio.Queue()
        watched = Processes(lambda: deaths.put_nowait(None))
        with running(DEAF) as one, running(DEAF) as other:
            for process in (one, other, one):
                watched.add(process.pid)
            other.kill()
            await deaths.get()
            assert one.poll() is None
            one.kill()
            await deaths.get()
            await watched.end(PATIENCE)  # which returns at once
            assert deaths.empty()
            one.wait()
            watched.add(one.pid)  # it has gone
            await deaths.get()

    run(story)


def test_what_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is told twice, and then all are killed."""
    steps = [(number, 0.2) for number, _ in processes.STEPS]
    monkeypatch.setattr(processes, "STEPS", steps)

    async def story() -> None:
        watched = Processes(lambda: None)
        with running(DEAF) as first, running(DEAF) as second:
            watched.add(first.pid)
            watched.add(second.pid)
            await watched.end(0.0)
            ends = [process.communicate()[0] for process in (first, second)]
            assert ends == [f"{signal.SIGTERM:d}\n{signal.SIGINT:d}\n", ""]
            assert first.returncode == second.returncode == -signal.SIGKILL

    run(story)


def test_what_belongs_to_a_job() -> None:
    with running(PARENT) as first:
        ranks = children(first.pid)
        try:
            for rank in ranks:
                assert of_job(first.pid, rank) == [first.pid, *ranks]
                above = of_job(os.getpid(), rank)
                assert above == [os.getpid(), first.pid, *ranks]
            # A job that has no launcher, and one whose ranks a daemon starts.
            assert set(of_job(ranks[0], ranks[0])) == {ranks[0]}
            assert of_job(ranks[0], ranks[1]) == ranks
        finally:
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
