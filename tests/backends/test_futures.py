"""Graphs that one rank drives: futures, capacity, and the life of a graph."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import cg

from .graph_tools import Worker, chain_of, world


def test_capacity() -> None:
    with world(2):
        graph, (worker,) = chain_of(1, max_inflight=3)
        futures = [graph.execute(i, block=False) for i in range(3)]
        # The virtual world moves on in `execute` where it has to make room, but not before.
        assert [f.is_done for f in futures] == [False] * 3
        more = [graph.execute(i) for i in range(3, 20)]
        assert [f.result() for f in futures + more] == list(range(20))
        for bad in (0, -1):
            with pytest.raises(ValueError, match=f"max_inflight={bad}: it is at least 1"):
                chain_of(1, max_inflight=bad)
        for odd in (2.5, "2", None, True):
            with pytest.raises(TypeError, match=f"max_inflight={odd!r}: it is the number of exec"):
                chain_of(1, max_inflight=odd)
        assert worker.rank == 1


def test_beyond_capacity_without_blocking_is_an_error() -> None:
    with world(2, shuffle=3):
        graph, _ = chain_of(1, max_inflight=2)
        futures = [graph.execute(0), graph.execute(1)]
        refused = None
        while refused is None:
            try:
                futures.append(graph.execute(len(futures), block=False))
            except cg.CapacityError as error:
                refused = str(error)
        assert "2 executions of 'chain' are in flight, as many as it was compiled for" in refused
        assert [f.result() for f in futures] == list(range(len(futures)))


def test_a_timeout_leaves_the_graph_usable() -> None:
    with world(4, shuffle=1):
        graph, _ = chain_of(3)
        future = graph.execute("x")
        with pytest.raises(TimeoutError, match=r"execution 0 has not ended after 0 s"):
            future.result(timeout=0)
        with pytest.raises(cg.StepTimeout, match="@chain"):
            future.exception(timeout=0)
        assert future.result(timeout=60) == "x"
        assert future.exception() is None
        assert graph.execute("y").result(timeout=60) == "y"


def test_a_timeout_is_a_number_of_seconds() -> None:
    with world(2):
        graph, _ = chain_of(1)
        future = graph.execute("x")
        with pytest.raises(TypeError, match=r"timeout='x' is a str: give a number of seconds"):
            future.result(timeout="x")
        with pytest.raises(ValueError, match="timeout=nan: give a number of seconds"):
            future.exception(timeout=float("nan"))
        assert future.result(timeout=float("inf")) == "x"
        assert graph.execute("y").result(timeout=np.float32(30)) == "y"


@cg.actor
class Gate:
    """Says that it has been called, and returns when it may."""

    def __init__(self) -> None:
        self.called, self.open = threading.Event(), threading.Event()

    @cg.opaque
    def wait(self, x: Any) -> Any:
        self.called.set()
        assert self.open.wait(30)
        return x


def test_a_second_thread_is_told_apart_from_a_method() -> None:
    with world(2):
        gate = Gate.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            return gate.wait(x)

        graph = step.lower(cg.object).compile(max_inflight=2)
        future = graph.execute("x")
        other = threading.Thread(target=future.result)
        other.start()
        try:
            assert gate.local.called.wait(30)
            with pytest.raises(RuntimeError, match="another thread is using the graphs of rank 1"):
                future.done()
        finally:
            gate.local.open.set()
            other.join()
        assert future.result() == "x"
        assert graph.execute("y").result() == "y"


def test_done_moves_on() -> None:
    with world(3):
        graph, _ = chain_of(2)
        future = graph.execute("x")
        assert repr(future) == "<Future of execution 0, pending>"
        for _ in range(100):
            if future.done():
                break
        assert repr(future) == "<Future of execution 0, done>"
        assert future.result(timeout=0) == "x"


def test_callbacks(caplog: pytest.LogCaptureFixture) -> None:
    with world(3):
        graph, _ = chain_of(2, max_inflight=2)
        seen: list[Any] = []
        first = graph.execute("a")
        first.add_done_callback(lambda f: seen.append(f.result()))
        first.add_done_callback(lambda f: 1 / 0)
        # A callback may start executions and wait for them.
        first.add_done_callback(lambda f: seen.append(graph.execute("b").result()))
        assert graph.execute("c").result() == "c"
        assert seen == ["a", "b"]
        assert "ZeroDivisionError" in caplog.text
        first.add_done_callback(lambda f: seen.append("late"))
        assert seen[-1] == "late"


def test_await() -> None:
    async def go() -> list[Any]:
        async def one(i: int) -> Any:
            return await graph.execute(i)

        return await asyncio.gather(*map(one, range(20)))

    with world(4):
        graph, _ = chain_of(3, max_inflight=4)
        assert asyncio.run(go()) == list(range(20))

        async def fail() -> None:
            with pytest.raises(ZeroDivisionError):
                await bad.execute(0)

        worker = Worker.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def divide(x):
            return worker.divide(x)

        bad = divide.lower(cg.object).compile()
        asyncio.run(fail())


def test_an_event_loop_goes_on_for_who_waits_for_a_callback() -> None:
    async def go() -> None:
        came = asyncio.Event()
        graph.execute(1).add_done_callback(lambda future: came.set())
        await asyncio.wait_for(came.wait(), 30)
        futures = [graph.execute(i) for i in range(3)]
        done, pending = await asyncio.wait(  # type: ignore[type-var]
            futures, timeout=30, return_when=asyncio.FIRST_EXCEPTION
        )
        assert (done, pending) == (set(futures), set())
        failing = bad.execute(0)
        (ended,), _ = await asyncio.wait([failing], timeout=30)  # type: ignore[type-var]
        assert isinstance(ended.exception(), ZeroDivisionError)

    with world(3):
        graph, _ = chain_of(2, max_inflight=4)
        worker = Worker.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def divide(x):
            return worker.divide(x)

        bad = divide.lower(cg.object).compile()
        asyncio.run(go())


def test_a_future_stays_where_it_is() -> None:
    with world(2):
        graph, _ = chain_of(1)
        future = graph.execute("x")
        for copied in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"execution 0, .* cannot be copied: .* result\(\)"):
                copied(future)
        for given in (future, [future]):
            with pytest.raises(TypeError, match=r"cannot be pickled or sent: .* by result\(\)"):
                pickle.dumps(given)
            with pytest.raises(
                cg.RemoteError, match=r"cannot be pickled or sent: .* by result\(\)"
            ):
                graph.execute(given).result()
        assert future.result() == "x"


def test_a_callback_that_is_removed_is_not_called() -> None:
    with world(3):
        graph, _ = chain_of(2)
        seen: list[cg.Future] = []
        future = graph.execute(1)
        future.add_done_callback(seen.append)
        future.add_done_callback(seen.append)
        assert future.remove_done_callback(seen.append) == 2
        assert future.remove_done_callback(seen.append) == 0
        assert future.result() == 1
        assert seen == []


def test_close() -> None:
    with world(3) as executions:
        graph, _ = chain_of(2)
        future = graph.execute("x")
        graph.serve()  # one process plays all ranks: nothing to do
        graph.close()
        graph.close()
        assert future.result() == "x"
        assert executions.graphs == {}
        for use in (graph.execute, graph):
            with pytest.raises(RuntimeError, match="'chain' has been closed: compile it again"):
                use("x")
        with graph:
            graph.serve()
        with chain_of(2)[0] as other:
            assert other.execute(1).result() == 1
        with pytest.raises(RuntimeError, match="has been closed"):
            other.execute(1)


def test_a_step_without_a_driver() -> None:
    with world(2):
        worker = Worker.on(1)()

        @cg.trace
        def step(x):
            return worker.echo(x)

        compiled = step.lower(cg.object).compile()
        assert compiled(3) == 3
        for use in (lambda: compiled.execute(3), compiled.serve):
            with pytest.raises(RuntimeError, match=r"@cg.trace\(inputs=cg.on\(rank\)\)"):
                use()


def test_a_parameter_that_execute_takes_for_itself_does_not_compile() -> None:
    with world(2):
        (worker,) = chain_of(1)[1]

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x, block):
            return worker.join(x, block)

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def more(x, **named):
            return worker.join(x, **named)

        for lowered in (
            step.lower(cg.object, cg.object),
            step.lower(cg.object, block=3),
            more.lower(cg.object, block=cg.object),
        ):
            with pytest.raises(cg.TraceError, match=r"execute\(\) takes block= for") as caught:
                lowered.compile()
            assert caught.value.loc is not None
            assert caught.value.loc.file == __file__
            assert caught.value.remedy == "give the parameter block another name"
        # It is execute that cannot pass it: a call on all ranks can.
        assert step(1, block=2) == ("w1", (1, 2), {})


def test_a_parameter_may_be_called_self() -> None:
    with world(2):
        (worker,) = chain_of(1)[1]

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x, **named):
            return worker.join(x, named["self"])

        assert step(1, self=2)[1] == (1, 2)
        graph = step.lower(cg.object, self=cg.object).compile()
        assert graph.execute(1, self=3).result()[1] == (1, 3)


def test_a_parameter_by_position_only_may_have_any_name() -> None:
    with world(2):
        (worker,) = chain_of(1)[1]

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(block, /, *blocks):
            return worker.join(block, *blocks)

        graph = step.lower(cg.object, cg.object).compile()
        assert graph.execute(1, 2).result()[1] == (1, 2)


def test_one_driver_at_a_time() -> None:
    with world(3):
        graph, (worker, _) = chain_of(2)

        @cg.trace(inputs=cg.on(1), outputs=cg.on(1))
        def other(x):
            return worker.echo(x)

        lowered = other.lower(cg.object)
        with pytest.raises(RuntimeError, match="rank 0 drives the open graphs 'chain'"):
            lowered.compile()
        graph.close()
        assert lowered.compile().execute(3).result() == 3


def test_steps_on_all_ranks_and_executions_in_one_program() -> None:
    with world(3):
        workers = [Worker.on(rank)() for rank in (1, 2)]

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def total(x):
            return [worker.add(x) for worker in workers]

        graph, other = (total.lower(cg.object).compile() for _ in range(2))
        assert graph(1) == [1, 1]
        future = graph.execute(2)
        with pytest.raises(RuntimeError, match="executions of a graph are in flight on this rank"):
            graph(3)
        with pytest.raises(RuntimeError, match="wait for their results, or close the graph"):
            other(3)
        assert future.result() == [3, 3]
        assert graph(3) == other(0) == [6, 6]


def test_statistics() -> None:
    with world(3):
        graph, _ = chain_of(2)
        for i in range(5):
            graph.execute(i).result()
        for rank in range(3):
            assert graph.statistics(rank).executions == 5
            assert graph.statistics(rank).failures == 0
            assert graph.statistics(rank).total > 0
        before = graph.statistics()
        assert before == graph.statistics()
        graph("x")
        assert graph.statistics().executions == 6
        assert before.executions == 5
        assert before != graph.statistics()
        worker = Worker.on(1)()
        step = cg.trace(lambda x: worker.add(x)).lower(cg.object).compile()
        step(1)
        before = step.statistics()
        step(2)
        assert (before.executions, step.statistics().executions) == (1, 2)
        with pytest.raises(ValueError, match="no statistics of rank 7"):
            graph.statistics(7)
