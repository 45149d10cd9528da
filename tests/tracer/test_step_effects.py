"""Changes by a step's own Python would happen once: they are refused by line, and put back."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cg.tracer.errors import TraceError
from cg.tracer.record.intrinsics.microbatches import microbatches

from .step_tools import Bench, calls, line_of, refusal

X = torch.ones(4, 4)
SEEN: list[Any] = []
COUNT = 0
TABLE: dict[int, Any] = {}


class Meter:
    total = 0

    def __init__(self) -> None:
        self.steps = 0
        self.history: list[int] = []

    def update(self) -> None:
        self.steps += 1


METER = Meter()


class Slotted:
    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


@pytest.fixture
def bench() -> Bench:
    return Bench(2)


def helper() -> None:
    SEEN.append(1)


def defaulted(x: Any, seen: list[int] = []) -> Any:  # noqa: B006 - that is what is tested
    seen.append(1)
    return x


def test_effects_outside_of_the_step(bench: Bench) -> None:
    count, seen, note, slotted = 0, [0], SimpleNamespace(last=None), Slotted()

    def nonlocal_count(x: Any) -> Any:
        nonlocal count
        count += 1
        return x

    def global_count(x: Any) -> Any:
        global COUNT
        COUNT += 1
        return x

    def appends(x: Any) -> Any:
        seen.append(1)
        return x

    def pops(x: Any) -> Any:
        return x * seen.pop()

    def by_helper(x: Any) -> Any:
        helper()
        return x

    def by_method(x: Any) -> Any:
        METER.update()
        return x

    def on_a_class(x: Any) -> Any:
        Meter.total += 1
        return x

    def in_an_attribute(x: Any) -> Any:
        METER.history.append(1)
        return x

    def in_a_slot(x: Any) -> Any:
        slotted.steps += 1
        return x

    def in_a_namespace(x: Any) -> Any:
        note.last = object()
        return x

    for step, path, line in (
        (nonlocal_count, "count", "count += 1"),
        (global_count, "COUNT", "COUNT += 1"),
        (appends, "seen", "seen.append(1)"),
        (pops, "seen", "return x * seen.pop()"),
        (by_helper, "SEEN", "SEEN.append(1)"),
        (by_method, "METER.steps", "self.steps += 1"),
        (on_a_class, "Meter.total", "Meter.total += 1"),
        (in_an_attribute, "METER.history", "METER.history.append(1)"),
        (in_a_slot, "slotted", "slotted.steps += 1"),
        (in_a_namespace, "note.last", "note.last = object()"),
        (defaulted, "a default of defaulted", "seen.append(1)"),
    ):
        error = refusal(bench, step, X)
        assert error.reason.startswith(f"step step changes '{path}' while it is traced")
        assert line_of(error) == line
        assert "return from the step what is to be kept" in error.remedy
    assert (count, COUNT, seen, SEEN, note.last, slotted.steps) == (0, 0, [0], [], None, 0)
    assert (METER.steps, METER.history, Meter.total) == (0, [], 0)
    assert defaulted.__defaults__ == ([],)


def test_effects_of_a_bound_step(bench: Bench) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.steps = 0
            self.best: dict[str, float] = {}

        def counts(self, x: Any) -> Any:
            self.steps += 1
            return x

        def grows(self, x: Any) -> Any:
            self.best[f"{len(self.best)}"] = 1.0
            return x

        def grows_its_class(self, x: Any) -> Any:
            names = [name for name in vars(Trainer) if name.startswith("best_")]
            setattr(Trainer, f"best_{len(names)}", 1.0)
            return x

    trainer = Trainer()
    assert "'self.steps'" in refusal(bench, trainer.counts, X).reason
    assert "'Trainer.best_1'" in refusal(bench, trainer.grows_its_class, X).reason
    assert not hasattr(Trainer, "best_0")
    assert "'self.best.1'" in refusal(bench, trainer.grows, X).reason
    assert "'self.steps'" in refusal(bench, functools.partial(trainer.counts), X).reason
    assert (trainer.steps, trainer.best) == (0, {})


class Worker(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.seen: list[int] = []
        self.steps = 0
        self.kind: str | None = None

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def test_effects_on_an_actor_behind_its_handle(bench: Bench) -> None:
    worker = bench.actor(Worker).on(1)()
    workers = [worker]

    def counts(x: Any) -> Any:
        worker.local.steps += 1
        return worker.forward(x)

    def appends(x: Any) -> Any:
        workers[0].local.seen.append(1)
        return worker.forward(x)

    def decays(x: Any) -> Any:
        for group in worker.local.optimizer.param_groups:
            group["lr"] *= 0.5
        return worker.forward(x)

    def sets(x: Any, rate: float = 0.05) -> Any:  # the same each time, in each of these traces
        for group in worker.local.optimizer.param_groups:
            group["lr"] = rate
        return worker.forward(x)

    def fills(x: Any) -> Any:
        if worker.local.kind is None:
            worker.local.kind = "regression"
        return worker.forward(x) * len(worker.local.kind)

    for step, path, line in (
        (counts, "worker.local.steps", "worker.local.steps += 1"),
        (appends, "worker.local.seen", "workers[0].local.seen.append(1)"),
        (decays, "worker.local.optimizer.param_groups.0.lr", 'group["lr"] *= 0.5'),
        (sets, "worker.local.optimizer.param_groups.0.lr", 'group["lr"] = rate'),
    ):
        error = refusal(bench, step, X)
        assert error.reason.startswith(f"step step changes '{path}' while it is traced")
        assert line_of(error) == line
        method = "call it in an actor's method" in error.remedy
        assert method == (step in (decays, sets))
    assert (worker.local.steps, worker.local.seen) == (0, [])
    assert worker.local.optimizer.param_groups[0]["lr"] == 0.1
    bench.trace(fills, X)
    assert worker.local.kind == "regression"


def test_values_that_would_stay_behind(bench: Bench) -> None:
    kept, box = [], SimpleNamespace()

    def appends(x: Any) -> Any:
        kept.append(x.sum())
        return x

    def sets(x: Any) -> Any:
        box.loss = x.sum()
        return x

    def remembers(x: Any) -> Any:
        if 4 not in TABLE:
            TABLE[4] = torch.arange(4)
        return x + TABLE[4]

    def fills_slots(x: Any) -> Any:
        slotted.steps = x.sum()
        return x

    slotted = Slotted()
    for step, path, line in (
        (fills_slots, "slotted", "slotted.steps = x.sum()"),
        (appends, "kept", "kept.append(x.sum())"),
        (sets, "box.loss", "box.loss = x.sum()"),
        (remembers, "TABLE.4", "TABLE[4] = torch.arange(4)"),
    ):
        error = refusal(bench, step, X)
        assert f"stores a value of its trace outside of itself, in '{path}'" in error.reason
        assert line_of(error) == line
    assert (kept, TABLE, vars(box)) == ([], {}, {})


def test_what_changes_from_one_time_to_the_next(bench: Bench) -> None:
    numbers, batches = itertools.count(1), iter([1, 2])

    def counter(x: Any) -> Any:
        return x * next(numbers)

    def used_up(x: Any) -> Any:
        return x + sum(batches)

    def clock(x: Any) -> Any:
        return x, time.perf_counter()

    def constant(x: Any) -> Any:
        return x + torch.tensor([next(numbers)])

    def structure(x: Any) -> Any:
        for _ in range(next(numbers) % 2):
            x = x + 1
        return x

    for step, how in (
        (counter, "it comes to another call of torch.mul"),
        (used_up, "it comes to another call of torch.add"),
        (clock, "it returns "),
        (constant, "@constant.tensor has other elements"),
        (structure, ""),
    ):
        error = refusal(bench, step, X)
        assert "is not the same when it is traced a second time" in error.reason
        assert how in error.reason
        assert "pass what changes as an argument" in error.remedy


def test_an_iterator_that_ends(bench: Bench) -> None:
    batches = iter([2.0])
    error = refusal(bench, lambda x: x * next(batches), X)
    assert "is traced twice, and raised StopIteration the second time" in error.reason


def test_generators_that_others_share(bench: Bench) -> None:
    mine, numpys = random.Random(0), np.random.default_rng(0)

    def python(x: Any) -> Any:
        return x if random.random() < 2 else -x

    def numpy(x: Any) -> Any:
        return x * float(np.random.rand())

    def seeds(x: Any) -> Any:
        random.seed(0)
        return x

    def own(x: Any) -> Any:
        return x if mine.random() < 2 else -x

    def numpys_own(x: Any) -> Any:
        return x if numpys.random() < 2 else -x

    before = (random.getstate(), mine.getstate(), numpys.bit_generator.state)
    for step, what, line in (
        (python, "Python's random module", "return x if random.random() < 2 else -x"),
        (numpy, "NumPy's global generator", "return x * float(np.random.rand())"),
        (seeds, "Python's random module", "random.seed(0)"),
    ):
        error = refusal(bench, step, X)
        assert f"step step seeded or drew from {what} while it was traced" in error.reason
        assert line_of(error) == line
    assert "'mine'" in refusal(bench, own, X).reason
    assert "'numpys'" in refusal(bench, numpys_own, X).reason
    assert before == (random.getstate(), mine.getstate(), numpys.bit_generator.state)


def test_what_a_second_time_leaves_as_it_is(bench: Bench) -> None:
    made: dict[str, Any] = {}
    lazy = SimpleNamespace(sizes=None)

    def memo(x: Any) -> Any:
        if "factor" not in made:
            made["factor"] = 3.0
        return x * made["factor"]

    def first_time(x: Any) -> Any:
        if lazy.sizes is None:
            lazy.sizes = [4, 4]
        return x.reshape(lazy.sizes)

    def prints(x: Any) -> Any:
        print("the step is traced")
        return x

    assert calls(bench.trace(memo, X)) == ["torch.mul"]
    assert calls(bench.trace(first_time, X)) == ["torch.reshape"]
    assert calls(bench.trace(prints, X)) == []
    assert (made, lazy.sizes) == ({"factor": 3.0}, [4, 4])


def test_a_cache_of_constants_serves_every_trace(bench: Bench) -> None:
    @functools.lru_cache
    def positions(n: int) -> Any:
        return torch.arange(n)

    def step(x: Any) -> Any:
        return x + positions(4) + positions(4)

    for _ in range(2):
        trace = bench.trace(step, X)
        assert len(trace.constants) == 1


def test_the_second_trace_asks_nobody_and_traces_no_function(bench: Bench) -> None:
    def step(x: Any) -> Any:
        return [part * 2 for part in microbatches(x, 2)]

    bench.trace(step, X)
    assert bench.tracer.traced == ["torch.mul"]


def test_a_step_that_raises_leaves_things_as_eager_python_would(bench: Bench) -> None:
    seen: list[int] = []

    def step(x: Any) -> Any:
        seen.append(1)
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        bench.trace(step, X)
    assert seen == [1]


def test_a_swallowed_refusal_is_raised_all_the_same(bench: Bench) -> None:
    def step(x: Any) -> Any:
        try:
            return x * float(x.sum())
        except Exception:
            return x * 0

    error = refusal(bench, step, X)
    assert error.reason.startswith("float() of a tensor needs elements")
    assert line_of(error) == "return x * float(x.sum())"

    def suppressed(x: Any) -> Any:
        with contextlib.suppress(TraceError):
            x.sum().backward()
        return x

    assert "backward() would differentiate now" in refusal(bench, suppressed, X).reason
