"""Executions after a signal's handler has raised in the middle of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import cg
from cg.backends.driven.commands import VirtualCommands
from cg.backends.driven.executions import Executions
from cg.backends.failures.interruptions import is_interruption, leaves
from cg.backends.virtual.virtual_executions import VirtualRestartEpochs, VirtualWaiting
from cg.backends.virtual.world import VirtualWorld
from cg.launch.runtime.driven_graphs import use_executions
from cg.launch.world.world import use_world

from .graph_tools import world


class Ring(Exception):
    """An exception that handlers raise."""


class Halt(BaseException):
    """An exception that handlers may raise, too, and methods."""


@cg.actor
class Echo:
    def __init__(self) -> None:
        self.interrupts = False

    def echo(self, x: Any) -> Any:
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        return x


@pytest.fixture
def graph() -> Iterator[tuple[Executions, Any, Any]]:
    with world(2) as executions:
        yield executions, *echoing()


def echoing() -> tuple[Any, Any]:
    """A graph over two ranks, and its actor on the driver."""
    actor, other = Echo.on(0)(), Echo.on(1)()

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x):
        return actor.echo(other.echo(x))

    return step.lower(cg.object).compile(max_inflight=2), actor


def test_executions_in_doubt_are_lost_and_later_ones_are_not(graph: Any) -> None:
    executions, compiled, _ = graph
    done = compiled.execute(1)
    assert done.result() == 1
    called: list[Any] = []
    lost = [compiled.execute(2), compiled.execute(3)]
    lost[0].add_done_callback(called.append)
    executions.in_doubt = True
    for future in lost:
        with pytest.raises(cg.ExecutionLost, match="given up") as caught:
            future.result()
        assert isinstance(caught.value, cg.RemoteError)
    assert done.result() == 1
    assert [compiled.execute(x).result() for x in (4, 5, 6)] == [4, 5, 6]
    assert called == lost[:1]
    compiled.close()


def test_an_execution_that_must_not_wait_does_not_wait_for_ranks(graph: Any) -> None:
    executions, compiled, _ = graph
    executions.in_doubt = True
    for _ in range(2):  # a stage in each call
        with pytest.raises(cg.CapacityError, match="start over after an interruption"):
            compiled.execute(1, block=False)
    assert compiled.execute(2, block=False).result() == 2
    compiled.close()


def test_closing_starts_over_as_well(graph: Any) -> None:
    executions, compiled, _ = graph
    lost = compiled.execute(1)
    executions.in_doubt = True
    compiled.close()
    with pytest.raises(cg.ExecutionLost):
        lost.result()


@pytest.mark.parametrize("ask", ["execute", "close"])
def test_ranks_that_do_not_start_over_are_not_waited_for_without_end(
    graph: Any, ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executions, compiled, _ = graph
    lost = compiled.execute(1)
    (opened,) = executions.graphs.values()
    opened.limit = 0.0
    executions.in_doubt = True
    with monkeypatch.context() as patch:
        patch.setattr(VirtualRestartEpochs, "missing", lambda self, epoch: [1])
        with pytest.raises(cg.StepTimeout, match=r"has not (started after|been closed)"):
            compiled.close() if ask == "close" else compiled.execute(2)
    with pytest.raises(cg.ExecutionLost):
        lost.result()
    assert compiled.execute(2).result() == 2
    compiled.close()


def test_where_nobody_can_start_over_everything_says_so() -> None:
    made = VirtualWorld(2)
    executions = Executions(range(2), lambda driver: VirtualCommands(), VirtualWaiting(), None)
    use_executions(made, executions)
    with use_world(made):
        compiled, _ = echoing()
        future = compiled.execute(1)
        executions.in_doubt = True
        for ask in (future.result, future.done, partial(compiled.execute, 2), compiled.close):
            with pytest.raises(cg.TransportError, match="start the job again"):
                ask()
        executions.in_doubt = False  # nothing was half done
        compiled.close()


def test_ranks_count_executions_alike_when_a_method_was_interrupted() -> None:
    with world(2) as executions:
        echo = Echo.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            return echo.echo(x)

        compiled = step.lower(cg.object).compile()
        (opened,) = executions.graphs.values()
        echo.local.interrupts = True
        future = compiled.execute(1)
        with pytest.raises(KeyboardInterrupt):
            future.result()
        assert compiled.execute(2).result() == 2
        assert opened.started[1] == opened.count == 2
        compiled.close()


def test_a_method_that_is_interrupted_has_failed_and_nothing_else(graph: Any) -> None:
    executions, compiled, actor = graph
    first = compiled.execute(1)
    second = compiled.execute(2)
    actor.local.interrupts = True
    with pytest.raises(KeyboardInterrupt) as caught:
        first.result()
    (note,) = caught.value.__notes__
    assert note.startswith(f"on rank {actor.rank} in {actor.name}.echo, called from {__file__}:")
    assert not executions.in_doubt
    with pytest.raises(cg.RemoteError, match="KeyboardInterrupt"):
        first.result()
    assert second.result() == 2


def handle(number: int, frame: object) -> None:
    raise Ring


class Handler:
    def method(self, number: int, frame: object) -> None:
        raise Ring

    def __call__(self, number: int, frame: object) -> None:
        raise Ring


@pytest.mark.parametrize(
    "handler", [handle, Handler().method, Handler(), partial(handle), signal.default_int_handler]
)
def test_what_a_handler_raises_is_an_interruption(handler: Any) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises((Ring, KeyboardInterrupt)) as caught:
            signal.raise_signal(signal.SIGUSR1)
        assert is_interruption(caught.value)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_code_raises_is_none() -> None:
    with pytest.raises(IndexError) as caught:
        [].pop()
    assert not is_interruption(caught.value)
    for error in (SystemExit(), BaseExceptionGroup("g", [KeyboardInterrupt()])):
        assert is_interruption(error)
        assert leaves(error)
    for error in (asyncio.CancelledError(), GeneratorExit(), BaseExceptionGroup("g", [Halt()])):
        assert not is_interruption(error)
        assert not leaves(error)


def test_a_handlers_exception_fails_the_method_and_what_is_none_leaves_it() -> None:
    for kind in (Ring, Halt):

        def handler(number: int, frame: object, kind: type[BaseException] = kind) -> None:
            raise kind

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            with pytest.raises(kind) as caught:
                signal.raise_signal(signal.SIGUSR1)
            assert leaves(caught.value) == (kind is Halt)
        finally:
            signal.signal(signal.SIGUSR1, before)
