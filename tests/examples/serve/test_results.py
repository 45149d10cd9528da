"""Results of a device, whose tokens come to the host later than their execution ends there."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.engine import CgEngine
from examples.serve.loop import EngineLoop
from examples.serve.requests import Limits, Request
from examples.serve.results import Copies, Tokens
from examples.serve.settings import Options
from examples.serve.variants import DecodeSize, all_sizes

from .test_loop import Front

TOKEN = 5


class Event:
    """An event of a device that the test reaches."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._error: str | None = None

    def reach(self, error: str | None = None) -> None:
        self._error = error
        self._reached.set()

    def query(self) -> bool:
        if self._reached.is_set() and self._error:
            raise RuntimeError(self._error)
        return self._reached.is_set()

    def synchronize(self) -> None:
        assert self._reached.wait(60), "nobody has reached the event"
        self.query()


class Stream:
    """A stream of a device, which makes an event for each copy."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


class Ended:
    """A future of an execution whose work is on streams, or that has failed."""

    def __init__(self, tokens: Tensor, error: Exception | None = None) -> None:
        self._tokens, self._error = tokens, error

    def done(self) -> bool:
        return True

    def exception(self, timeout: float | None = None) -> Exception | None:
        return self._error

    def result(self, timeout: float | None = None) -> Tensor:
        if self._error is not None:
            raise self._error
        return self._tokens

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        call(self)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)  # which needs a device
    return Stream()


@contextmanager
def copying(stream: Stream) -> Iterator[Copies]:
    copies = Copies(stream)  # type: ignore[arg-type]
    try:
        yield copies
    finally:
        copies.close()
        if copies._thread is not None:
            copies._thread.join(60)
            assert not copies._thread.is_alive()


def tokens_of(copies: Copies, error: Exception | None = None) -> Tokens:
    return Tokens(Ended(torch.tensor([3, 4, 0]), error), 2, copies=copies)  # type: ignore[arg-type]


def test_tokens_are_there_when_their_copy_is(stream: Stream) -> None:
    async def ask() -> None:
        with copying(stream) as copies:
            tokens, told = tokens_of(copies), asyncio.Event()
            threads: list[int] = []
            tokens.when_done(lambda: (threads.append(threading.get_ident()), told.set()))
            await asyncio.sleep(0.05)
            assert not tokens.done()
            assert not told.is_set()
            stream.events[0].reach()
            await told.wait()
            assert tokens.done()
            assert tokens.result() == [3, 4]
            assert threads == [threading.get_ident()]

    asyncio.run(ask())


def test_an_execution_that_has_failed_has_no_copy(stream: Stream) -> None:
    with copying(stream) as copies:
        tokens, told = tokens_of(copies, ValueError("a method has raised")), list[int]()
        tokens.when_done(lambda: told.append(1))
        assert (told, tokens.done(), stream.events) == ([1], True, [])
        with pytest.raises(ValueError, match="a method has raised"):
            tokens.result()


def test_a_device_that_fails_is_the_error_of_whoever_reads(stream: Stream) -> None:
    async def ask() -> None:
        with copying(stream) as copies:
            tokens, told = tokens_of(copies), asyncio.Event()
            tokens.when_done(told.set)
            stream.events[0].reach("a device has failed")
            await told.wait()
            assert tokens.done()
            with pytest.raises(RuntimeError, match="a device has failed"):
                tokens.result()

    asyncio.run(ask())


def test_a_step_follows_each_that_lands(stream: Stream, tmp_path: Path) -> None:
    """While the second of two steps runs, the third is given to the device."""
    limits = Limits(1, 2, 4, 33, 4, 64, 16, ())
    options = Options(groups=1, batches=(2,), chunks=(4,), widths=(), draws=False)
    steps = list[int]()

    def engine(copies: Copies) -> CgEngine:
        class Graph:
            def __init__(self, is_step: bool) -> None:
                self._is_step = is_step

            def execute(self, *_: object) -> Ended:
                if self._is_step:
                    steps.append(len(stream.events))  # its own event, by its place
                return Ended(torch.full((2,), TOKEN))

        sizes = all_sizes(limits, options)
        compiled = {size: (Graph(isinstance(size, DecodeSize)),) for size in sizes}
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        graphs: Any = SimpleNamespace(compiled=compiled, is_ready=False, close=nothing)
        made = CgEngine(limits, options, graphs)
        made._copies = copies
        return made

    async def until(right: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not right():
                await asyncio.sleep(0.001)

    async def ask() -> None:
        front = Front()
        path = tmp_path / "engine"
        server = await asyncio.get_running_loop().create_unix_server(lambda: front.link, str(path))
        with copying(stream) as copies:
            running = asyncio.ensure_future(EngineLoop(engine(copies)).run(path))
            await front.until(lambda: bool(front.frames))
            front.add(Request(1, (1, 2, 3), 6))
            await until(lambda: len(stream.events) == 1)
            stream.events[0].reach()  # of the prompt
            for landed in range(3):
                await until(lambda: len(steps) == landed + 2)  # noqa: B023 # awaited here
                assert not stream.events[steps[landed]].query()
                stream.events[steps[landed]].reach()
                await front.until(lambda: len(front.tokens.get(1, ())) == landed + 2)  # noqa: B023
            await until(lambda: len(steps) == 5)
            for event in stream.events:
                event.reach()
            await front.until(lambda: 1 in front.ends)
            assert front.tokens[1] == [TOKEN] * 6
            front.link.close()
            await running
        server.close()

    asyncio.run(ask())
