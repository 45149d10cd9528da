"""Short programs as users write them: training, a chain of actors, scatter and gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from tests.stages import mean_loss

from ..stages import TrainedStage
from ..worlds import virtual_world

RANKS, WIDTH = 4, 8

_world = virtual_world(RANKS)


def training(stages: list[Any]) -> cg.Step:
    @cg.trace
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mean_loss(stages, (x, y), 8)
        for stage in stages:
            stage.update()
        return loss

    return step


def test_training_learns_as_plain_python_does() -> None:
    stages, plain = ([TrainedStage.on(r)(r, WIDTH) for r in range(RANKS)] for _ in range(2))
    x, y = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
    eager = training(plain).__wrapped__
    compiled = training(stages).lower(x, y).compile(schedule=cg.schedules.one_f_one_b())
    losses = [(float(eager(x, y).detach()), float(compiled(x, y))) for _ in range(30)]
    for wanted, found in losses:
        assert found == pytest.approx(wanted, rel=1e-5)
    assert losses[-1][1] < losses[0][1]


@cg.actor
class NormedStage(TrainedStage):
    """A stage with statistics, which every microbatch updates."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_batch_norm_in_a_pipeline(schedule: str) -> None:
    stages, plain = ([NormedStage.on(r)(r) for r in range(RANKS)] for _ in range(2))
    x, y = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
    eager = training(plain).__wrapped__
    compiled = training(stages).lower(x, y).compile(schedule=cg.schedules.by_name(schedule))
    for _ in range(3):
        assert float(compiled(x, y)) == pytest.approx(float(eager(x, y).detach()), rel=1e-5)
    for one, two in zip(plain, stages, strict=True):
        for name, wanted in one.local.state_dict().items():
            torch.testing.assert_close(two.local.state_dict()[name], wanted)


def test_a_step_is_compiled_for_each_signature() -> None:
    stages = [TrainedStage.on(rank)(rank, WIDTH) for rank in range(RANKS)]
    step = training(stages)
    for rows in (16, 8, 16):
        x = torch.ones(rows, 8)
        wanted = stages[-1].local.loss(_through(stages, x), x)
        assert float(step(x, x)) == pytest.approx(float(wanted), rel=1e-5)


def _through(stages: list[Any], x: Tensor) -> Tensor:
    with torch.no_grad():
        for stage in stages:
            x = stage.forward(x)
    return x


@cg.actor
class Worker:
    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[str] = []

    @cg.opaque
    def fwd(self, x: str) -> str:
        self.seen.append(x)
        return f"{x}-{self.name}"

    @cg.opaque
    def gather(self, *parts: str) -> list[str]:
        return sorted(parts)

    def double(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_chain_of_objects_from_rank_0_to_rank_0() -> None:
    actors = [Worker.on(rank)(str(rank)) for rank in (1, 2, 3)]

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def chain(x: Any) -> Any:
        for actor in actors:
            x = actor.fwd(x)
        return x

    compiled = chain.lower(cg.object).compile()
    assert [compiled(f"hello{i}") for i in range(3)] == [f"hello{i}-1-2-3" for i in range(3)]
    assert actors[2].local.seen == [f"hello{i}-1-2" for i in range(3)]


def test_a_chain_with_several_executions_in_flight() -> None:
    actors = [Worker.on(rank)(str(rank)) for rank in (1, 2, 3)]

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def chain(x: Any) -> Any:
        for actor in actors:
            x = actor.fwd(x)
        return x

    graph = chain.lower(cg.object).compile(max_inflight=8)
    futures = [graph.execute(f"hello{i}") for i in range(8)]
    assert [f.result(timeout=60) for f in futures] == [f"hello{i}-1-2-3" for i in range(8)]
    graph.close()


def test_scatter_and_gather() -> None:
    actors = [Worker.on(rank)(str(rank)) for rank in range(RANKS)]

    @cg.trace(inputs=cg.on(2), outputs=cg.on(1, 3))
    def both(x: Any, t: Tensor) -> tuple[Any, Tensor]:
        parts = [actor.fwd(x) for actor in actors]
        total = cg.all_reduce([actor.double(t) for actor in actors])[0]
        return actors[0].gather(*parts), total

    compiled = both.lower(cg.object, torch.zeros(2)).compile()
    names, total = compiled("x", torch.ones(2))
    assert names == ["x-0", "x-1", "x-2", "x-3"]
    assert total.tolist() == [8.0, 8.0]
    assert "program @3" in compiled.as_text(3)
    assert compiled.cost_analysis()[2].messages_received == 0
