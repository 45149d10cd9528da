"""A traced and compiled step gives what its plain Python gives: values, gradients and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from cg.backends.virtual.world import VirtualExecutable
from cg.ir.ops.clone import clone
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.schedules import gpipe, one_f_one_b
from cg.tracer.function.functions import Functions
from cg.tracer.record.intrinsics.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
)
from cg.tracer.record.intrinsics.gradients import backward
from cg.tracer.record.intrinsics.microbatches import mean, microbatches
from cg.tracer.record.trace import Trace

from .step_tools import Bench, EagerTracer

torch.set_num_threads(1)


class ExactStage(torch.nn.Module):
    """A matrix in float64, which plain Python and the compiled step train alike."""

    def __init__(self, seed: int, frozen: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = torch.randn(8, 8, generator=generator, dtype=torch.float64) / 3
        self.weight = torch.nn.Parameter(draw, requires_grad=not frozen)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return torch.tanh(x @ self.weight)

    def pair(self, x: Any) -> Any:
        h = x @ self.weight
        return {"h": h, "top": h.argmax(dim=-1)}, h.mean()

    def loss(self, h: Any, y: Any) -> Any:
        return ((h @ self.weight) - y).pow(2).mean()

    def count(self, x: Any) -> Any:
        self.seen.add_(x.detach().sum())

    def total(self) -> Any:
        return self.seen.clone()

    def state(self) -> Any:
        return self.weight

    def descend(self) -> None:
        with torch.no_grad():
            self.weight.sub_(0.1 * self.weight.grad)
        self.weight.grad = None


Build = Callable[[list[Any]], Callable[..., Any]]


def chain(stages: list[Any]) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        losses = []
        for mx, my in microbatches((x, y), 4):
            h = mx
            for stage in stages:
                h = stage.forward(h)
            losses.append(stages[-1].loss(h, my))
        loss = mean(losses)
        backward(loss)
        return loss

    return step


def skips(stages: list[Any]) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        total = torch.zeros((), dtype=x.dtype)
        for part in microbatches({"x": x, "y": y}, 2):
            a = stages[0].forward(part["x"])
            b = stages[1].forward(a) + a
            result, extra = stages[2].pair(torch.cat([b, a])[: len(b)])
            loss = stages[0].loss(result["h"] * b, part["y"])
            backward(loss, extra)
            total += loss.detach()
        return total, result["top"]

    return step


def writes(stages: list[Any]) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        h = stages[0].forward(x) * 3
        h[0] = 0
        h[1:, 0] = h[1:, 1] * 2
        h *= 2
        kept = h.clone()
        kept -= 1
        z = torch.zeros_like(h)
        z += stages[1].forward(kept)
        torch.nn.functional.relu(z, inplace=True)
        rows = [row * i for i, row in enumerate(z)]
        loss = stages[2].loss(torch.stack(rows), y) + h.sum() + z.T.mean()
        backward(loss)
        return loss, h, kept, z

    return step


def effects(stages: list[Any]) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        seen = []
        for mx, _ in microbatches((x, y), 2):
            h = stages[0].forward(mx)
            for stage in stages:
                stage.count(h)
                seen.append(stage.total())
        weight = stages[1].state()
        return seen, h @ weight

    return step


def update(stages: list[Any]) -> Callable[..., Any]:
    train = chain(stages)

    def step(x: Any, y: Any) -> Any:
        loss = train(x, y)
        for stage in stages:
            stage.descend()
        return loss

    return step


def without_gradients(stages: list[Any]) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        with torch.no_grad():
            a = stages[0].forward(x)
            values, indices = a.max(dim=1)
        b = stages[1].forward(a)
        c = stages[2].forward(b.detach()).sum() * values.sum()
        backward(c + b[0].sum())
        return a, indices, c.item() if not isinstance(c, torch.Tensor) else c

    return step


def collectives(stages: list[Any]) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        values = [stage.forward(x) for stage in stages]
        reduced = all_reduce(values)
        gathered = all_gather([v[:2] for v in values], dim=0)
        loss = sum(
            stage.loss(r + g[:1], y) for stage, r, g in zip(stages, reduced, gathered, strict=True)
        )
        whole = gather([v[:3] for v in values], root=stages[1])
        loss = loss + stages[1].loss(whole[1:9], y)
        shared = scatter(stages[2].forward(x.repeat(3, 1)), stages)
        for stage, part in zip(stages[:2], shared, strict=False):  # one part is of no loss
            loss = loss + stage.loss(part, y)
        everyone = broadcast(values[1].detach(), stages)
        backward(loss)
        least = all_reduce([v.detach() for v in values], op="min")
        parts = reduce_scatter([v.detach()[:6] for v in values], op="avg")
        swapped = all_to_all([v.detach()[:3] for v in values])
        return loss, everyone[0], least[1], parts, swapped

    return step


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    shape = (8, 8)
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randn(shape, generator=generator, dtype=torch.float64),
    )


def actors(bench: Bench, ranks: tuple[int, ...], frozen: int | None) -> list[Any]:
    cls: Any = bench.actor(type("Stage", (ExactStage,), {}))
    return [cls.on(rank)(seed, frozen=seed == frozen) for seed, rank in enumerate(ranks)]


def snapshot(stages: list[Any]) -> list[torch.Tensor]:
    """Parameters, their gradients (as far as there are any), and buffers."""
    found = []
    for stage in stages:
        module = stage.local
        found += [module.weight.detach().clone(), module.seen.clone()]
        if module.weight.grad is not None:
            found.append(module.weight.grad.clone())
    return found


class Compiled:
    """A trace, compiled for the virtual world."""

    def __init__(self, trace: Trace, schedule: Any) -> None:
        self._trace = trace
        self._module = clone(trace.module)
        PassManager(default_pipeline(schedule)).run(self._module)
        self._run = VirtualExecutable(self._module, trace.bodies, trace.constants, poison=True)

    def __call__(self, *args: Any) -> list[Any]:
        """The results of each rank."""
        self._trace.check_guards()
        names = [value.name for value in self._trace.module.program.params]
        given = dict(zip(names, self._trace.inputs.flatten(args, {}), strict=True))
        ranks = range(self._module.world)
        inputs = [[given[p.name] for p in self._module.program_of(rank).params] for rank in ranks]
        return [self._trace.outputs.rebuild(outputs) for outputs in self._run.run(inputs)]


STEPS = [chain, skips, writes, effects, update, without_gradients, collectives]
PURE = [build for build in STEPS if build not in (effects, update)]  # EagerTracer sees no writes
PLACEMENTS = [(0, 0, 0), (0, 1, 2), (1, 0, 1)]


@pytest.mark.parametrize("build", STEPS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("ranks", PLACEMENTS, ids=str)
def test_compiled_steps_equal_plain_python(build: Build, ranks: tuple[int, ...]) -> None:
    compare(build, ranks, [gpipe(), one_f_one_b()], Functions())


@pytest.mark.parametrize("build", PURE, ids=lambda build: build.__name__)
def test_traced_steps_equal_plain_python(build: Build) -> None:
    """The same without the function tracer, whose place the definition takes."""
    compare(build, (0, 1, 2), [gpipe()], EagerTracer())


def compare(build: Build, ranks: tuple[int, ...], schedules: list[Any], tracer: Any) -> None:
    """Run one trace under each schedule in turn, from the state that the one before has left."""
    plain, bench = Bench(max(ranks) + 1), Bench(max(ranks) + 1)
    frozen = 1 if build is skips else None
    eager_stages, stages = actors(plain, ranks, frozen), actors(bench, ranks, frozen)
    eager, step = build(eager_stages), build(stages)
    bench.tracer = tracer
    trace = bench.trace(step, *data())
    for schedule in schedules:
        compiled = Compiled(trace, schedule)
        for _ in range(3):
            expected = tree_leaves(eager(*data()))
            for result in compiled(*data()):
                close(tree_leaves(result), expected)
            close(snapshot(stages), snapshot(eager_stages))


def close(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-10, atol=1e-12)
