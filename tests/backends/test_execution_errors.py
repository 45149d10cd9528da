"""Failures of an execution reach whoever started it, and nobody else."""

from __future__ import annotations

import asyncio
import pickle
import threading
import traceback
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cg
from cg.backends.errors import Failure, RemoteError
from cg.backends.poison import Poison

from ..sampling import scaled
from .graph_tools import Boom, Scale, Worker, world


class Unloadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return (_refuse, ())


class Shy:
    """Cannot be pickled, in a way of its own."""

    def __reduce__(self) -> Any:
        raise PermissionError("not me")


def _refuse() -> None:
    raise LookupError("not here")


def test_an_exception_keeps_its_type_and_says_where() -> None:
    with world(4):
        workers = [Worker.on(rank)(f"w{rank}") for rank in (1, 2, 3)]

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def chain(x):
            for worker in workers:
                x = worker.fail_on(x, ["bad"]) if worker is workers[1] else worker.note(x)
            return x

        graph = chain.lower(cg.object).compile()
        before = graph.execute("fine")
        failing = graph.execute("fine")  # the second number that w1 notes is 2, which is fine
        assert (before.result(), failing.result()) == (1, 2)

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def one(x):
            return workers[1].fail_on(x, ["bad"])

        graph = one.lower(cg.object).compile()
        futures = [graph.execute(x) for x in ("a", "bad", "b")]
        with pytest.raises(Boom) as caught:
            futures[1].result()
        error = caught.value
        assert isinstance(error, RemoteError)
        assert (error.rank, error.method, error.type_name) == (
            2,
            "fail_on",
            Boom.__module__ + ".Boom",
        )
        assert (error.code, error.args) == (7, ("w2 got 'bad' (7)",))
        text = str(error)
        assert "Boom on rank 2 in worker" in text
        assert (
            'raise Boom(f"{self.tag} got {x!r}", 7)' in text
        )  # the traceback begins in the method
        assert "tracer" not in text
        assert "called from" in text
        assert "workers[1].fail_on(x" in text
        assert isinstance(error.__cause__, Boom)
        assert str(futures[1].exception()) == text
        assert [futures[i].result() for i in (0, 2)] == ["a", "b"]
        assert graph.execute("c").result() == "c"
        assert graph.statistics(2).failures == 1


@cg.actor
class Table(torch.nn.Module):
    """A traced method that can raise when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(3, 2)

    def look(self, index: torch.Tensor) -> torch.Tensor:
        return self.rows(index)  # the line of the method


def test_a_traced_line_that_raises_is_named() -> None:
    with world(2):
        table = Table.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(index):
            return table.look(index)

        graph = step.lower(torch.tensor([0])).compile()
        line = type(table.local).look.__code__.co_firstlineno + 1
        with pytest.raises(IndexError, match=rf"raised at .*test_execution_errors\.py:{line}"):
            graph.execute(torch.tensor([5])).result()
        assert graph.execute(torch.tensor([1])).result().shape == (1, 2)


def test_what_depends_on_a_failure_is_not_run() -> None:
    with world(4):
        first, second, third = (Worker.on(rank)(f"w{rank}") for rank in (1, 2, 3))

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            y = first.fail_on(x, [13])
            first.note("after")  # its state was to be prepared by the call that fails
            second.note(y)  # its operand fails
            return third.note(x), y  # neither

        graph = step.lower(cg.object).compile(max_inflight=4)
        futures = [graph.execute(x) for x in (1, 13, 2)]
        with pytest.raises(Boom):
            futures[1].result()
        assert [f.result() for f in (futures[0], futures[2])] == [(1, 1), (3, 2)]
        assert first.local.log == [1, "after", 13, 2, "after"]
        assert second.local.log == [1, 2]
        assert third.local.log == [1, 13, 2]


def test_a_failure_that_leads_nowhere_reaches_the_caller() -> None:
    with world(4):
        quiet, loud = Worker.on(2)(), Worker.on(3)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            quiet.divide(x)
            return loud.echo(x)

        graph = step.lower(cg.object).compile(max_inflight=2)
        futures = [graph.execute(x) for x in (1, 0, 2)]
        assert futures[0].result() == 1
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            futures[1].result()
        assert futures[2].result() == 2


def test_tensors_carry_errors_in_their_slots() -> None:
    with world(4):
        worker, scale = Worker.on(1)(), Scale.on(2)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            y = worker.shaped(x)
            return scale(scale(y)) + 1

        graph = step.lower(torch.ones(3)).compile(max_inflight=2)
        futures = [graph.execute(torch.full((3,), v)) for v in (1.0, -1.0, 0.0, 2.0)]
        assert futures[0].result().tolist() == [9.0] * 3
        with pytest.raises(ValueError, match="negative"):
            futures[1].result()
        # A method that returns another shape than it was compiled with.
        with pytest.raises(TypeError, match=r"float32\[7\], but its fake promised float32\[3\]"):
            futures[2].result()
        assert futures[3].result().tolist() == [17.0] * 3


def test_a_collective_with_a_failed_member_fails_on_all() -> None:
    with world(4):
        workers = [Worker.on(rank)() for rank in (1, 2, 3)]

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x, y):
            summed = cg.all_reduce(
                [workers[0].shaped(x), workers[1].shaped(y), workers[2].shaped(y)], op="sum"
            )
            return summed[0], workers[2].shaped(summed[2])

        graph = step.lower(torch.ones(2), torch.ones(2)).compile()
        one = torch.ones(2)
        futures = [graph.execute(x, one) for x in (one, -one, one)]
        assert futures[0].result()[0].tolist() == [6.0, 6.0]
        with pytest.raises(ValueError, match="negative"):
            futures[1].result()
        assert futures[2].result()[1].tolist() == [12.0, 12.0]


def test_a_wrong_input_is_refused_before_anything_is_sent() -> None:
    with world(2) as executions:
        scale = Scale.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            return scale.count(x)

        graph = step.lower(torch.ones(2)).compile()
        for bad in (torch.ones(3), torch.ones(2, dtype=torch.float64), [1.0, 2.0], None):
            with pytest.raises(cg.InputError, match=r"argument x of step\(\) must be float32\[2\]"):
                graph.execute(bad)
        for args in ((), (torch.ones(2), 1)):
            with pytest.raises(cg.InputError):
                graph.execute(*args)
        assert executions.is_idle
        assert graph.execute(torch.ones(2)).result().tolist() == [2.0, 2.0]


def test_what_cannot_be_pickled_or_unpickled() -> None:
    with world(3):
        worker = Worker.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            return worker.echo(x)

        graph = step.lower(cg.object).compile()
        futures = [graph.execute(x) for x in (1, lambda: 0, Unloadable(), 2, Shy())]
        assert futures[0].result() == 1
        with pytest.raises(cg.RemoteError, match="cannot be pickled"):
            futures[1].result()
        with pytest.raises(LookupError, match="not here") as caught:
            futures[2].result()
        assert isinstance(caught.value, cg.RemoteError)
        assert "importable under the same name on every rank" in str(caught.value)
        assert futures[3].result() == 2
        with pytest.raises(PermissionError, match="not me"):
            futures[4].result()


def test_an_exit_in_a_method_is_not_swallowed() -> None:
    with world(2):

        @cg.actor
        class Leaver:
            def leave(self, x):
                if x:
                    raise SystemExit(3)
                return x

        leaver = Leaver.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            return leaver.leave(x)

        graph = step.lower(cg.object).compile()
        future = graph.execute(1)
        with pytest.raises(SystemExit):
            future.result()
        with pytest.raises(cg.RemoteError, match="SystemExit"):
            future.result()
        assert graph.execute(0).result() == 0


class Halt(BaseException):
    """A user's own, for a framework that catches every `Exception`."""


class Cancelled(asyncio.CancelledError, ValueError):
    """An `Exception`, which asyncio takes for the cancellation of whoever waits all the same."""


@pytest.mark.parametrize("shuffle", [None, 3], ids=["in order", "shuffled"])
@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, Halt, Cancelled])
def test_what_is_no_exception_is_an_error_of_its_execution(
    kind: type[BaseException], shuffle: int | None
) -> None:
    with world(2, shuffle):

        @cg.actor
        class Quitter:
            def give_up(self, x):
                if x:
                    raise kind("enough")
                return x

        one, other = Quitter.on(1)(), Quitter.on(0)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x, y):
            return one.give_up(x), other.give_up(y)

        graph = step.lower(cg.object, cg.object).compile()
        for rank, given in ((1, (1, 0)), (0, (0, 1)), (1, (1, 1))):
            failing, fine = graph.execute(*given), graph.execute(0, 0)
            with pytest.raises(cg.RemoteError, match=f"{kind.__name__}.* in .*enough") as caught:
                failing.result()
            assert type(caught.value) is cg.RemoteError
            assert (caught.value.method, type(caught.value.__cause__)) == ("give_up", kind)
            assert given == (1, 1) or caught.value.rank == rank
            assert fine.result() == (0, 0)
        graph.close()
        together = step.lower(cg.object, cg.object).compile()
        for given in ((1, 0), (0, 1)):
            with pytest.raises(cg.RemoteError, match=kind.__name__):
                together(*given)
        assert together(0, 0) == (0, 0)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyError("k"),
        FileNotFoundError(2, "no", "file"),
        UnicodeDecodeError("utf8", b"a", 0, 1, "bad"),
        Boom("it", 3),
        RuntimeError("plain"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_both_classes(error: Exception) -> None:
    poison = Poison(Failure(type(error).__name__, str(error), 2, "op"), error)
    for got in (poison.error(), Poison.from_bytes(poison.to_bytes()).error()):
        assert isinstance(got, type(error))
        assert isinstance(got, RemoteError)
        assert (got.rank, got.failure.message) == (2, str(error))
        again = pickle.loads(pickle.dumps(got))
        assert type(again) is type(got)
        assert str(again) == str(got)
        assert type(error).__name__ in "".join(traceback.format_exception(got))


class Slotted(Exception):
    """Keeps one thing in a slot, and one that cannot be pickled beside it."""

    __slots__ = ("kept", "left")


def _named(kind: str) -> Exception:
    if kind == "attribute":
        return AttributeError("no", name="n", obj=threading.Lock())
    if kind == "slots":
        slotted = Slotted("s")
        slotted.kept, slotted.left = 3, threading.Lock()
        return slotted
    if kind == "lock":
        error = Boom("it", 3)
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        return error
    return {
        "file": FileNotFoundError(2, "no", "file", None, "other"),
        "module": ModuleNotFoundError("no", name="n", path="p"),
        "name": NameError("no", name="n"),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("file", {"errno": 2, "filename": "file", "filename2": "other"}),
        ("module", {"name": "n", "path": "p"}),
        ("name", {"name": "n"}),
        ("attribute", {"name": "n"}),
        ("slots", {"kept": 3}),
        ("lock", {"code": 3}),
    ],
)
def test_what_an_exception_keeps_beside_its_arguments(kind: str, fields: dict[str, Any]) -> None:
    error = _named(kind)
    poison = Poison(Failure(type(error).__name__, str(error), 2, "op"), error)
    for got in (poison.error(), Poison.from_bytes(poison.to_bytes()).error()):
        assert isinstance(got, type(error))
        assert {name: getattr(got, name) for name in fields} == fields


@pytest.mark.parametrize("error", [StopIteration(1), ExceptionGroup("g", [ValueError()])], ids=str)
def test_an_error_that_no_class_can_join(error: Exception) -> None:
    got = Poison(Failure(type(error).__name__, str(error), 1, "op"), error).error()
    assert type(got) is RemoteError
    assert got.__cause__ is error


def test_an_exception_that_cannot_be_pickled_keeps_its_text() -> None:
    class Local(Exception):
        pass

    poison = Poison(Failure("Local", "text", 1, "op"), Local("text"))
    got = Poison.from_bytes(poison.to_bytes()).error()
    assert type(got) is RemoteError
    assert "Local on rank 1 in op: text" in str(got)


@settings(max_examples=scaled(80))
@given(st.data())
def test_random_failures_hit_only_their_own_execution(data: st.DataObject) -> None:
    """Every execution fails or not as plain Python would; effects are those that it would have."""
    with world(4, shuffle=data.draw(st.integers(0, 10**6))):
        workers = [Worker.on(rank)(f"w{rank}") for rank in (1, 2, 3)]

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def chain(x, w):
            for worker in workers:
                x = worker.fail_on(x, w)
            return x

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def fan(x, w):
            return [worker.fail_on(x, w) for worker in workers]

        capacity = data.draw(st.integers(1, 5))
        graphs = [
            s.lower(cg.object, cg.object).compile(max_inflight=capacity) for s in (chain, fan)
        ]
        logs: list[list[Any]] = [[], [], []]
        waiting = []
        for number in range(data.draw(st.integers(1, 15))):
            which, fails = data.draw(st.integers(0, 1)), data.draw(st.booleans())
            for i, log in enumerate(logs):
                if which == 1 or i == 0 or not fails:
                    log.append(number)
            future = graphs[which].execute(number, [number] if fails else [])
            waiting.append((future, [number] * 3 if which else number, fails))
            if data.draw(st.booleans()):
                _check(*waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
            if data.draw(st.booleans()) and waiting:
                waiting.pop()  # dropped
        for entry in waiting:
            _check(*entry)
        for graph in graphs:
            graph.close()
        assert [worker.local.log for worker in workers] == logs


def _check(future: cg.Future, expected: Any, fails: bool) -> None:
    if fails:
        with pytest.raises(Boom):
            future.result()
    else:
        assert future.result() == expected
