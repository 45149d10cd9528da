"""Stages that are no chain: every schedule gives the gradients of the plain loop for any DAG.

Stages are numbered as the step calls them first. Each shape has five, which lie on ranks as the
schedules want them; a rank may so have stages of several branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.ops import Send
from cg.ir.text.diagnostics import IRError
from cg.launch.world.world import use_world
from cg.passes.schedules import Schedule, Task

from .pipelines import WIDTH, Pipe, assert_close, gradients
from .test_pipelines import Pool, tracing_with

pytestmark = pytest.mark.timeout(120)

Shape = Callable[[Sequence[Any], Tensor, Tensor], Tensor]


def diamond(stages: Sequence[Any], x: Tensor, y: Tensor) -> Tensor:
    """Two branches from one stage to another."""
    top, left, right, join, last = stages
    h = top.forward(x)
    return last.loss(last.forward(join.joined(left.forward(h), right.forward(h))), y)


def skip(stages: Sequence[Any], x: Tensor, y: Tensor) -> Tensor:
    """The next stage uses the first one's output and, past two ranks, so does the last but one."""
    first, second, third, fourth, last = stages
    early = first.forward(x)
    h = third.forward(second.forward(early))
    return last.loss(last.joined(fourth.joined(h, early), h), y)


def heads(stages: Sequence[Any], x: Tensor, y: Tensor) -> Tensor:
    """One trunk, and two heads with a loss each, on branches of unequal length."""
    first, second, short, long, last = stages
    h = second.forward(first.forward(x))
    near = short.loss(short.forward(h), y)
    return near + 0.5 * last.loss(last.forward(long.forward(h)), y.flip(1))


def chains(stages: Sequence[Any], x: Tensor, y: Tensor) -> Tensor:
    """Two chains that know nothing of each other until the last stage."""
    one, two, other, another, last = stages
    left = two.forward(one.forward(x))
    right = another.forward(other.forward(x.flip(1)))
    return last.loss(last.joined(left, right), y)


def separate(stages: Sequence[Any], x: Tensor, y: Tensor) -> Tensor:
    """Two chains that never meet but in the sum of their losses."""
    one, two, other, another, last = stages
    left = two.loss(two.forward(one.forward(x)), y)
    return left + last.loss(last.forward(another.forward(other.forward(y))), x)


SHAPES = (diamond, skip, heads, chains, separate)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "0,1,2,3,4": ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "looped-bfs", "auto"),
    "0,0,1,2,2": ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "looped-bfs", "auto"),
    "0,1,0,1,1": ("gpipe", "1f1b", "interleaved", "looped-bfs", "auto"),
    "3,1,0,3,1": ("gpipe", "1f1b", "auto"),
    "0,0,0,0,0": ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "looped-bfs", "auto"),
}


CASES = [(ranks, name) for ranks, names in LAYOUTS.items() for name in names]


@dataclass(frozen=True)
class Traced:
    """A shape on ranks, in the world where it was traced, and what its plain loop gives."""

    world: VirtualWorld
    stages: Sequence[Any]
    inputs: tuple[Tensor, Tensor]
    expected: Tensor
    wanted: dict[str, Tensor | None]
    lowered: cg.Lowered


@dataclass
class Shapes:
    """Shapes that are traced once, and compiled with many schedules."""

    pool: Pool = field(default_factory=Pool)
    traced: dict[Any, Traced] = field(default_factory=dict)

    def trace(self, shape: Shape, ranks: tuple[int, ...], m: int) -> Traced:
        key = shape, ranks, m
        if key not in self.traced:
            x, y = (torch.randn(m, WIDTH, dtype=torch.float64) for _ in range(2))
            world = VirtualWorld(max(ranks) + 1)
            with use_world(world), tracing_with(self.pool):
                stages = self.pool.place(Pipe(ranks, m), world)
                plain = make_step(shape, stages, m)
                expected = plain(x, y).detach()
                wanted = gradients(stages)
                assert sum(each is not None for each in wanted.values()) >= 2 * len(stages)
                lowered = cg.trace(plain).lower(x, y)
            self.traced[key] = Traced(world, stages, (x, y), expected, wanted, lowered)
        return self.traced[key]


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return Shapes()


def make_step(shape: Shape, stages: Sequence[Any], m: int) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        parts = cg.microbatches((x, y), m)
        loss = cg.mean([shape(stages, part, target) for part, target in parts])
        cg.backward(loss)
        return loss

    return step


def run(
    shape: Shape, ranks: Sequence[int], m: int, schedule: Schedule, shapes: Shapes
) -> cg.Compiled:
    """Compile and run a shape; hold it against the plain loop."""
    traced = shapes.trace(shape, tuple(ranks), m)
    with use_world(traced.world), tracing_with(shapes.pool):
        compiled = traced.lowered.compile(schedule=schedule)
        loss = compiled(*traced.inputs)
        torch.testing.assert_close(loss, traced.expected, rtol=1e-12, atol=0)
        assert_close(gradients(traced.stages), traced.wanted, 1e-10)
    return compiled


@pytest.mark.grid(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_gradients_are_those_of_the_plain_loop(
    shape: Shape, ranks: str, name: str, shapes: Shapes
) -> None:
    for m in (1, 5):
        run(shape, list(map(int, ranks.split(","))), m, cg.schedules.by_name(name), shapes)


@cache
def narrow(shape: Shape) -> Shape:
    """The same with a sixth stage in front, so that stages can go down three ranks and up again."""

    def deeper(stages: Sequence[Any], x: Tensor, y: Tensor) -> Tensor:
        return shape(stages[1:], stages[0].forward(x), y)

    return deeper


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v", "auto"])
def test_down_the_ranks_and_up_again(shape: Shape, name: str, shapes: Shapes) -> None:
    for m in (1, 7):
        run(narrow(shape), (0, 1, 2, 2, 1, 0), m, cg.schedules.by_name(name), shapes)


def test_what_two_ranks_use_goes_straight_to_each(shapes: Shapes) -> None:
    """Nothing is passed on from rank to rank on its way past them."""
    compiled = run(skip, (0, 1, 2, 3, 4), 2, cg.schedules.one_f_one_b(), shapes)
    peers = [
        {op.peer for op in program.ops if isinstance(op, Send)}
        for program in compiled.module.programs
    ]
    assert peers == [{1, 3}, {0, 2}, {1, 3, 4}, {0, 2, 4}, {2, 3}]


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("zb-v", (0, 1, 2, 3, 4), "'zb-v' wants 2 stages on each of 5 ranks, .* as in 0,1,1,0"),
        ("dualpipe-v", (0, 1, 2, 2, 1), "'dualpipe-v' wants 2 stages on each of 3 ranks"),
        ("zb-h1", (0, 1, 0, 1, 1), "'zb-h1' wants the stages of a rank side by side.* use 1f1b"),
        ("zb-h2", (0, 1, 2, 1, 0), "'zb-h2' wants the stages of a rank side by side"),
        ("interleaved", (0, 1, 2, 1, 0), "'interleaved' wants chunks .* as in 0,1,0,1"),
        ("looped-bfs", (0, 1, 2, 0, 1), "'looped-bfs' wants chunks .* lie on ranks 0,1,2,0,1"),
    ],
)
def test_where_stages_must_lie_is_said(
    name: str, ranks: tuple[int, ...], message: str, shapes: Shapes
) -> None:
    with pytest.raises(ValueError, match=message):
        run(diamond, ranks, 4, cg.schedules.by_name(name), shapes)


def by_rounds(pipeline: cg.schedules.Pipeline) -> dict[int, list[Task]]:
    """A rule of a user's: one microbatch after the other, forwards and at once the backwards."""
    order: dict[int, list[Task]] = {rank: [] for rank in pipeline.ranks}
    for mb in range(pipeline.microbatches):
        for stage, rank in enumerate(pipeline.stage_ranks):
            order[rank].append(Task.parse(f"{stage}F{mb}"))
        for stage, rank in reversed(list(enumerate(pipeline.stage_ranks))):
            order[rank] += [Task.parse(f"{stage}B{mb}"), Task.parse(f"{stage}W{mb}")]
    return order


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rule_of_ones_own(shape: Shape, shapes: Shapes) -> None:
    run(shape, (2, 0, 1, 2, 0), 3, Schedule("rounds", by_rounds, splits=True), shapes)


def test_branches_that_wait_for_each_other_are_shown_as_a_circle(shapes: Shapes) -> None:
    """Of two microbatches each branch wants another one to be through first."""
    table = cg.schedules.table(
        """
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
        2F1 2B1 2F0 2B0
        3F0 3F1 3B0 3B1
        4F0 4B0 4F1 4B1
        """
    )
    with pytest.raises(IRError) as caught:
        run(diamond, (0, 1, 2, 3, 4), 2, table, shapes)
    message = str(caught.value)
    assert "schedule 'table' cannot run this step: its tasks wait for each other" in message
    notes = [line.strip() for line in message.splitlines() if line.startswith("  note: ")]
    assert "note: 1F1 on rank 1 waits for 1B0 on rank 1, by the order of 'table'" in notes
    assert "note: 2F0 on rank 2 waits for 2B1 on rank 2, by the order of 'table'" in notes
    assert "the order is one of your own: put 2F0 before 2B1, or 1F1 before 1B0" in message
    # A gradient comes by a message, which is an instruction of its own.
    assert "note: 1B0 on rank 1 waits for send on rank 3, to have what it made" in notes
    assert "test_shapes.py" in message
