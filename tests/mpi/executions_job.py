"""Programs that drive graphs from rank 0, as a user would write them.

    mpiexec -n 4 python tests/mpi/executions_job.py SCENARIO[,SCENARIO...] [NODES]

NODES gives for each rank the machine that it pretends to be on, as in `0011`. Rank 0 says what has
passed; all ranks end by 0 if everything has.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from driving import a_sign, chain_of, graph_of, on_machines, raises
from executions_actors import Boom, Scale, Unloadable, workers
from executions_late import positions, room, timeouts

import cg
from cg.launch.world.world import world

torch.set_num_threads(1)


def equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(np.array_equal(a, b))


def values(drives: bool) -> None:
    """Objects of every kind and size, through shared memory or messages, copied or in place."""
    with chain_of(workers(), max_inflight=3) as graph:
        if not drives:
            return
        payloads: list[Any] = ["hello", b"x", None, 3, 2.5, True, {"a": [1, (2,)]}, "ä" * 40_000]
        for size in (0, 1, 1000, 16_384, 16_385, 1 << 20, 5 << 20):
            payloads += [bytes(size), np.arange(size, dtype=np.uint8), torch.ones(size)]
        for value in payloads:
            assert equal(graph.execute(value).result(timeout=60), value)
        for value in reversed(payloads):
            assert equal(graph.execute(value).result(timeout=60), value)
        futures = [graph.execute((i, np.full(70_000, i))) for i in range(20)]
        for i, future in enumerate(futures):
            number, array = future.result(timeout=60)
            assert number == i
            assert (array == i).all()


def kept(drives: bool) -> None:
    """Results that somebody keeps are never overwritten, and hinder nobody."""
    (worker, *_) = workers()

    def step(x):
        return worker.keep(x), worker.echo(x)

    with graph_of(step, max_inflight=2) as graph, graph_of(worker.sums) as sums:
        if not drives:
            return
        held = [graph.execute(np.full(1000 * i, i)).result(timeout=30)[1] for i in range(1, 40)]
        expected = [float(1000 * i * i) for i in range(1, 40)]
        assert [float(array.sum()) for array in held] == expected
        assert sums.execute(None).result(timeout=30) == expected


def tensors(drives: bool) -> None:
    """Tensors of fixed types, in planned slots and in rings; the caller owns what it gets."""
    scale, (worker, *_) = Scale.on(cg.world_size() - 1)(3.0), workers()

    def step(x):
        y = scale(x)
        return worker.shaped(y), y, scale(y) + 1

    with graph_of(step, torch.zeros(50, 40), max_inflight=3) as graph:
        if not drives:
            return
        futures = [graph.execute(torch.full((50, 40), float(i))) for i in range(10)]
        for i, future in reversed(list(enumerate(futures))):
            doubled, scaled, more = future.result(timeout=30)
            assert [t.unique().item() for t in (doubled, scaled, more)] == [6 * i, 3 * i, 9 * i + 1]
        with raises(cg.InputError, "must be float32[50,40]"):
            graph.execute(torch.zeros(50))
        with raises(cg.InputError, "pass x.to_dense()"):
            graph.execute(torch.zeros(50, 40).to_sparse())
        with raises(cg.InputError, "x of step() is on 'meta'"):
            graph.execute(torch.zeros(50, 40, device="meta"))
        assert graph.variants[0].trace.inputs.host_only


def flow(drives: bool) -> None:
    """Capacity, order, results in any order or never, callbacks."""
    actors = workers()

    def fan(x):
        return [actor.add(x) for actor in actors]

    graph, slow = graph_of(fan, max_inflight=4), chain_of(actors[:1], "wait", max_inflight=2)
    with graph, slow, a_sign() as sign:
        if not drives:
            return
        futures = [graph.execute(1) for _ in range(200)]
        seen: list[int] = []
        for future in futures[::3]:
            future.add_done_callback(lambda f: seen.append(f.result()[0]))
        for n in (199, 0, 57, 198):
            assert futures[n].result(timeout=30) == [n + 1] * len(actors)
        del futures
        assert graph.execute(0).result(timeout=30)[0] == 200
        # Of those that are in flight together, any may end first.
        assert sorted(seen) == list(range(1, 201, 3))
        pair = [slow.execute(str(sign)), slow.execute(0.0)]
        with raises(cg.CapacityError, "2 executions of 'chain' are in flight"):
            slow.execute(0.0, block=False)
        sign.touch()
        assert [f.result(timeout=30) for f in (*pair, slow.execute(0.1))] == [str(sign), 0.0, 0.1]


def pipelined(drives: bool) -> None:
    """An actor begins the next execution while one further down is still at this one."""
    first, *_, last = workers()
    folder = cg.allgather(tempfile.mkdtemp() if drives else "")[0]

    def step(x):
        return last.await_sign(folder, first.leave_sign(folder, x))

    with graph_of(step, max_inflight=2) as graph:
        if not drives:
            return
        # No call of `last` ends before `first` has begun the next execution; the last has none.
        futures = [graph.execute((i, i < 5)) for i in range(6)]
        assert [future.result(timeout=60) for future in futures] == list(range(6))
        shutil.rmtree(folder)


def errors(drives: bool) -> None:
    """Errors of all kinds hit their own execution alone."""
    actors = workers()
    last = actors[-1]

    def leaf(x):
        last.fail(x)
        return actors[0].echo(x)

    def by_tensor(x):
        return last.shaped(actors[0].shaped(x)) + 1

    def summed(x):
        return cg.all_reduce([actor.shaped(x) for actor in actors], op="sum")[0]

    def joined(x, y):
        parts = [actor.shaped(x if actor is actors[0] else y) for actor in actors]
        return cg.all_reduce(parts, op="sum")[0]

    objects = [chain_of(actors, "fail", max_inflight=4), graph_of(leaf, max_inflight=4)]
    one = torch.ones(3)
    large = torch.ones(100, 100, 100)
    numbers = [graph_of(by_tensor, one), graph_of(by_tensor, large), graph_of(summed, one)]
    both = [graph_of(joined, one, one), graph_of(joined, large, large)]
    echo = chain_of(actors)
    with contextlib.ExitStack() as stack:
        for graph in (*objects, *numbers, *both, echo):
            stack.enter_context(graph)
        if not drives:
            return
        for graph in objects * 2:
            futures = [graph.execute(x) for x in ("a", "boom", "b", "boom", "c")]
            assert [futures[i].result(timeout=30) for i in (4, 0, 2)] == ["c", "a", "b"]
            for i in (3, 1):
                with raises(Boom, "in worker") as caught:
                    futures[i].result(timeout=30)
                (error,) = caught
                assert isinstance(error, cg.RemoteError)
                assert (error.code, error.method) == (7, "fail")
                assert "raise Boom(" in str(error), str(error)
        for graph, x in zip(numbers * 2, (one, large, one) * 2, strict=True):
            futures = [graph.execute(y) for y in (x, -x, x)]
            got = [futures[i].result(timeout=30).unique().item() for i in (0, 2)]
            assert got[0] == got[1] > 0
            with raises(ValueError, "negative"):
                futures[1].result(timeout=30)
        for graph, x in zip(both * 2, (one, large) * 2, strict=True):
            futures = [graph.execute(x, x), graph.execute(-x, x), graph.execute(x, x)]
            assert futures[2].result(timeout=30).unique().item() == 2.0 * len(actors)
            with raises(ValueError, "negative"):
                futures[1].result(timeout=30)
        futures = [echo.execute(x) for x in (1, lambda: 0, Unloadable(), 2)]
        assert [futures[i].result(timeout=30) for i in (0, 3)] == [1, 2]
        with raises(cg.RemoteError, "cannot be pickled"):
            futures[1].result(timeout=30)
        with raises(cg.RemoteError, "LookupError: not here"):
            futures[2].result(timeout=30)


def first_failure(drives: bool) -> None:
    """A failure is known before what else the execution does has ended."""
    actors = workers()
    slow, bad = actors[0], actors[1]

    def both(x, what):
        return slow.wait(what), bad.fail(x)

    with graph_of(both, cg.object, cg.object, max_inflight=2) as graph, a_sign() as sign:
        if not drives:
            return
        assert graph.execute("fine", 0.0).result(timeout=30) == (0.0, "fine")
        future = graph.execute("boom", str(sign))
        with raises(Boom, "in worker"):
            future.result(timeout=30)
        sign.touch()
        assert graph.execute("fine", 0.0).result(timeout=30) == (0.0, "fine")


def awaits(drives: bool) -> None:
    """Waits take next to no time of the core."""
    actors = workers()
    graph, slow = chain_of(actors, "fail", max_inflight=4), chain_of(actors[:1], "wait")

    async def one(x: Any) -> Any:
        try:
            return await graph.execute(x)
        except Boom as error:
            return error.code

    async def go() -> None:
        got = await asyncio.gather(*(one("boom" if i % 5 == 3 else i) for i in range(50)))
        assert got == [7 if i % 5 == 3 else i for i in range(50)]
        with a_sign() as sign:
            waiting = asyncio.create_task(_wrapped(slow.execute(str(sign))))
            cpu, wall = time.process_time(), time.monotonic()
            for _ in range(20):  # others get their turns meanwhile
                await asyncio.sleep(0.05)
            assert time.process_time() - cpu < 0.5 * (time.monotonic() - wall)
            assert not waiting.done()
            sign.touch()
            assert await waiting == str(sign)
        with a_sign() as sign:
            with raises(asyncio.TimeoutError):
                await asyncio.wait_for(_wrapped(slow.execute(str(sign))), 0.1)
            sign.touch()
            assert await slow.execute(0.0) == 0.0
        shared = slow.execute(0.3)
        assert await asyncio.gather(_wrapped(shared), _wrapped(shared)) == [0.3, 0.3]

    with graph, slow:
        if drives:
            asyncio.run(go())
            assert graph.execute(1).result(timeout=30) == 1


async def _wrapped(future: cg.Future) -> Any:
    return await future


def many(drives: bool) -> None:
    """Random executions of several graphs over the same actors, against plain Python."""
    actors = workers()

    def forth(x):
        return [actor.add(x) for actor in actors]

    def through(x):
        for actor in reversed(actors):
            x = actor.add(x)
        return x

    carried = cg.carry(torch.zeros(2), on=cg.world_size() - 1)

    def feedback(x):
        before = carried.get()
        carried.set(before + x)
        return before

    graphs = [
        graph_of(forth, max_inflight=3),
        graph_of(through, max_inflight=2),
        graph_of(feedback, torch.zeros(2)),
    ]
    if drives:
        _drive_many(graphs, len(actors))
        for graph in graphs:
            graph.close()
        with raises(RuntimeError, "'forth' has been closed: compile it again"):
            graphs[0].execute(1)
    else:
        # One serve() runs the executions of all of them.
        for graph in reversed(graphs):
            graph.serve()


def _drive_many(graphs: list[Any], count: int) -> None:
    totals, carried = [0] * count, 0

    def add(i: int, x: int) -> int:
        totals[i] += x
        return totals[i]

    source = random.Random(3)
    waiting: list[tuple[Any, Any]] = []
    for _ in range(300):
        which, x = source.randrange(3), source.randrange(-9, 10)
        if which == 0:
            expected: Any = [add(i, x) for i in range(count)]
        elif which == 1:
            expected = x
            for i in reversed(range(count)):
                expected = add(i, expected)
        else:
            expected, carried = carried, carried + x
        given = torch.full((2,), float(x)) if which == 2 else x
        waiting.append((graphs[which].execute(given), expected))
        while len(waiting) > source.randrange(1, 12):
            future, expected = waiting.pop(source.randrange(len(waiting)))
            if source.random() < 0.8:
                _check(future, expected)
    for future, expected in waiting:
        _check(future, expected)


def _check(future: cg.Future, expected: Any) -> None:
    got = future.result(timeout=60)
    assert (got[0].item() if isinstance(got, torch.Tensor) else got) == expected


def variants(drives: bool) -> None:
    """Signatures compiled ahead, chosen by each execution."""
    scale = Scale.on(1)(2.0)

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x):
        return scale(x) + 1

    sizes = [(3,), (1000,), (30, 40)]
    with step.lower_many([torch.zeros(*size) for size in sizes]).compile(max_inflight=2) as graph:
        if not drives:
            return
        futures = [graph.execute(torch.full(sizes[i % 3], float(i))) for i in range(30)]
        for i, future in enumerate(futures):
            got = future.result(timeout=30)
            assert got.shape == sizes[i % 3]
            assert got.unique().item() == 2 * i + 1
        with raises(cg.InputError, "no variant of step"):
            graph.execute(torch.zeros(4))


def mixed(drives: bool) -> None:
    """Steps that all ranks call, and executions, in one program."""
    actors = workers()

    @cg.trace
    def together(x):
        return sum(actor.shaped(x) for actor in actors)

    def total(x):
        return [actor.add(x) for actor in actors]

    count = len(actors)
    x = torch.ones(2)
    graph = graph_of(total)
    assert together(x).tolist() == [2.0 * count] * 2
    assert graph(1) == ([1] * count if drives else None)  # a graph is a step as well
    with graph:
        if drives:
            futures = [graph.execute(1) for _ in range(5)]
            slow = graph.execute(1)
            if not slow.is_done:
                with raises(RuntimeError, "executions of a graph are in flight on this rank"):
                    graph(1)
            assert [f.result(timeout=30)[0] for f in (*futures, slow)] == [2, 3, 4, 5, 6, 7]
    assert together(x).tolist() == [2.0 * count] * 2
    with raises(RuntimeError, "has been closed"):
        graph(1)


def idle(drives: bool) -> None:
    """Ranks that serve and have nothing to do use no CPU to speak of."""
    actors = workers()
    # Nothing rings for another machine: ranks have to look from time to time.
    share = 0.02 if len(set(world().nodes)) == 1 else 0.05

    def cpu(x):
        return [actor.cpu(x) for actor in actors]

    with graph_of(cpu) as graph, chain_of(actors) as echo:
        if not drives:
            return
        for _ in range(200):
            echo.execute(b"x").result(timeout=30)
        used = graph.execute(None).result(timeout=30)
        for _ in range(20):  # until all have come to rest, and others have left them alone
            began = time.monotonic()
            time.sleep(2)
            before, used = used, graph.execute(None).result(timeout=30)
            seconds = time.monotonic() - began
            shares = [(b - a) / seconds for a, b in zip(before, used, strict=True)]
            if max(shares) < share:
                break
        assert max(shares) < share, shares
        time.sleep(0.25)
        assert echo.execute(b"x").result(timeout=30) == b"x"  # all of them wake up


SCENARIOS = (
    values,
    kept,
    tensors,
    flow,
    pipelined,
    errors,
    first_failure,
    timeouts,
    room,
    positions,
    awaits,
    many,
    variants,
    mixed,
    idle,
)


def main() -> None:
    known = {scenario.__name__: scenario for scenario in SCENARIOS}
    with on_machines(*sys.argv[2:3]):
        for name in sys.argv[1].split(","):
            known[name](cg.rank() == 0)
            cg.barrier()
            if cg.rank() == 0:
                print(f"passed {name}", flush=True)


if __name__ == "__main__":
    main()
