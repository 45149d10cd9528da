"""Graphs whose methods fail: behaviours of `behaviours_job.py`."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from driving import graph_of, raises  # in the folder above
from players import SECONDS, Boom, Player, players

import cg


def an_error_passes_through_a_chain(drives: bool) -> None:
    """Nobody after it is called, and the next execution is whole."""
    one, other, last = players()

    def step(x):
        return last.fail(other.fail(one.fail(x))), other.note("independent")

    def logs(nothing):
        return [player.read_log(nothing) for player in (one, other, last)]

    with graph_of(step, max_inflight=3) as graph, graph_of(logs) as read:
        if drives:
            futures = [graph.execute(x) for x in ("a", "boom", "b")]
            assert [futures[i].result(SECONDS)[0] for i in (2, 0)] == ["b", "a"]
            error = futures[1].exception(SECONDS)
            assert isinstance(error, Boom)
            assert (error.code, error.rank, error.method) == (3, 1, "fail")
            first, second, third = read.execute(None).result(SECONDS)
            assert first == ["a", "boom", "b"]
            assert [x for x in second if isinstance(x, str)] == ["a", "b"]
            assert third == ["a", "b"]


def what_is_no_exception_is_an_error_of_its_execution(drives: bool) -> None:
    """On a rank that serves and on the driver's, and where all ranks run the step."""
    for rank in (1, 0):
        player = Player.on(rank)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x, player=player):
            return player.give_up(x)

        names = {"cancelled": "CancelledError", "closed": "GeneratorExit", "halt": "Halt: enough"}
        with step.lower(cg.object).compile(max_inflight=2) as graph:
            for how, name in names.items():
                with raises(cg.RemoteError, name):
                    graph(how)  # on all ranks together
            assert graph("fine") == ("fine" if drives else None)
            for how, name in names.items() if drives else ():
                failing, fine = graph.execute(how), graph.execute("fine")
                with raises(cg.RemoteError, name) as caught:
                    failing.result(SECONDS)
                # asyncio would take it for the cancellation of whoever waits.
                assert type(caught[0]) is cg.RemoteError
                assert fine.result(SECONDS) == "fine"
            if drives and rank:
                with raises(cg.RemoteError, "CancelledError"):
                    asyncio.run(awaited(graph, "cancelled"))


async def awaited(graph: Any, x: Any) -> Any:
    return await graph.execute(x)


def another_shape_than_declared_is_an_error(drives: bool) -> None:
    """Of a result, when it is made; of an input, before anything is sent."""
    one, *_ = players()

    def step(x):
        return one.odd_shape(x)

    with graph_of(step, torch.ones(3), max_inflight=2) as graph:
        if drives:
            with raises(TypeError, "float32[7], but its fake promised float32[3]"):
                graph.execute(torch.zeros(3)).result(SECONDS)
            with raises(cg.InputError, "float32[4]"):
                graph.execute(torch.ones(4))
            assert torch.equal(graph.execute(torch.ones(3)).result(SECONDS), torch.ones(3))
