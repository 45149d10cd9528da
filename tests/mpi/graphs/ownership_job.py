"""Actors that keep, change and hand out values, and methods that do what they should not.

    mpiexec -n 2 python tests/mpi/graphs/ownership_job.py [NODES]

NODES gives for each rank the machine that it pretends to be on, as in `01`. Rank 0 says what has
passed; all ranks end by 0 if everything has.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from driving import graph_of, on_machines, raises  # in the folder above

torch.set_num_threads(1)
SECONDS = 60
COUNT = 16


class Mute(Exception):
    """Its text relies on what is not there."""

    def __str__(self) -> str:
        return str(self.args[7])


@cg.actor
class Model(torch.nn.Module):
    """Computes with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    @cg.opaque
    def predict(self, x: list[float]) -> dict[str, torch.Tensor]:
        return {"y": (self.weight * torch.tensor(x)).sum(0, keepdim=True)}


@cg.actor
class Source:
    """Returns the same memory each time, filled again."""

    def __init__(self, size: int = 4) -> None:
        self.calls = 0
        self.array = np.zeros(size)
        self.tensor = torch.zeros(4)

    @cg.opaque
    def fill(self) -> np.ndarray:
        self.calls += 1
        self.array[:] = self.calls
        return self.array

    @cg.opaque(fake=lambda self: torch.empty(4))
    def fill_tensor(self) -> torch.Tensor:
        self.calls += 1
        return self.tensor.fill_(self.calls)

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def pass_on(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @cg.opaque
    def first(self, x: Any, after: Any = None) -> float:
        time.sleep(0.001)
        return float(x[0])

    @cg.opaque
    def ask(self, x: Any) -> Any:
        return inner.execute(x).result(timeout=SECONDS)

    @cg.opaque
    def use(self, x: Any) -> Any:
        self.calls += 1
        return x

    @cg.opaque
    def count(self) -> int:
        return self.calls

    @cg.opaque
    def leave(self, x: Any) -> Any:
        if x == "leave":
            raise SystemExit(3)
        return x

    @cg.opaque
    def fail(self, x: Any) -> Any:
        raise Mute(x)


inner: Any = None


def reading(source: Any, reader: Any, method: str) -> Any:
    def step(nothing):
        return [reader.first(getattr(source, method)()) for _ in range(COUNT)]

    return step


def memory_that_is_filled_again(drives: bool) -> None:
    """Whoever gets it gets what it was, however far ahead its maker is."""
    for size, method in ((4, "fill"), (300_000, "fill"), (4, "fill_tensor")):
        for here, there in ((1, 0), (0, 1), (0, 0)):
            source, reader = Source.on(here)(size), Source.on(there)()
            with graph_of(reading(source, reader, method), max_inflight=2) as graph:
                if drives:
                    futures = [graph.execute(None) for _ in range(2)]
                    found = [each for future in futures for each in future.result(SECONDS)]
                    assert found == list(range(1, 2 * COUNT + 1)), (size, method, here, there)


def memory_that_waits_for_something_else(drives: bool) -> None:
    """It is used once another rank has answered; the next execution has begun by then."""
    source, far, near = Source.on(0)(), Source.on(1)(), Source.on(0)()

    def step(x):
        made = source.fill()
        return near.first(made, after=far.first(x)), made

    with graph_of(step, max_inflight=4) as graph:
        if drives:
            futures = [graph.execute([0]) for _ in range(4)]
            found = [future.result(SECONDS) for future in futures]
            assert [each[0] for each in found] == [1, 2, 3, 4]
            assert [each[1].tolist() for each in found] == [[i] * 4 for i in (1, 2, 3, 4)]


def results_are_the_callers_own(drives: bool) -> None:
    """Also those of actors on its own rank, and what a carry holds there."""
    source, kept = Source.on(0)(), cg.carry([0], on=0)

    def step(x):
        return source.fill(), source.fill_tensor(), kept.get(), source.pass_on(x)

    x = torch.ones(4)
    with graph_of(step, x, max_inflight=2) as graph:
        if drives:
            results = [graph.execute(x).result(SECONDS) for _ in range(3)]
            for i, (array, tensor, held, passed) in enumerate(results):
                assert (array == 2 * i + 1).all()
                assert (tensor == 2 * i + 2).all()
                assert held == [0]
                held.append(1)
                passed.zero_()
            assert x.sum() == 4


def results_with_a_history(drives: bool) -> None:
    """Outputs of a model come as from any rank: without the graph that leads to them."""
    for rank in (0, 1):
        model = Model.on(rank)()
        with graph_of(lambda x, model=model: model.predict(x)) as graph:
            if drives:
                found = graph.execute([1.0, 2.0]).result(SECONDS)["y"]
                assert found.is_leaf
                assert found.tolist() == [3.0]


def what_a_carry_is_set_to(drives: bool) -> None:
    """It keeps what it was given, whatever becomes of the caller's own."""
    for rank in (0, 1):
        kept = cg.carry([0], on=rank)

        def step(x, kept=kept):
            before = kept.get()
            kept.set(x)
            return before

        with graph_of(step) as graph:
            if drives:
                x = [5]
                assert graph.execute(x).result(SECONDS) == [0]
                x.append(6)
                assert graph.execute([7]).result(SECONDS) == [5]


def methods_that_ask_for_results(drives: bool) -> None:
    """Executions of the driver's rank go on when the method has returned, and not before."""
    global inner
    far, here, there = Source.on(1)(), Source.on(0)(), Source.on(0)()

    def nested(x):
        return there.use(here.ask(x))

    inner = graph_of(lambda x: far.use(x))
    with graph_of(nested) as outer, graph_of(lambda nothing: there.count()) as counts:
        if drives:
            with raises(RuntimeError, "starts an execution, or asks for one's result"):
                outer.execute(1).result(SECONDS)
            assert counts.execute(None).result(SECONDS) == 0, "what comes behind it was called"
            assert inner.execute(2).result(SECONDS) == 2
    inner.close()


def methods_that_leave(drives: bool) -> None:
    """Of two executions that end in one turn the younger leaves the driver's call by SystemExit."""
    far, here = Source.on(1)(), Source.on(0)()

    def step(x):
        return here.leave(far.use(x))

    with graph_of(step, max_inflight=4) as graph:
        if drives:
            graph.execute("x").result(SECONDS)
            one = graph.execute("one")
            with raises(SystemExit, "3"):  # of whichever call it is that moves the younger one on
                other = graph.execute("leave")
                time.sleep(0.1)  # both answers are there
                one.result(SECONDS)
                other.result(SECONDS)
            assert one.result(SECONDS) == "one"
            assert graph.execute("new").result(SECONDS) == "new"


def culprit_of(culprit: Any) -> Any:
    def step(x):
        return culprit.fail(x)

    return step


def errors_without_a_text(drives: bool) -> None:
    """An exception whose `__str__` raises is an error as any other."""
    for rank in (0, 1):
        culprit = Source.on(rank)()
        with graph_of(culprit_of(culprit)) as graph:
            if drives:
                with raises(cg.RemoteError, "its __str__ has failed"):
                    graph.execute(1).result(SECONDS)


def tensors_of_torchs_own_kinds(drives: bool) -> None:
    """Tensors that are more than bytes in a shape travel as torch pickles them."""
    far = Source.on(1)()
    with graph_of(lambda x: far.use(x)) as graph:
        if drives:
            quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8)
            found = graph.execute([quantized]).result(SECONDS)[0]
            assert found.is_quantized
            assert found.q_scale() == 0.5
            assert torch.equal(found.dequantize(), torch.ones(3))


def a_carry_keeps_its_type(drives: bool) -> None:
    """A value that would be broadcast or converted is an error."""
    held, far = cg.carry(torch.zeros(3, dtype=torch.int64), on=1), Source.on(1)()

    def step(x):
        held.set(far.use(x))
        return held.get()

    with graph_of(step) as graph:
        if drives:
            with raises(ValueError, "cg.carry holds torch.int64 of shape"):
                graph.execute(torch.ones(1)).result(SECONDS)
            right = torch.arange(3)
            assert torch.equal(graph.execute(right).result(SECONDS), right)


BEHAVIOURS = (
    memory_that_is_filled_again,
    memory_that_waits_for_something_else,
    results_are_the_callers_own,
    results_with_a_history,
    what_a_carry_is_set_to,
    methods_that_ask_for_results,
    methods_that_leave,
    errors_without_a_text,
    tensors_of_torchs_own_kinds,
    a_carry_keeps_its_type,
)


def main() -> None:
    with on_machines(*sys.argv[1:2]):
        for behaviour in BEHAVIOURS:
            behaviour(cg.rank() == 0)
            cg.barrier()
            if cg.rank() == 0:
                print(f"passed {behaviour.__name__}", flush=True)


if __name__ == "__main__":
    main()
