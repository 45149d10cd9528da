"""Graphs driven from rank 0 that nothing can fail in on a host, so that no message is announced.

mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.device_only_job
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

import cg
from cg.backends.devices.programs.instance import DeviceOnlyInstance

from .driven_job import WIDTH, Part, driven, first, parts, play, worked, x_of


def device_only() -> None:
    """A step that nothing can fail in on a host: one graph a rank, and the same values.

    HCCL does messages one after the other, so its hosts announce them.
    """
    is_ordered = "hccl" in sys.argv
    stages = parts()

    def step(x: torch.Tensor) -> Any:
        there = [stage.work(stage.forward(x)) for stage in stages[1:]]
        joined = stages[0].join(stages[0].work(x), there[0], there[-1])
        for each in there[1:-1]:  # with four ranks or more: no rank is without work
            joined = stages[0].join(joined, each, there[-1])
        return joined, there[0]

    def compare(passes: str) -> list[list[torch.Tensor]]:
        kept = []
        with driven(step, x_of(0), max_inflight=3, passes=passes) as graph:
            if cg.rank():
                graph.serve()
            else:
                futures = [graph.execute(x_of(i / 4)) for i in range(24)]
                random.Random(1).shuffle(futures)
                by_number = {each.execution: each.result(timeout=30) for each in futures}
                kept = [[each.cpu() for each in by_number[i]] for i in sorted(by_number)]
            contexts = graph._open_graph.graph.contexts[cg.rank()]
            found = [each for context in contexts for each in context.instances]
            is_whole = not passes and not is_ordered
            assert {isinstance(each, DeviceOnlyInstance) for each in found} == {is_whole}, found
            segments = [s for each in found if is_whole for s in each.segments]
            assert all(each.reason is None for each in segments), [s.reason for s in segments]
            # Each context that was used has run twice as it is.
            for number in {each.number for each in segments}:  # the tail as often as the rest
                replays = sum(each.replays for each in segments if each.number == number)
                assert 24 - 3 * 2 <= replays <= 24 - 2, (number, replays)
            assert bool(segments) == is_whole
        return kept

    whole, announced = compare(""), compare("-capture")
    assert len(whole) == len(announced) == (0 if cg.rank() else 24)
    pairs = zip(whole, announced, strict=True)
    assert all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


def changed() -> None:
    """An actor is no longer what was traced: every execution says so, and harms nobody."""
    stages = parts()

    def step(x: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(stages[1].forward(x))

    def read(x: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(stages[1].plus(x))

    graph, other = (driven(step, x_of(0), max_inflight=2) for _ in range(2))
    reader = driven(read, x_of(0), max_inflight=2)
    with graph:
        if cg.rank() == 0:
            assert first(graph.execute(x_of(1)).result()) == 6.0
    if cg.rank() == 1:
        stages[1].local.rank = 7
        stages[1].local.total = torch.zeros(2 * WIDTH)  # with which the method itself would raise
    cg.barrier()  # a rank that still serves the first graph would serve the other, too
    with other, reader:
        if cg.rank() == 0:
            for graph in (other, reader) * 4:
                error = graph.execute(x_of(1)).exception(timeout=30)
                assert isinstance(error, RuntimeError), error
                assert "compile the step again" in str(error), error
    with driven(step, x_of(0), max_inflight=2) as again:
        if cg.rank() == 0:
            assert first(again.execute(x_of(1)).result()) == 18.0


def state() -> None:
    """Methods that write, and a carry: still one graph a rank, and every write is there once."""
    is_ordered = "hccl" in sys.argv
    totals = []
    for passes in ("", "-capture"):
        stages, carried = parts(), cg.carry(x_of(0), on=0)

        def step(
            x: torch.Tensor, stages: Any = stages, carried: Any = carried
        ) -> tuple[torch.Tensor, torch.Tensor]:
            x = x + carried.get()
            for stage in stages:
                x = stage.add(x)
            carried.set(torch.tanh(x))
            return x, stages[0].plus(x)

        with driven(step, x_of(0), max_inflight=3, passes=passes) as graph:
            if cg.rank():
                graph.serve()
            else:
                futures = [graph.execute(x_of(i / 64)) for i in range(24)]
                totals.append([each.cpu() for future in futures for each in future.result()])
            contexts = graph._open_graph.graph.contexts[cg.rank()]
            found = [each for context in contexts for each in context.instances]
            is_whole = not passes and not is_ordered
            assert {isinstance(each, DeviceOnlyInstance) for each in found} == {is_whole}, found
            segments = [s for each in found if is_whole for s in each.segments]
            assert all(each.reason is None for each in segments), [s.reason for s in segments]
            assert not is_whole or sum(each.replays for each in segments) >= 24 - 3 * 2
        totals.append([stages[cg.rank()].local.total.cpu()])
    whole, announced = totals[: len(totals) // 2], totals[len(totals) // 2 :]
    for kept, again in zip(whole, announced, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def nothing_is_written() -> None:
    """A rank whose actor has changed keeps all ranks from writing, those ahead of it as well.

    Where messages are announced, it keeps those behind it from that.
    """
    stages = parts()

    def step(x: torch.Tensor) -> torch.Tensor:
        for stage in stages:
            x = stage.add(x)
        return stages[0].plus(x)

    graph = driven(step, x_of(0), max_inflight=2)
    mine, last = stages[cg.rank()].local, cg.world_size() - 1
    with graph:
        if cg.rank() == 0:
            for _ in range(5):  # so that devices replay it
                graph.execute(x_of(1)).result()
    before = mine.total.cpu().clone()
    refused = driven(step, x_of(0), max_inflight=2)
    if cg.rank() == last:
        mine.total = torch.zeros(2 * WIDTH)
    cg.barrier()
    with refused:
        if cg.rank() == 0:
            for future in [refused.execute(x_of(1)) for _ in range(6)]:
                error = future.exception(timeout=30)
                assert isinstance(error, RuntimeError), error
                assert "compile the step again" in str(error), error
    found = mine.total.cpu()
    if cg.rank() == last:
        assert torch.equal(found, torch.zeros(2 * WIDTH)), found
    else:
        assert torch.equal(found, before) != ("hccl" in sys.argv), found


def beside() -> None:
    """Executions of a graph whose messages are announced, and whose methods wait for the device."""
    stages = parts()

    def talks(x: torch.Tensor) -> torch.Tensor:
        name = stages[1].label(stages[1].forward(x))
        there = stages[0].named(stages[0].forward(x), name)
        back = stages[1].named(x, stages[0].label(there))
        return stages[0].forward(stages[1].forward(back))

    def step(x: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(stages[1].forward(x))

    announced, whole = (driven(each, x_of(0), max_inflight=3) for each in (talks, step))
    with announced, whole:
        if cg.rank() == 0:
            futures = [(announced if i % 3 else whole).execute(x_of(i % 5)) for i in range(30)]
            for i, future in enumerate(futures):
                x = i % 5
                back = x + (2 * x + 2 * x + 1)
                right = 2 * (2 * back + 1) if i % 3 else 2 * (2 * x + 1)
                assert first(future.result(timeout=30)) == right, i


def tails() -> None:
    """What comes back to rank 0 is awaited beside the next executions, and by whoever needs it.

    Other graphs in flight at the same time work on the actor that the tail writes to: one that is
    whole on devices, with it in front of its messages, and one whose messages are announced.
    """
    is_ordered = "hccl" in sys.argv
    kept: list[list[torch.Tensor]] = []
    for passes, in_flight in (("", 3), ("", 1), ("-split-tails", 3), ("-capture", 3)):
        stages, after = parts(), Part.on(0)(9)

        def step(x: torch.Tensor, stages: Any = stages, after: Any = after) -> Any:
            h = y = stages[0].work(x)
            stages[0].add(h)
            part = stages[0].seen()
            for stage in stages[1:]:
                y = stage.work(stage.forward(y))
            return after.join(h, after.add(y), x), h, after.join(y, x, part)

        def front(x: torch.Tensor, stages: Any = stages, after: Any = after) -> torch.Tensor:
            return stages[1].forward(stages[1].work(after.plus(x)))

        def told(x: torch.Tensor, stages: Any = stages, after: Any = after) -> torch.Tensor:
            return stages[1].linger(after.plus(x), 0.0)

        graphs = [
            driven(each, x_of(0), max_inflight=in_flight, passes=passes)
            for each in (step, front, told)
        ]
        has_tails = not passes and in_flight > 1 and not is_ordered and cg.rank() == 0
        results = []
        contexts = graphs[0]._open_graph.graph.contexts[cg.rank()]
        with graphs[0], graphs[1], graphs[2]:
            if cg.rank() == 0:
                for i in range(30):
                    x = torch.full_like(after.local.total, i / 64)  # on the device
                    futures = [graphs[0].execute(x)]
                    if in_flight > 1:
                        futures += [graphs[0].execute(x), graphs[0].execute(x)]
                    if i % 3:
                        futures += [graphs[i % 3].execute(x)]
                    assert [each.exception(timeout=30) for each in futures] == [None] * len(futures)
                    x.fill_(float("nan"))
                    for future in futures:
                        result = future.result()
                        found = result if isinstance(result, tuple | list) else (result,)
                        results += [each.clone() for each in found]
        segments = [s for c in contexts for each in c.instances for s in _segments(each)]
        assert {each.number for each in segments} == (
            {0, 1} if has_tails else set() if passes == "-capture" or is_ordered else {0}
        ), passes
        assert all(each.reason is None for each in segments), [s.reason for s in segments]
        # A context runs twice as it is, and on a quick device the last ones may hardly be needed.
        executions = 30 * (3 if in_flight > 1 else 1)
        for number in {each.number for each in segments}:
            replays = sum(each.replays for each in segments if each.number == number)
            assert executions - 2 * in_flight <= replays <= executions - 2, (number, replays)
        if in_flight > 1:
            last = after.local.total if cg.rank() == 0 else stages[cg.rank()].local.total
            kept.append([*(each.cpu() for each in results), last.cpu()])
    tailed, whole, announced = kept
    for found in (tailed, whole):
        assert all(torch.equal(a, b) for a, b in zip(found, announced, strict=True))


def tail_of_another() -> None:
    """A rank that serves reads what its tails have written, as soon as it serves no more."""
    stages, turns = parts(), 9

    def step(x: torch.Tensor) -> torch.Tensor:
        y = stages[0].work(stages[1].work(x))
        stages[1].add(y)
        return y

    with driven(step, x_of(0), max_inflight=2) as graph:
        if cg.rank() == 0:
            for future in [graph.execute(x_of(1)) for _ in range(turns)]:
                future.result(timeout=30)
        elif cg.rank() == 1:
            graph.serve()
            found = stages[1].local.total.clone()
            contexts = graph._open_graph.graph.contexts[1]
            segments = [s for c in contexts for each in c.instances for s in _segments(each)]
            assert {each.number for each in segments} == (set() if "hccl" in sys.argv else {0, 1})
            right = torch.zeros_like(found)
            for _ in range(turns):
                right += worked(worked(torch.ones_like(found)))
            assert torch.equal(found, right), (found, right)


def _segments(instance: Any) -> tuple[Any, ...]:
    return tuple(instance.segments) if isinstance(instance, DeviceOnlyInstance) else ()


CHECKS = (device_only, changed, state, nothing_is_written, beside, tails, tail_of_another)


def main() -> None:
    """Make the checks that are named on the command line, or all."""
    play([check for check in CHECKS if check.__name__ in sys.argv] or CHECKS)


if __name__ == "__main__":
    main()
