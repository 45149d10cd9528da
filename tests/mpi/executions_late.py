"""Executions that are late: scenarios of `executions_job.py`."""

from __future__ import annotations

import os
import time
from typing import Any

from driving import chain_of, raises
from executions_actors import workers

import cg


def timeouts(drives: bool) -> None:
    """A timeout comes in time, and the graph can be used."""
    with chain_of(workers(), "sleep") as graph:
        if not drives:
            return
        future = graph.execute(0.3)
        began = time.monotonic()
        with raises(TimeoutError, "execution 0 has not ended after 0.25 s"):
            future.result(timeout=0.25)
        assert 0.2 < time.monotonic() - began < 5
        with raises(cg.StepTimeout):
            future.result(timeout=0)
        assert future.result(timeout=30) == 0.3
        assert graph.execute(0.0).result(timeout=30) == 0.0


def room(drives: bool) -> None:
    """Waiting for room ends by a deadline that somebody has set, and the graph can be used."""
    for options, variable in (({"timeout": 0.2}, "60"), ({}, "0.2"), ({}, "")):
        wait_for_room(drives, variable, **options)


def wait_for_room(drives: bool, variable: str, **options: Any) -> None:
    (worker, *_) = workers()
    os.environ["CG_TIMEOUT"] = variable
    with chain_of([worker], "sleep", max_inflight=1, **options) as graph:
        del os.environ["CG_TIMEOUT"]
        if not drives:
            return
        first = graph.execute(0.6)
        if options or variable:
            with raises(cg.StepTimeout, "execution 1 has not started after 0.2 s") as caught:
                graph.execute(0.1)
            assert "  @chain 0: rank 0 waits at " in str(caught[0])
            assert not first.done()
        second = graph.execute(0.0) if not options and not variable else None
        assert first.result(timeout=30) == 0.6
        assert second is None or second.result(timeout=30) == 0.0
        again = graph.execute(0.3)
        assert again.execution == (1 if second is None else 2)
        assert again.result(timeout=30) == 0.3  # which is not what the deadline is for


def positions(drives: bool) -> None:
    """A timeout names the line and the rank that it waits for, and claims no more than it knows."""
    *_, last = workers()

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def answered(x):
        return last.sleep(x)

    @cg.trace(inputs=cg.on(0), outputs=cg.on(3))
    def unanswered(x):
        return last.sleep(x)

    with answered.lower(cg.object).compile() as graph:
        if drives:
            said = said_too_early(graph)
            assert f"@answered 0: rank 0 waits at {__file__}:" in said, said
            assert ", in answered (`%sleep.at0 = wait(" in said, said
            assert said.endswith("it needs rank 3's send of message 0 of channel 1"), said
    with unanswered.lower(cg.object).compile() as graph:
        if drives:
            said = said_too_early(graph)
            assert "rank 0 waits for rank 3 to end its program, whose last call is " in said, said
            assert ", in unanswered (`%sleep = call(" in said, said


def said_too_early(graph: Any) -> str:
    """What is said of an execution that is asked for at once; it ends before this returns."""
    future = graph.execute(0.3)
    with raises(TimeoutError) as caught:
        future.result(timeout=0)
    future.result(timeout=30)
    return str(caught[0])
