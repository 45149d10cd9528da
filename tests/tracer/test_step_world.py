"""All ranks trace the same step: they agree on functions, derivatives and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cg.ir.text.printer import format_module
from cg.tracer.errors import TraceError
from cg.tracer.record.actors.factory import ActorFactory
from cg.tracer.record.intrinsics.gradients import backward
from cg.tracer.record.intrinsics.microbatches import mean, microbatches
from cg.tracer.record.step import trace_step
from cg.tracer.record.trace import Trace

from .step_tools import EagerTracer, PlainStage

RANKS = 3
PATIENCE = 120.0


class Exchange:
    """The state that the threads of a world share."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=PATIENCE)
        self.slot: Any = None
        self.turn = threading.Lock()


class ThreadPeers:
    """A rank of a world of threads; broadcasts meet at a barrier."""

    size = RANKS

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank = rank
        self._exchange = exchange

    def plays(self, rank: int) -> bool:
        return rank == self.rank

    def broadcast(self, value: Any, root: int) -> Any:
        if self.rank == root:
            self._exchange.slot = value
        self._exchange.barrier.wait()
        heard = self._exchange.slot
        self._exchange.barrier.wait()
        return heard

    def allgather(self, value: Any) -> list[Any]:
        return [self.broadcast(value, rank) for rank in range(self.size)]


class TurnTracer(EagerTracer):
    """Fake tensors are not made for several threads at once."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def trace(self, *args: Any) -> Any:
        with self._exchange.turn:
            return super().trace(*args)


class NotedStage(PlainStage):
    """Gives a value that is no tensor beside one that is."""

    def forward(self, x: Any) -> Any:
        return {"h": self.linear(x), "note": ("static", 3, None)}

    def loss(self, h: Any, y: Any) -> Any:
        return (h - y).pow(2).mean()

    def fails(self, x: Any) -> Any:
        raise ValueError("no such thing")


def everywhere(fn: Callable[[list[Any]], Callable[..., Any]]) -> list[Trace | BaseException]:
    """Trace the step that `fn` makes of three actors, on every rank of a world of threads."""
    exchange = Exchange()
    outcomes: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        try:
            peers = ThreadPeers(rank, exchange)
            actor: Any = ActorFactory(lambda: peers)(type("Stage", (NotedStage,), {}))
            step = fn([actor.on(r)() for r in range(RANKS)])
            exchange.barrier.wait()  # nobody initialises weights while another traces
            outcomes[rank] = trace_step(
                step,
                (torch.ones(4, 4),),
                {},
                peers=peers,
                name="step",
                tracer=TurnTracer(exchange),
            )
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return outcomes


def train(stages: list[Any]) -> Callable[..., Any]:
    def step(x: Any) -> Any:
        losses = []
        for part in microbatches(x, 2):
            h = part
            for stage in stages:
                result = stage.forward(h)
                assert result["note"] == ("static", 3, None)
                h = result["h"]
            losses.append(stages[-1].loss(h, part))
        loss = mean(losses)
        backward(loss)
        for stage in stages:
            stage.update()
        return loss, {"last": h}

    return step


def test_all_ranks_hold_the_same_module_and_their_own_bodies() -> None:
    traces = everywhere(train)
    assert all(isinstance(trace, Trace) for trace in traces), traces
    texts = {format_module(trace.module, locations=True) for trace in traces}  # type: ignore[union-attr]
    assert len(texts) == 1
    for rank, trace in enumerate(traces):
        assert isinstance(trace, Trace)
        own = {name for name in trace.bodies if name.startswith("stage")}
        assert own == {name for name in trace.module.functions if name.startswith(f"stage{rank}.")}
        assert "torch.mean" in trace.bodies
        assert len(trace.guards) == (4 if rank == 2 else 3) + 1
    single = traces[0]
    assert isinstance(single, Trace)
    assert {"stage2.loss.vjp.bwd", "stage0.forward.vjp.fwd"} <= set(single.module.functions)


def test_all_ranks_raise_the_owners_error() -> None:
    errors = everywhere(lambda stages: lambda x: stages[1].fails(x))
    assert all(isinstance(error, TraceError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert "@stage1.fails raised ValueError while it was traced: no such thing" in str(errors[0])
    assert f"{__file__}:" in str(errors[2])
    assert isinstance(errors[1].__cause__, ValueError)  # type: ignore[union-attr]


def test_errors_in_the_step_are_raised_by_each_rank_alike() -> None:
    errors = everywhere(lambda stages: lambda x: bool(stages[0].forward(x)["h"].sum()))
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(TraceError, match="a decision on a tensor"):
        raise errors[0]  # type: ignore[misc]
