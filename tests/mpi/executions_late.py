"""Executions that are late: scenarios of `executions_job.py`."""

from __future__ import annotations

import os
import time
from typing import Any

from driving import a_sign, chain_of, raises
from executions_actors import workers

import cg


def timeouts(drives: bool) -> None:
    """A timeout comes in time, and the graph can be used."""
    with chain_of(workers(), "wait") as graph, a_sign() as sign:
        if not drives:
            return
        future = graph.execute(str(sign))
        began = time.monotonic()
        with raises(TimeoutError, "execution 0 has not ended after 0.25 s"):
            future.result(timeout=0.25)
        assert time.monotonic() - began > 0.2
        with raises(cg.StepTimeout):
            future.result(timeout=0)
        sign.touch()
        assert future.result(timeout=30) == str(sign)
        assert graph.execute(0.0).result(timeout=30) == 0.0


def room(drives: bool) -> None:
    """Waiting for room ends by a deadline that somebody has set, and the graph can be used."""
    for options, variable in (({"timeout": 0.2}, "60"), ({}, "0.2"), ({}, "")):
        wait_for_room(drives, variable, **options)


def wait_for_room(drives: bool, variable: str, **options: Any) -> None:
    (worker, *_) = workers()
    os.environ["CG_TIMEOUT"] = variable
    ends = bool(options) or bool(variable)
    with chain_of([worker], "wait", max_inflight=1, **options) as graph, a_sign() as sign:
        del os.environ["CG_TIMEOUT"]
        if not drives:
            return
        first = graph.execute(str(sign) if ends else 0.6)
        if ends:
            with raises(cg.StepTimeout, "execution 1 has not started after 0.2 s") as caught:
                graph.execute(0.1)
            assert "  @chain 0: rank 0 waits at " in str(caught[0])
            assert not first.done()
            sign.touch()
        second = None if ends else graph.execute(0.0)
        assert first.result(timeout=30) == (str(sign) if ends else 0.6)
        assert second is None or second.result(timeout=30) == 0.0
        again = graph.execute(0.3)
        assert again.execution == (1 if second is None else 2)
        assert again.result(timeout=30) == 0.3  # which is not what the deadline is for


def positions(drives: bool) -> None:
    """A timeout names the line and the rank that it waits for, and claims no more than it knows."""
    *_, last = workers()

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def answered(x):
        return last.wait(x)

    @cg.trace(inputs=cg.on(0), outputs=cg.on(3))
    def unanswered(x):
        return last.wait(x)

    with answered.lower(cg.object).compile() as graph:
        if drives:
            said = said_too_early(graph)
            assert f"@answered 0: rank 0 waits at {__file__}:" in said, said
            assert ", in answered (`%wait.at0 = wait(" in said, said
            assert said.endswith("it needs rank 3's send of message 0 of channel 1"), said
    with unanswered.lower(cg.object).compile() as graph:
        if drives:
            said = said_too_early(graph)
            assert "rank 0 waits for rank 3 to end its program, whose last call is " in said, said
            assert ", in unanswered (`%wait = call(" in said, said


def said_too_early(graph: Any) -> str:
    """The message about an execution that is asked for at once; it ends before this returns."""
    with a_sign() as sign:
        future = graph.execute(str(sign))
        with raises(TimeoutError) as caught:
            future.result(timeout=0)
        sign.touch()
        future.result(timeout=30)
    return str(caught[0])
