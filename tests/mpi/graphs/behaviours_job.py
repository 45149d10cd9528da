"""Behaviours of graphs, one a function, as a user would write it.

    mpiexec -n 4 python tests/mpi/graphs/behaviours_job.py [NODES]

NODES gives for each rank the machine that it pretends to be on, as in `0011`. Rank 0 says what has
passed; all ranks end by 0 if everything has, although the last behaviour leaves its graph open.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cg
from cg.launch.world.world import world

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from driving import graph_of, on_machines, raises  # in the folder above
from failing import (
    an_error_passes_through_a_chain,
    another_shape_than_declared_is_an_error,
    what_is_no_exception_is_an_error_of_its_execution,
)
from players import SECONDS, Net, Player, players

torch.set_num_threads(1)
MIB = 1 << 20


# -- values and arguments --------------------------------------------------------------------------


def tuples_are_unpacked(drives: bool) -> None:
    """To a reader of one part, to two readers, to the driver; a wrong number is an error."""
    source, left, right = players()

    def step(x):
        head, tail = source.split(x)
        return left.pack(head), right.pack(tail), left.pack(tail), head

    with graph_of(step, max_inflight=2) as graph:
        if drives:
            got = graph.execute([1, 2, 3]).result(SECONDS)
            assert got == (([1], {}), ([[2, 3]], {}), ([[2, 3]], {}), 1)
            with raises(TypeError, "tuple of 1"):
                graph.execute([1]).result(SECONDS)
            assert graph.execute([4, 5]).result(SECONDS)[3] == 4


def values_go_into_containers_and_keywords(drives: bool) -> None:
    one, other, _ = players()

    def step(x, *, y):
        a, b = one.echo(x), other.echo(y)
        return other.pack({"a": a, "both": [a, (b, 3)]}, b, named=a, fixed="k")

    with graph_of_keywords(step) as graph:
        if drives:
            got = graph.execute("p", y="q").result(SECONDS)
            first = {"a": "p", "both": ["p", ("q", 3)]}
            assert got == ([first, "q"], {"named": "p", "fixed": "k"})
            for args, named in (((), {"y": 1}), ((1, 2), {"y": 1}), ((1,), {}), ((1,), {"z": 1})):
                with raises(cg.InputError):
                    graph.execute(*args, **named)
            assert graph.execute(1, y=2).result(SECONDS)[1]["named"] == 1


def graph_of_keywords(step: Any) -> Any:
    traced = cg.trace(inputs=cg.on(0), outputs=cg.on(0))(step)
    return traced.lower(cg.object, y=cg.object).compile(max_inflight=2)


def no_arguments_at_all(drives: bool) -> None:
    one, *_ = players()

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step():
        return one.note("called")

    with step.lower().compile(max_inflight=2) as graph:
        if drives:
            assert [graph.execute().result(SECONDS) for _ in range(3)] == [1, 2, 3]


def a_value_has_readers_everywhere(drives: bool) -> None:
    """On the actor that made it, beside it, on the driver's rank, elsewhere, and the driver."""
    maker, away, _ = players()
    beside, here = Player.on(1)(), Player.on(0)()

    def step(x):
        y = maker.echo(x)
        again = maker.pack(y, y, x)
        return again, beside.echo(y), here.pack(y, x), away.pack(y, y), away.echo(y), y

    with graph_of(step, max_inflight=3) as graph:
        if drives:
            for future, x in [(graph.execute(x), x) for x in range(10)]:
                pair, three = ([x, x], {}), ([x, x, x], {})
                assert future.result(SECONDS) == (three, x, pair, pair, x, x)


def shapes_may_differ_in_objects(drives: bool) -> None:
    """A dict of tensors and arrays of any size, up to tens of MiB."""
    one, other, _ = players()

    def step(x):
        return other.echo(one.echo(x))

    with graph_of(step, max_inflight=2) as graph:
        if drives:
            for size in (0, 1, 5000, MIB, 3, 10 * MIB, 100):
                given = {"t": torch.full((size,), 2.0), "deep": [np.arange(size), {"n": size}]}
                got = graph.execute(given).result(SECONDS)
                assert torch.equal(got["t"], given["t"])
                assert np.array_equal(got["deep"][0], given["deep"][0])
                assert got["deep"][1] == {"n": size}


def what_is_kept_is_nobody_elses(drives: bool) -> None:
    """Arrays that were received can be written to; nobody sees it, and nothing overwrites them."""
    one, other, last = players()

    def step(x):
        y = one.echo(x)
        return one.keep(y), other.keep(y), last.keep(x), y

    def sums(nothing):
        return one.kept_sums(nothing), other.kept_sums(nothing), last.kept_sums(nothing)

    with graph_of(step, max_inflight=2) as graph, graph_of(sums) as totals:
        if not drives:
            return
        sizes = [100, 50_000, 50_000, 400_000] * 6
        given = [np.full(size, float(i + 1)) for i, size in enumerate(sizes)]
        held = []
        for future in [graph.execute(x) for x in given]:
            *seen, array = future.result(SECONDS)
            assert seen == [array[1]] * 3
            array[0] = 77.0
            held.append(array)
        expected = [float((i + 1) * (size - 1)) for i, size in enumerate(sizes)]
        assert [float(array[1:].sum()) for array in held] == expected
        assert {array[0] for array in held} == {77.0}
        assert [x[0] for x in given] == [float(i + 1) for i in range(len(sizes))]
        assert totals.execute(None).result(SECONDS) == (expected,) * 3


def dropped_results_leave_nothing_behind(drives: bool) -> None:
    one, other, _ = players()

    def step(x):
        return other.echo(one.echo(x))

    def memory(nothing):
        return one.memory(nothing), other.memory(nothing)

    def sizes() -> list[int]:
        return [*totals.execute(None).result(SECONDS), one_process()]

    with graph_of(step, max_inflight=4) as graph, graph_of(memory) as totals:
        if not drives:
            return
        value = np.ones(MIB // 8)
        for _ in range(20):
            graph.execute(value)
        before = sizes()
        for _ in range(150):
            graph.execute(value)
        grown = [after - b for after, b in zip(sizes(), before, strict=True)]
        assert max(grown) < 40 * MIB, grown


def one_process() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- order -----------------------------------------------------------------------------------------


def an_actor_is_called_in_the_order_that_is_written(drives: bool) -> None:
    """Whatever its calls wait for."""
    slow, fast, _ = players()

    def step(x):
        late = slow.nap(x)
        fast.note("first", late)
        fast.note("second", x)
        slow.note("third", fast.echo(x))
        return fast.note("fourth"), slow.note("fifth")

    def logs(nothing):
        return slow.read_log(nothing), fast.read_log(nothing)

    with graph_of(step, max_inflight=3) as graph, graph_of(logs) as read:
        if drives:
            for x in (0.02, 0.0, 0.01):
                graph.execute(x)
            slows, fasts = read.execute(None).result(SECONDS)
            assert [entry[0] for entry in slows] == ["third", "fifth"] * 3
            assert [entry[0] for entry in fasts] == ["first", "second", "fourth"] * 3
            assert [entry[1] for entry in fasts if entry[0] == "first"] == [0.02, 0.0, 0.01]


def forwards_then_backwards(drives: bool) -> None:
    """A pipeline written out: each stage does all forwards, then all backwards."""
    stages = players()

    def step(x):
        ends = []
        for i in range(3):
            h = x
            for stage in stages:
                stage.note("F", i)
                h = stage.echo(h)
            ends.append(h)
        for i, h in enumerate(ends):
            for stage in reversed(stages):
                stage.note("B", i, stage.echo(h))
        return [stage.read_log(x) for stage in stages]

    with graph_of(step) as graph:
        if drives:
            for log in graph.execute(0).result(SECONDS):
                assert [f"{entry[0]}{entry[1]}" for entry in log] == [
                    "F0",
                    "F1",
                    "F2",
                    "B0",
                    "B1",
                    "B2",
                ]


def executions_are_never_mixed_up(drives: bool) -> None:
    """Values that come by two ways, one for objects and one for tensors, belong together."""
    one, other, last = players()

    def step(x, tensor):
        return last.pack(one.jitter(x), other.twice(tensor), other.jitter(x))

    with graph_of(step, cg.object, torch.zeros(20_000), max_inflight=4) as graph:
        if drives:
            futures = [graph.execute(i, torch.full((20_000,), float(i))) for i in range(60)]
            random.Random(1).shuffle(futures)
            for future in futures:
                (x, tensor, again), _ = future.result(SECONDS)
                assert x == again == future.execution
                assert tensor.unique().tolist() == [2.0 * x]


def there_and_back_on_one_actor(drives: bool) -> None:
    """A to B to A: what A waits for last does not keep it from what B needs first."""
    a, b = Net.on(1)(2.0), Net.on(2)(3.0)

    def step(x):
        y = a.scale(x)
        return a.add(y, b.scale(y))

    for overlap in ("+overlap", "-overlap"):
        with graph_of(step, torch.ones(5000), max_inflight=4, passes=overlap) as graph:
            if drives:
                futures = [graph.execute(torch.full((5000,), float(i))) for i in range(12)]
                assert [f.result(SECONDS)[0].item() for f in futures] == [
                    8.0 * i for i in range(12)
                ]


# -- ends ------------------------------------------------------------------------------------------


def closing_waits_for_what_runs(drives: bool) -> None:
    """Results can be had after that, executions cannot; and the same step compiles again."""
    one, *_ = players()

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x):
        return one.nap(x)

    lowered = step.lower(cg.object)
    for _ in range(2):
        graph = lowered.compile(max_inflight=3)
        if not drives:
            graph.serve()
            graph.close()
            continue
        futures = [graph.execute(x) for x in (0.1, 0.0, 0.05)]
        graph.close()
        assert all(future.done() for future in futures)
        assert [future.result(timeout=0) for future in futures] == [0.1, 0.0, 0.05]
        graph.close()
        with raises(RuntimeError, "has been closed: compile it again"):
            graph.execute(0.0)


# -- collectives -----------------------------------------------------------------------------------


def collectives_beside_messages(drives: bool) -> None:
    """With several executions in flight; a result may be used on some of the ranks only."""
    nets = [Net.on(rank)(float(rank)) for rank in range(1, cg.world_size())]
    first, second, third = nets

    def step(x):
        crossed = second.scale(first.scale(x))
        sums = cg.all_reduce([net.scale(x) for net in nets], op="sum")
        back = first.add(third.scale(crossed), sums[0])
        gathered = cg.all_gather([net.first(x) for net in nets])
        return back, cg.all_reduce([net.scale(crossed) for net in nets], op="max")[2], gathered[1]

    with graph_of(step, torch.ones(6), max_inflight=4) as graph:
        if drives:
            futures = [graph.execute(torch.full((6,), float(i))) for i in range(10)]
            for i, future in enumerate(futures):
                back, largest, gathered = future.result(SECONDS)
                assert back.tolist() == [12.0 * i] * 6
                assert largest.tolist() == [6.0 * i] * 6
                assert gathered.tolist() == [1.0 * i, 2.0 * i, 3.0 * i]


def a_collective_of_different_shapes_does_not_compile(drives: bool) -> None:
    one, other = Net.on(1)(1.0), Net.on(2)(2.0)

    def step(x):
        return cg.all_reduce([one.scale(x), other.first(x)], op="sum")[0]

    with raises((cg.TraceError, cg.IRError)):
        graph_of(step, torch.ones(4))


def all_ranks_agree_on_the_schedule(drives: bool) -> None:
    one, other = Net.on(1)(1.0), Net.on(2)(2.0)

    def step(x):
        y = other.scale(one.scale(x))
        return cg.all_reduce([one.scale(y), other.scale(y)], op="sum")[0]

    with graph_of(step, torch.ones(4)) as graph:
        texts = [graph.as_text(rank=rank) for rank in range(cg.world_size())]
        if not world().is_virtual:
            assert cg.allgather(texts) == [texts] * cg.world_size()


# -- the last: its graph stays open ----------------------------------------------------------------


def one_method_is_a_graph(drives: bool) -> None:
    """For what a program asks of an actor elsewhere between its graphs."""
    one, *_ = players()
    step = cg.trace(inputs=cg.on(0), outputs=cg.on(0))(one.echo)
    with step.lower(cg.object).compile(max_inflight=2) as graph:
        if drives:
            with raises(cg.ActorError, "lives on rank 1 and this is rank 0; call it in a step"):
                one.echo(3)
            assert graph.execute(3).result(SECONDS) == 3
            assert asyncio.run(gathered([graph.execute(x) for x in "ab"])) == ["a", "b"]
        elif one.is_local:
            assert one.echo(4) == 4


async def gathered(futures: list[cg.Future]) -> list[Any]:
    return await asyncio.gather(*futures)


def the_driver_draws_its_graph(drives: bool) -> None:
    """And rank 0 a step that all ranks call; the others may ask for it, too."""
    one, *_ = players()
    folder = Path(cg.allgather(tempfile.mkdtemp() if drives else "")[0])

    def step(x):
        return one.echo(x)

    graph = cg.trace(inputs=cg.on(2), outputs=cg.on(2))(step).lower(cg.object).compile()
    graph.visualize(folder / f"driven-{cg.rank()}.svg")
    cg.trace(step).lower(cg.object).compile().visualize(folder / f"all-{cg.rank()}.svg")
    graph.close()
    cg.barrier()
    if drives:
        assert sorted(path.name for path in folder.iterdir()) == ["all-0.svg", "driven-2.svg"]
        shutil.rmtree(folder)


def leaving_an_event_loop_with_executions_pending(drives: bool) -> None:
    one, *_ = players()

    def step(x):
        return one.nap(x)

    graph = graph_of(step, max_inflight=4)
    if not drives:
        graph.serve()
        return

    async def go() -> None:
        pending = [asyncio.ensure_future(wrapped(graph.execute(0.05))) for _ in range(3)]
        done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [0.05] * len(done)

    asyncio.run(go())


async def wrapped(future: cg.Future) -> Any:
    return await future


BEHAVIOURS = (
    tuples_are_unpacked,
    values_go_into_containers_and_keywords,
    no_arguments_at_all,
    a_value_has_readers_everywhere,
    shapes_may_differ_in_objects,
    what_is_kept_is_nobody_elses,
    dropped_results_leave_nothing_behind,
    an_actor_is_called_in_the_order_that_is_written,
    forwards_then_backwards,
    executions_are_never_mixed_up,
    there_and_back_on_one_actor,
    an_error_passes_through_a_chain,
    what_is_no_exception_is_an_error_of_its_execution,
    another_shape_than_declared_is_an_error,
    closing_waits_for_what_runs,
    collectives_beside_messages,
    a_collective_of_different_shapes_does_not_compile,
    all_ranks_agree_on_the_schedule,
    one_method_is_a_graph,
    the_driver_draws_its_graph,
    leaving_an_event_loop_with_executions_pending,
)


def main() -> None:
    with on_machines(*sys.argv[1:2]):
        for behaviour in BEHAVIOURS:
            behaviour(cg.rank() == 0)
            if behaviour is not BEHAVIOURS[-1]:
                cg.barrier()
            if cg.rank() == 0:
                print(f"passed {behaviour.__name__}", flush=True)


if __name__ == "__main__":
    main()
