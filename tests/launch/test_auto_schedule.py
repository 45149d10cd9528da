"""A step compiled with `auto`: what it says of its choice, and costs that it measures itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with use_world(VirtualWorld(2)):
        yield


@cg.actor
class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


X = torch.ones(8, 4)


def lowered() -> cg.Lowered:
    torch.manual_seed(0)
    layers = [Layer.on(rank)() for rank in range(2)]

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in cg.microbatches(x, 4):
            for layer in layers:
                part = layer.forward(part)
            losses.append(part.square().mean())
        loss = cg.mean(losses)
        cg.backward(loss)
        for layer in layers:
            layer.update()
        return loss

    return step.lower(X)


def test_it_says_what_it_has_chosen_and_why(tmp_path: Path) -> None:
    schedule = cg.schedules.auto(4, cg.Costs(1.0, 1.0, 0.5))
    compiled = lowered().compile(schedule=schedule, dump=tmp_path)
    report = compiled.schedule_report
    assert report.startswith("auto, 2 stages on 2 ranks, 4 microbatches: 0.0 % above the bound")
    assert "with the given costs; its programs are the fastest on paper of" in report
    (text,) = tmp_path.glob("*.schedule.txt")
    assert text.read_text() == f"{report}\n"
    assert (
        "equal costs of all tasks"
        in lowered().compile(schedule=cg.schedules.auto()).schedule_report
    )


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


def test_several_signatures_are_not_measured() -> None:
    layer = Layer.on(0)()

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return layer.forward(x)

    several = step.lower_many([torch.ones(2, 4), torch.ones(3, 4)])
    with pytest.raises(ValueError, match=r"measure its costs with cg\.measure"):
        several.compile(schedule=cg.schedules.auto(measure=True))
