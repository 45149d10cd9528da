"""Graphs driven from rank 0 whose tensors go from device to device.

    mpiexec -n 3 python -m tests.mpi.device_job tests.mpi.driven_job

Each check ends with a graph that still gives what it should. Rank 0 says what has passed.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import cg

torch.set_num_threads(1)
WIDTH = 8


class Boom(Exception):
    """A user's exception, whose constructor does not take its `args`."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(what)
        self.code = code


def worked(x: torch.Tensor) -> torch.Tensor:
    """Enough operators for a graph; keeps the sign."""
    for i in range(6):
        x = torch.tanh(x * 0.5) * (2 + i)
    return x


@cg.actor
class Part(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.rank

    def work(self, x: torch.Tensor) -> torch.Tensor:
        return worked(x)

    def shift(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return x + at.sum()

    def plus(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.total

    def join(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x + 10 * y + 100 * z

    def look(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(at, x.view(4, -1)).reshape(-1) * 2

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total.clone()

    def seen(self) -> torch.Tensor:
        """The state itself."""
        return self.total

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def check(self, x: torch.Tensor) -> torch.Tensor:
        if x[0].item() < 0:
            raise Boom(f"negative on {self.rank}", self.rank)
        return x + 1

    @cg.opaque(fake=lambda self, x, name: torch.empty_like(x))
    def named(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x + float(name.partition(": ")[2])

    @cg.opaque
    def label(self, x: torch.Tensor) -> str:
        return f"{self.rank}: {x[0].item():g}"

    @cg.opaque(fake=lambda self, x, what: torch.empty_like(x))
    def linger(self, x: torch.Tensor, what: float | str) -> torch.Tensor:
        """Wait so many seconds, or until a file of that name appears."""
        if isinstance(what, str):
            until = time.monotonic() + 60
            while not Path(what).exists():
                assert time.monotonic() < until, f"nobody has made {what}"
                time.sleep(0.001)
        else:
            time.sleep(what)
        return x


def x_of(value: float) -> torch.Tensor:
    return torch.full((WIDTH,), float(value))


def parts() -> list[Any]:
    return [Part.on(rank)(rank) for rank in range(cg.world_size())]


def driven(step: Callable[..., Any], *example: Any, **options: Any) -> Any:
    lowered = cg.trace(inputs=cg.on(0), outputs=cg.on(0))(step).lower(*example)
    return lowered.compile(**options)


def first(result: torch.Tensor) -> float:
    value = result[0].item()
    assert torch.equal(result.cpu(), x_of(value)), result
    return float(value)


def values() -> None:
    """In order and out of order, as many in flight as there may be, kept and dropped."""
    stages = parts()

    def chain(x: torch.Tensor) -> torch.Tensor:
        for stage in [*stages, stages[0]]:
            x = stage.forward(x)
        return x

    def right(value: float) -> float:
        for rank in [*range(cg.world_size()), 0]:
            value = value * 2 + rank
        return value

    for capacity in (1, 3):
        with driven(chain, x_of(0), max_inflight=capacity) as graph:
            if cg.rank() == 0:
                vias = {channel.via for channel in graph.module.channels.values()}
                assert vias == {sys.argv[1] if len(sys.argv) > 1 else "fake"}, vias
                kept = [graph.execute(x_of(i)).result() for i in range(6)]
                futures = [graph.execute(x_of(i)) for i in range(20)]
                random.Random(capacity).shuffle(futures)
                for future in futures[:10]:
                    assert first(future.result(timeout=30)) == right(future.execution - 6)
                del futures, future
                gc.collect()
                assert first(graph.execute(x_of(50)).result()) == right(50)
                assert [first(each) for each in kept] == [right(i) for i in range(6)]


def state() -> None:
    """Executions change an actor in the order in which they were started."""
    stages = parts()
    last = cg.carry(torch.zeros(WIDTH), on=0)

    def step(x: torch.Tensor) -> Any:
        x = stages[1].add(stages[0].forward(x))
        before = last.get()
        last.set(x)
        return x, before, stages[-1].label(x)

    with driven(step, x_of(0), max_inflight=4) as graph:
        if cg.rank() == 0:
            futures = [graph.execute(x_of(i)) for i in range(12)]
            total = previous = 0.0
            for i, future in enumerate(futures):
                total += 2 * i
                x, before, name = future.result()
                assert (first(x), first(before)) == (total, previous)
                assert name == f"{cg.world_size() - 1}: {total:g}"
                previous = total


def errors() -> None:
    """A method raises on each rank in turn, among executions that go on as if nothing had been."""
    stages = parts()
    for culprit in range(cg.world_size()):

        def step(x: torch.Tensor, culprit: int = culprit) -> Any:
            for stage in stages:
                x = stage.check(x) if stage is stages[culprit] else stage.forward(x)
                x = stage.forward(x)
            return stages[0].forward(x), stages[1].label(x)

        with driven(step, x_of(0), max_inflight=3) as graph:
            if cg.rank():
                continue
            right = first(graph.execute(x_of(1)).result()[0])
            given = (1, -9, 1, 1, -9, -9, 1)
            futures = [graph.execute(x_of(value * 4)) for value in given]
            for value, future in zip(given, futures, strict=True):
                if value < 0:
                    try:
                        future.result(timeout=30)
                    except Boom as error:
                        assert isinstance(error, cg.RemoteError)
                        assert (error.rank, error.code, error.method) == (culprit, culprit, "check")
                    else:
                        raise AssertionError("the error is lost")
                else:
                    future.result(timeout=30)
            assert first(graph.execute(x_of(1)).result()[0]) == right


def graphs() -> None:
    """Computations between messages are replayed, and end well after a failure."""
    stages = parts()

    def step(x: torch.Tensor) -> Any:
        long = [stage.work(x) for stage in stages]
        x = stages[1].check(stages[1].work(long[1]))
        return stages[0].work(x), stages[0].add(stages[0].work(long[0])), *long

    def right(x: torch.Tensor) -> list[torch.Tensor]:
        once = worked(x)
        twice = worked(once)
        return [worked(twice + 1), twice, *[once] * len(stages)]

    with driven(step, x_of(0), max_inflight=2) as graph:
        if cg.rank():
            graph.serve()
        else:
            total, kept = torch.zeros(WIDTH), []
            for i in range(8):
                futures = [graph.execute(x_of(value)) for value in (i, -100, i + 0.5)]
                for value, future in zip((i, -100, i + 0.5), futures, strict=True):
                    expected = right(x_of(value))
                    total = total + expected[1]  # also where another method fails
                    if value < 0:
                        assert isinstance(future.exception(timeout=30), Boom)
                        continue
                    expected[1] = total
                    kept.append((future.result(timeout=30), expected))
            for found, expected in kept:
                here = [each.cpu() for each in found]
                assert all(map(torch.allclose, here, expected)), (here, expected)
            assert len(kept) == 16
        contexts = graph._open_graph.graph.contexts[cg.rank()]
        segments = [
            s for context in contexts for each in context.instances for s in each._graphs.segments
        ]
        assert all(each.reason is None for each in segments), [each.reason for each in segments]
        replays = sum(each.replays for each in segments)
        assert replays > 4, f"{replays} replays of {len(segments)} graphs"


def within() -> None:
    """A traced line raises in the middle of what is to become a graph: what is ahead of it has run
    once, what depends on it has not, whether there are graphs or not.

    A GPU does not raise there: it finds the index out later, and gives up for good.
    """
    table = torch.zeros(4, dtype=torch.long)

    def play(passes: str) -> list[list[float]]:
        stages, other = parts(), Part.on(1)(1)

        def step(x: torch.Tensor, at: torch.Tensor) -> Any:
            first = stages[1].shift(x, at)  # which asks for both inputs, ahead of all that follows
            before, aside = stages[1].add(x), other.add(x)
            found = stages[1].look(stages[1].work(x), at)
            # The opaque method needs its host, so messages are announced, and errors travel.
            last = stages[0].check(stages[0].forward(found))
            return last, stages[1].join(first, before, aside)

        seen: list[list[float]] = []
        with driven(step, x_of(0), table, max_inflight=1, passes=passes) as graph:
            if cg.rank() == 0:
                for i in range(6):
                    future = graph.execute(x_of(i), table + (9 if i == 1 else i % 4))
                    if future.exception(timeout=30) is None:
                        seen.append([float(each[0]) for each in future.result()])
                    else:
                        assert isinstance(future.exception(), IndexError), future.exception()
        return seen

    captured, plain = play(""), play("-capture")
    assert captured == plain, (captured, plain)
    assert len(captured) == (5 if cg.rank() == 0 else 0)


def collectives() -> None:
    """All ranks reduce; where one cannot, none does."""
    stages = parts()

    def step(x: torch.Tensor) -> Any:
        return cg.all_reduce([stages[0].forward(x), stages[1].check(x)], op="sum")[0]

    with driven(step, x_of(0), max_inflight=2) as graph:
        if cg.rank() == 0:
            futures = [graph.execute(x_of(value)) for value in (1, -1, 2, -2, 3)]
            for value, future in zip((1, -1, 2, -2, 3), futures, strict=True):
                if value > 0:
                    assert first(future.result(timeout=30)) == 3 * value + 1
                else:
                    assert isinstance(future.exception(timeout=30), Boom)


def timeouts() -> None:
    """A late result can be asked for again; a graph that is closed ends what is in flight."""
    stages = parts()

    def step(x: torch.Tensor, what: float | str) -> torch.Tensor:
        return stages[0].forward(stages[1].linger(stages[0].forward(x), what))

    with (
        driven(step, x_of(0), cg.object, max_inflight=2) as graph,
        tempfile.TemporaryDirectory() as folder,
    ):
        if cg.rank() == 0:
            sign = Path(folder, "sign")
            future = graph.execute(x_of(1), str(sign))
            try:
                future.result(timeout=0.05)
            except cg.StepTimeout as error:
                assert "linger" in str(error) or "wait" in str(error), error
            else:
                raise AssertionError("it was not late")
            sign.touch()
            assert first(future.result()) == 4.0
            late = [graph.execute(x_of(i), 0.1) for i in range(2)]
    if cg.rank() == 0:
        assert [first(each.result()) for each in late] == [0.0, 4.0]


def variants() -> None:
    """Two signatures of one graph, in turn; and two graphs with the same actors."""
    stages = parts()

    def step(x: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(stages[1].forward(x))

    lowered = cg.trace(inputs=cg.on(0), outputs=cg.on(0))(step).lower_many(
        [torch.zeros(WIDTH), torch.zeros(3 * WIDTH)]
    )
    other = driven(step, x_of(0), max_inflight=2)
    with lowered.compile(max_inflight=2) as graph:
        if cg.rank() == 0:
            futures = []
            for i in range(12):
                if i % 3 == 2:
                    futures.append(other.execute(x_of(i)))
                else:
                    futures.append(graph.execute(torch.full((WIDTH * (1 + i % 2 * 2),), float(i))))
            for i, future in enumerate(futures):
                assert set(future.result().tolist()) == {4.0 * i + 2}
    other.close()


def awaits() -> None:
    """Results in asyncio."""
    stages = parts()

    def step(x: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(stages[-1].forward(x))

    async def ask(graph: Any) -> list[float]:
        futures = [graph.execute(x_of(i)) for i in range(4)]
        return [first(await future) for future in futures]

    with driven(step, x_of(0), max_inflight=4) as graph:
        if cg.rank() == 0:
            last = cg.world_size() - 1
            assert asyncio.run(ask(graph)) == [4.0 * i + 2 * last for i in range(4)]


def mixed() -> None:
    """Steps that all ranks run, between executions."""
    stages = parts()

    def step(x: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(stages[1].forward(x))

    whole = cg.trace(step).lower(x_of(0)).compile()
    graph = driven(step, x_of(0), max_inflight=2)
    for i in range(4):
        assert first(whole(x_of(i))) == 4.0 * i + 2
        assert (found := graph(x_of(i))) is None or first(found) == 4.0 * i + 2
    with graph:
        if cg.rank() == 0:
            assert [first(graph.execute(x_of(i)).result()) for i in range(3)] == [2.0, 6.0, 10.0]
    assert first(whole(x_of(5))) == 22.0


def after() -> None:
    """A step fails on all ranks, which breaks messages off; the graph goes on all the same.

    What was put on devices before comes to its end: an earlier step, and an execution of the graph.
    """
    stages = parts()
    device = stages[cg.rank()].local.total.device

    @cg.trace(outputs=cg.on(1))
    def checked(x: torch.Tensor) -> torch.Tensor:
        return stages[1].check(stages[0].forward(x))

    def step(x: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(stages[1].forward(x))

    whole = checked.lower(x_of(0)).compile()
    earlier = cg.trace(step).lower(x_of(0)).compile()
    graph = driven(step, x_of(0), max_inflight=2)
    whole(x_of(1))
    for run in (earlier, graph):
        result = run(slowly(x_of(1), device))
        try:
            whole(torch.zeros(1))
        except cg.InputError:
            pass
        else:
            raise AssertionError("the shape is another")
        assert result is None or first(result) == 6.0
    try:
        whole(x_of(-1))
    except cg.RemoteError as error:
        assert error.rank == 1, error
    else:
        raise AssertionError("the error is lost")
    with graph:
        if cg.rank() == 0:
            assert [first(graph.execute(x_of(i)).result()) for i in range(3)] == [2.0, 6.0, 10.0]


def slowly(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on a device, which has much to do before it is there."""
    side = 4096 if device.type == "cuda" else 8
    ones = made = torch.ones(side, side, device=device)
    for _ in range(20):
        made = made @ ones / side
    return made[0, : len(x)] * x.to(device)


def late() -> None:
    """Inputs that are on the device but not made yet, or come there behind other work."""
    stages = parts()

    def step(x: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(stages[1].check(x))

    with driven(step, x_of(0), max_inflight=3) as graph:
        if cg.rank() == 0:
            for i in range(8):
                made = slowly(x_of(i), stages[0].local.total.device)
                futures = [graph.execute(x) for x in (x_of(i), made)]
                assert [first(each.result()) for each in futures] == [2.0 * (i + 1)] * 2, i


def exits() -> None:
    """The interpreter ends with executions in flight and the graph open."""
    stages = parts()

    def step(x: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(stages[1].forward(x))

    graph = driven(step, x_of(0), max_inflight=3)
    if cg.rank() == 0:
        for i in range(3):
            graph.execute(x_of(i))
    else:
        graph.serve()


CHECKS = (
    values,
    state,
    errors,
    graphs,
    within,
    collectives,
    timeouts,
    variants,
    awaits,
    mixed,
    after,
    late,
)


def play(checks: Sequence[Callable[[], None]]) -> None:
    """Make some checks; rank 0 says what has passed."""
    for check in checks:
        check()
        cg.barrier()
        if cg.rank() == 0:
            print(f"passed {check.__name__}", flush=True)


def main() -> None:
    play([check for check in CHECKS if check is not within or "nccl" not in sys.argv])
    exits()


if __name__ == "__main__":
    main()
