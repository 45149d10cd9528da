"""Tasks that overlap with the exchanges of others compute the same bits as tasks in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.api.lowered import Lowered
from cg.launch.world.world import use_world
from cg.passes import schedules
from cg.passes.order.tasks_in_flight import GradientOrder

WIDTH, EXPERTS, CHOICES, MICROBATCHES, ROWS = 6, 4, 2, 4, 4
LINE = (0, 1)
HOMES = {
    "1f1b": LINE,
    "gpipe": LINE,
    "zb-h1": LINE,
    "zb-v": LINE + LINE[::-1],
    "interleaved": LINE * 2,
    "dualpipe-v": LINE + LINE[::-1],
}
CUTS = {"up|down": cg.cut(0, "ep"), "forward(x)|loss(x)|loss(y)": cg.cut(0, "ep")}


class Mixture(nn.Module):
    """Gives `[tokens, width]`. Both of its methods use all weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(0.4 * torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(0.4 * torch.randn(EXPERTS, WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shares, ids = self.router(x).softmax(-1).topk(CHOICES)
        h = functional.silu(cg.expert_linear(x, self.up, ids))
        return x + (cg.expert_linear(h, self.down, ids) * shares.unsqueeze(-1)).sum(1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.forward(x), y)

    def update(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
                parameter.grad = None


Batch = tuple[Tensor, Tensor]


def lowered(homes: Sequence[int], store: Any = None) -> tuple[Lowered, list[nn.Module], Batch]:
    """A training step in the world of the moment, the pieces of its stages, and its batch.

    Args:
        homes: of each stage the pair of ranks.
        store: in which pieces weights rest.
    """
    places = [cg.mesh(range(2 * home, 2 * home + 2), dp=1, ep=2) for home in homes]
    options = {} if store is None else {"store": store}
    stages = [
        cg.actor(Mixture).on(place, plan=CUTS, **options)(seed) for seed, place in enumerate(places)
    ]

    @cg.trace
    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for part, target in cg.microbatches((x, y), MICROBATCHES):
            for stage in stages:
                part = stage.forward(part)
            losses.append(stages[-1].loss(part, target))
        loss = cg.mean(losses)
        cg.backward(loss)
        for stage in stages:
            stage.update()
        return loss

    x, y = torch.randn(2, ROWS * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(3))
    instances = [stage.instances[rank] for stage in stages for rank in sorted(stage.instances)]
    return step.lower(x, y), instances, (x, y)


def trained(schedule: str, homes: Sequence[int], store: Any = None) -> list[list[Tensor]]:
    """The losses and weights after two steps, with one task in flight, and with two.

    Args:
        schedule: by name.
        homes, store: as in `lowered`.
    """
    results = []
    with use_world(VirtualWorld(2 * (1 + max(homes)))):
        step, instances, batch = lowered(homes, store)
        start = [{k: v.clone() for k, v in each.state_dict().items()} for each in instances]
        for tasks in (1, 2):
            compiled = step.compile(
                schedule=schedules.by_name(schedule), dispatch="exchange", tasks_in_flight=tasks
            )
            for each, state in zip(instances, start, strict=True):
                each.load_state_dict(state)
            losses = [compiled(*batch) for _ in range(2)]
            weights = [p.detach().clone() for each in instances for p in each.parameters()]
            results.append([*losses, *weights])
    return results


def are_equal(results: Sequence[Sequence[Tensor]]) -> bool:
    assert all(torch.isfinite(value).all() for values in results for value in values)
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    "schedule",
    [
        "gpipe",
        "dualpipe-v",
        *(pytest.param(name, marks=pytest.mark.slow) for name in HOMES if name[0] in "1zi"),
    ],
)
def test_losses_and_weights_are_the_same_bits(schedule: str) -> None:
    assert are_equal(trained(schedule, HOMES[schedule]))


def test_stored_weights_are_the_same_bits() -> None:
    """The router's weights rest in pieces, and are gathered for each task."""
    assert are_equal(trained("gpipe", (0,), store=cg.cut(0, "ep")))


def test_a_weight_of_two_calls_has_its_gradients_in_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one stage calls `forward` and `loss`. With any order, tasks would mix their gradients."""
    assert are_equal(trained("gpipe", (0,)))
    monkeypatch.setattr(GradientOrder, "allow", lambda *_: True)
    assert not are_equal(trained("gpipe", (0,)))


@pytest.fixture(scope="module")
def one_stage() -> Iterator[tuple[Lowered, list[nn.Module], Batch]]:
    """A step of one stage on two ranks, as in `lowered`."""
    with use_world(VirtualWorld(2)):
        yield lowered((0,))


OPTIONS = {"schedule": schedules.gpipe(), "dispatch": "exchange"}


def test_two_tasks_are_chosen_where_they_are_faster_on_paper(
    one_stage: tuple[Lowered, list[nn.Module], Batch], tmp_path: Path
) -> None:
    step, _, _ = one_stage
    both = [step.compile(tasks_in_flight=tasks, **OPTIONS) for tasks in (1, 2)]
    for latency, number in ((0.0, 1), (0.5, 2)):
        costs = cg.Costs(link=cg.Link(latency=latency))
        dump = tmp_path if number == 2 else None
        chosen = step.compile(tasks_in_flight=costs, dump=dump, **OPTIONS)
        times = [compiled.simulate(costs).makespan for compiled in both]
        assert chosen.simulate(costs).makespan == min(times)
        assert chosen.module == both[number - 1].module
        assert chosen.schedule_report.startswith(f"{number} task{'s' * (number > 1)} of a rank")
        assert f": {times[0]:.6g} ms with 1, {times[1]:.6g} ms" in chosen.schedule_report
    (said,) = {path.read_text() for path in tmp_path.glob("*schedule.txt")}
    assert said == f"{chosen.schedule_report}\n"


def test_two_tasks_keep_to_the_limit_of_memory(
    one_stage: tuple[Lowered, list[nn.Module], Batch],
) -> None:
    step, _, _ = one_stage
    costs = cg.Costs(link=cg.Link(latency=0.5))
    peaks = [
        max(plan.peak for plan in step.compile(tasks_in_flight=n, **OPTIONS).memory_analysis())
        for n in (1, 2)
    ]
    assert peaks[0] < peaks[1]
    for limit, number in zip(peaks, (1, 2), strict=True):
        compiled = step.compile(tasks_in_flight=costs, memory=limit, **OPTIONS)
        assert compiled.schedule_report.startswith(f"{number} task")
        assert ("what memory allows" in compiled.schedule_report) == (number == 1)


def test_costs_are_measured_and_leave_no_trace(
    one_stage: tuple[Lowered, list[nn.Module], Batch],
) -> None:
    step, instances, batch = one_stage
    before = [p.detach().clone() for each in instances for p in each.parameters()]
    chosen = step.compile(tasks_in_flight="auto", **OPTIONS)
    after = [p.detach().clone() for each in instances for p in each.parameters()]
    assert all(map(torch.equal, before, after))
    assert " of a rank in flight, " in chosen.schedule_report
    assert torch.isfinite(chosen(*batch))
    with pytest.raises(TypeError, match="'auto': a number here"):
        step.compile_optimistic(tasks_in_flight=cast("Any", "auto"))
