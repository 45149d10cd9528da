"""Ranks hold as much for backwards while a step runs as the simulator foresees.

Nothing is read off the program here: each value that a forward saves is watched by a weak
reference, and those that are alive are counted whenever a call returns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest
from torch import Tensor

import cg
from cg.backends.base import Body
from cg.backends.virtual.world import VirtualExecutable, VirtualWorld
from cg.ir.ops import Call
from cg.ir.ops.module import Module
from cg.launch.world.world import use_world
from cg.passes.schedules import Pipeline
from cg.passes.simulate.schedule_simulator import simulate
from tests.backends.instrument import instrument

from .pipelines import Pipe, gradients, inputs, make_step
from .test_pipelines import Pool, tracing_with

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool()


def owned_saves(module: Module) -> dict[str, list[int]]:
    """For each forward of a derivative, the outputs that it saves and no input shares."""
    found: dict[str, list[int]] = {}
    for vjp in module.vjps.values():
        forward = module.functions[vjp.forward]
        saved = len(module.functions[vjp.backward].inputs) - len(vjp.grad_outputs)
        shared = {output for output, _ in forward.aliases}
        first = len(forward.outputs) - saved
        found[vjp.forward] = [i for i in range(first, len(forward.outputs)) if i not in shared]
    return found


class Watch:
    """Counts, on each rank, the microbatches of stages of which anything saved is alive."""

    def __init__(self, saves: dict[str, list[int]]) -> None:
        self._saves = saves
        self._alive: dict[int, dict[tuple[int, int], list[ref[Tensor]]]] = defaultdict(dict)
        self.peaks: dict[int, int] = defaultdict(int)
        self.watched: set[str] = set()

    def wrap(self, rank: int, index: int, op: Call, body: Body) -> Body:
        saved = self._saves.get(op.fn.name, [])
        task = op.task

        def run(*values: Any) -> Sequence[Any]:
            outputs = list(body(*values))
            if task is not None:
                cell = (task.stage, task.microbatch)
                for position in saved:
                    # An object of its own, that nothing but the executor can hold.
                    outputs[position] = outputs[position].detach()
                    self._alive[rank].setdefault(cell, []).append(ref(outputs[position]))
                    self.watched.add(str(task))
            self.peaks[rank] = max(self.peaks[rank], self.count(rank))
            return outputs

        return run

    def count(self, rank: int) -> int:
        cells = self._alive[rank].values()
        return sum(any(one() is not None for one in references) for references in cells)


def layout(schedule: str, p: int) -> tuple[int, ...]:
    line = tuple(range(p))
    if schedule in ("zb-v", "dualpipe-v"):
        return line + line[::-1]
    return line * 2 if schedule in ("interleaved", "looped-bfs") else line


@pytest.mark.grid(1)
@pytest.mark.parametrize("schedule", cg.schedules.names())
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 6), (3, 2), (4, 9)])
def test_live_activations_peak_as_foreseen(schedule: str, p: int, m: int, pool: Pool) -> None:
    ranks = layout(schedule, p)
    pipe = Pipe(ranks, m, schedule=schedule)
    world = VirtualWorld(p)
    with use_world(world), tracing_with(pool):
        stages = pool.place(pipe, world)
        lowered = cg.trace(make_step(pipe, stages)).lower(*inputs(pipe))
        compiled = lowered.compile(schedule=cg.schedules.by_name(schedule))
        watch = Watch(owned_saves(lowered.trace.module))
        module, bodies = instrument(compiled.module, lowered.trace.bodies, range(p), watch.wrap)
        given = dict(zip("xy", inputs(pipe), strict=True))
        executable = VirtualExecutable(module, bodies, lowered.trace.constants)
        executable.run([[given[v.name] for v in one.params] for one in module.programs])
        gradients(stages)
    assert len(watch.watched) == len(ranks) * m  # F of every stage and microbatch
    assert [watch.count(rank) for rank in range(p)] == [0] * p
    order = cg.schedules.by_name(schedule)(Pipeline(ranks, m))
    foreseen = simulate(order, ranks, m).peak_activations
    found = [watch.peaks[rank] / ranks.count(rank) for rank in range(p)]
    assert found == list(foreseen)
