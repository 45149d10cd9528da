"""A step compiled with `auto`: what it says of its choice, and costs that it measures itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from ..stages import TrainedStage, mean_loss
from ..tracer.groups.training import Block, Model, batch, step_of
from ..worlds import virtual_world

two_ranks = virtual_world(2)


@cg.actor
class Wide(torch.nn.Module):
    """A layer that saves much more than its input: 64 times as much."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 512), torch.nn.Linear(512, 8)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if self.drop:
            hidden = torch.nn.functional.dropout(hidden, self.drop)
        return self.down(hidden)


X = torch.ones(8, 4)
WIDE = torch.linspace(-1, 1, 16 * 8 * 8).reshape(128, 8)
HIDDEN = 16 * 512 * 4
"""Bytes of a wide layer's hidden values of one microbatch."""


def wide(drop: float = 0.0) -> tuple[list[Any], cg.Step]:
    """Four wide stages on two ranks, with 8 microbatches."""
    torch.manual_seed(0)
    layers = [Wide.on(stage % 2)(drop) for stage in range(4)]

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return mean_loss(layers, x, 8)

    return layers, step


def gradients(layers: list[Any]) -> list[torch.Tensor]:
    return [p.grad for layer in layers for p in layer.local.parameters()]


def lowered() -> cg.Lowered:
    torch.manual_seed(0)
    layers = [TrainedStage.on(rank)(rank) for rank in range(2)]

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = mean_loss(layers, x, 4)
        for layer in layers:
            layer.update()
        return loss

    return step.lower(X)


def test_it_says_what_it_has_chosen_and_why(tmp_path: Path) -> None:
    schedule = cg.schedules.auto(4, cg.Costs(1.0, 1.0, 0.5))
    step = lowered()
    compiled = step.compile(schedule=schedule, dump=tmp_path)
    report = compiled.schedule_report
    assert report.startswith("auto, 2 stages on 2 ranks, 4 microbatches: 0.0 % above the bound")
    assert "with the given costs; its programs are the fastest on paper of" in report
    (text,) = tmp_path.glob("*.schedule.txt")
    assert text.read_text() == f"{report}\n"
    (costs,) = tmp_path.glob("*.costs.json")
    assert cg.Costs.load(costs) == cg.Costs(1.0, 1.0, 0.5)
    free = step.compile(schedule=cg.schedules.auto())
    assert "equal costs of all tasks" in free.schedule_report


def test_other_schedules_have_no_choice_to_report(tmp_path: Path) -> None:
    compiled = lowered().compile(schedule=cg.schedules.zb_h1(), dump=tmp_path)
    assert compiled.schedule_report == ""
    assert not list(tmp_path.glob("*.schedule.txt"))


def test_it_measures_and_leaves_actors_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    plain = lowered().compile(schedule=cg.schedules.zb_h1())
    step = lowered()
    compiled = step.compile(schedule=cg.schedules.auto(4, measure=file))
    for _ in range(3):  # updates of weights included
        assert torch.equal(compiled(X), plain(X))
    costs = cg.Costs.load(file)
    assert len(costs.tf) == 2
    assert costs.activation_bytes is None  # of the step, whoever pays for it
    before = file.read_text()
    again = step.compile(schedule=cg.schedules.auto(4, measure=file))
    assert file.read_text() == before
    assert again.schedule_report == compiled.schedule_report


def test_it_measures_without_a_file() -> None:
    compiled = lowered().compile(schedule=cg.schedules.auto(measure=True))
    assert "with the given costs" in compiled.schedule_report


def test_a_file_that_holds_no_costs_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text("[]")
    with pytest.raises(ValueError, match="costs are an object"):
        lowered().compile(schedule=cg.schedules.auto(measure=file))


COSTS = cg.Costs(1.0, 1.0, 0.8)


def test_stages_recompute_in_a_memory_that_is_short_for_what_they_save() -> None:
    layers, step = wide()
    lowered = step.lower(WIDE)
    plain = lowered.compile(schedule=cg.schedules.auto(4, COSTS))
    loss, expected = plain(WIDE), gradients(layers)
    assert max(plan.values for plan in plain.memory_analysis()) > 6 * HIDDEN
    for layer in layers:
        layer.local.zero_grad()
    # A stage saves its hidden values, and B leaves their gradients to W, too.
    room = 3 * HIDDEN
    with pytest.raises(ValueError, match=r"may hold 98304, but one microbatch takes \d+; auto"):
        lowered.compile(schedule=cg.schedules.auto(costs=COSTS, max_bytes=room))
    schedule = cg.schedules.auto(costs=COSTS, max_bytes=room, remat=True)
    compiled = lowered.compile(schedule=schedule)
    assert "recompute" in compiled.schedule_report
    assert torch.equal(compiled(WIDE), loss)
    found = gradients(layers)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # Beside activations a rank holds messages, which are small.
    assert max(plan.values for plan in compiled.memory_analysis()) <= 1.03 * room


def test_no_stage_recomputes_where_memory_suffices() -> None:
    _, step = wide()
    compiled = step.lower(WIDE).compile(schedule=cg.schedules.auto(4, COSTS, remat=True))
    assert "recompute" not in compiled.schedule_report


def test_what_cannot_be_computed_again_is_not_chosen() -> None:
    _, step = wide(drop=0.5)
    lowered = step.lower(WIDE)
    schedule = cg.schedules.auto(costs=COSTS, max_bytes=8 * HIDDEN, remat=True)
    assert "recompute" not in lowered.compile(schedule=schedule).schedule_report


def test_memory_in_bytes_is_measured_in_the_step(tmp_path: Path) -> None:
    """What stages hold need not be given, with costs or without; costs of files know no memory."""
    _, step = wide()
    file = tmp_path / "costs.json"
    COSTS.save(file)
    lowered = step.lower(WIDE)
    for room in (5 * HIDDEN, 9 * HIDDEN):
        compiled = lowered.compile(schedule=cg.schedules.auto(max_bytes=room, measure=file))
        most = max(plan.values for plan in compiled.memory_analysis())
        assert 0.6 * room <= most <= 1.05 * room
    assert cg.Costs.load(file) == COSTS
    compiled = lowered.compile(schedule=cg.schedules.auto(max_bytes=9 * HIDDEN))
    assert "with equal costs of all tasks" in compiled.schedule_report


def test_groups_of_ranks_recompute_and_are_measured() -> None:
    """With updates of weights, so that what a measurement does must be undone on all ranks."""
    found = []
    for schedule in (
        cg.schedules.one_f_one_b(),
        cg.schedules.auto(1.6, cg.Costs(0.2, 1.0, 1.0), remat=True),
        cg.schedules.auto(max_bytes=3000, measure=True),
    ):
        with use_world(VirtualWorld(4)):
            stages = Model([(Block, (seed, "sgd")) for seed in range(2)]).on(
                cg.mesh(pp=2, dp=2, tp=1).unbind("pp")
            )
            lowered = cg.trace(step_of(stages, 4)).lower(*batch(0, 8, "reals"))
            compiled = lowered.compile(schedule=schedule)
            found.append([compiled(*batch(0, 8, "reals")) for _ in range(2)])
        reports = compiled.schedule_report
        assert ("stage 0 recomputes" in reports) == ("1.6" in str(schedule.options))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_steps_that_cannot_be_traced_again_say_what_to_do() -> None:
    _, step = wide()
    schedule = cg.schedules.auto(2, COSTS, remat=True)
    with pytest.raises(ValueError, match=r"use cg\.remat\(actor\.method\) in the step"):
        step.lower_many([WIDE]).compile(schedule=schedule)
    assumed = cg.schedules.auto(2, cg.Costs(mr=0.1, remat=(0,)))
    lowered = step.lower(WIDE)
    with pytest.raises(ValueError, match=r"stages \(0,\) recompute, which is for orders on paper"):
        lowered.compile(schedule=assumed)
    with pytest.raises(ValueError, match=r"cg\.remat\(actor\.method\) in the step says it"):
        lowered.compile_optimistic(schedule=schedule)


def test_several_signatures_are_not_measured() -> None:
    layer = TrainedStage.on(0)(0)

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return layer.forward(x)

    several = step.lower_many([torch.ones(2, 4), torch.ones(3, 4)])
    with pytest.raises(ValueError, match=r"measure its costs with cg\.measure"):
        several.compile(schedule=cg.schedules.auto(measure=True))
