"""Actors on meshes train as the same models in one process: outputs, gradients and parameters.

Models of integers do so bit for bit, since nothing is rounded; others as closely as sums in
another order are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import cg
from cg.backends.fusion import fuse

from ...worlds import virtual_world
from .training import (
    HOMES,
    PLANS,
    Attention,
    Block,
    Held,
    Language,
    Mlp,
    Model,
    Residual,
    Written,
    assert_close,
    batch,
    compare,
    cut_out,
    meshes,
    region_of,
    run_steps,
    step_of,
    train,
)

pytestmark = pytest.mark.timeout(120)

MESHES = ["dp", "tp", "dp-tp", "tp-dp", "pp-dp-tp", "3+1", "overlap"]

_world = virtual_world(8, threads=1, scope="module")


def chain(cls: type[Any], count: int, *args: Any) -> Model:
    """So many stages of a class, of different seeds."""
    return Model([(cls, (seed, *args)) for seed in range(count)])


@pytest.mark.parametrize("name", MESHES)
def test_an_mlp_of_integers_trains_exactly(name: str) -> None:
    """With microbatches of 7 rows, on three ranks, say."""
    places = meshes(name)
    model = chain(Mlp, len(places), "signs")
    train(model, model.on(places), 14, 2, None, "integers")


@pytest.mark.parametrize("name", ["dp", "tp-dp", "overlap"])
def test_ranks_may_have_no_rows(name: str) -> None:
    places = meshes(name)
    model = chain(Mlp, len(places), "signs")
    train(model, model.on(places), 2, 1, None, "integers")


@pytest.mark.parametrize(("name", "rows"), [("dp", 2), ("dp-tp", 7), ("tp-dp", 2)])
def test_attention_of_integers_trains_exactly(name: str, rows: int) -> None:
    model = chain(Attention, 1, "signs")
    train(model, model.on(meshes(name)), rows, 1, None, "integers", steps=2)


@pytest.mark.parametrize(
    ("name", "cls", "optimizer"),
    [
        ("overlap", Block, "adam"),
        ("3+1", Attention, "adam"),
        ("pp-dp-tp", Attention, "sgd"),
        pytest.param("dp", Block, "sgd", marks=pytest.mark.slow),
        pytest.param("pp-dp-tp", Block, "adam", marks=pytest.mark.slow),
        pytest.param("dp-tp", Attention, "adam", marks=pytest.mark.slow),
        ("dp-tp", Written, "adam"),
    ],
)
def test_layers_train_as_in_one_process(name: str, cls: type[Any], optimizer: str) -> None:
    places = meshes(name)
    model = chain(cls, len(places), optimizer)
    train(model, model.on(places), 14, 2, None, "reals")


@pytest.mark.parametrize(("name", "rows"), [("dp", 2), ("tp", 7), ("dp-tp", 7), ("tp-dp", 2)])
def test_a_cut_vocabulary_trains_as_in_one_process(name: str, rows: int) -> None:
    model = chain(Language, 1)
    train(model, model.on(meshes(name)), rows, 1, None, "words")


@pytest.mark.parametrize(
    ("name", "schedule"), [("tp", None), ("tp-dp", "1f1b"), ("pp-dp-tp", "zb-h1")]
)
def test_the_gradient_of_a_residual_is_gathered(name: str, schedule: str | None) -> None:
    """The method's result is cut, and what it takes is whole; so the next stage gathers it."""
    places = meshes(name) * (1 if name.startswith("pp") else 2)
    model = chain(Residual, 2, "signs")
    train(model, model.on(places), 14, 2, schedule, "integers")


@dataclass(frozen=True)
class Traced:
    """Stages of integers, their step, and the numbers that their instances began with."""

    model: Model
    stages: list[Any]
    lowered: cg.Lowered
    first: list[tuple[nn.Module, dict[str, torch.Tensor]]]

    def restart(self) -> None:
        """Have the stages be as new; their optimizer has no state."""
        for instance, numbers in self.first:
            instance.load_state_dict(numbers)


@cache
def traced(name: str, homes: tuple[int, ...]) -> Traced:
    """Trace a step of stages on meshes once, for all schedules that take them."""
    places = [meshes(name)[home] for home in homes]
    model = chain(Mlp, len(places), "signs")
    stages = model.on(places)
    lowered = cg.trace(step_of(stages, 4)).lower(*batch(0, 20, "integers"))
    instances = [one for stage in stages for one in stage.instances.values()]
    first = [
        (one, {path: tensor.clone() for path, tensor in one.state_dict().items()})
        for one in instances
    ]
    return Traced(model, stages, lowered, first)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *(("pp-dp-tp", each) for each in cg.schedules.names()),
        ("3+1", "zb-h1"),
        ("overlap", "1f1b"),
        ("overlap", "zb-h2"),
    ],
)
def test_schedules_change_no_bit(name: str, schedule: str) -> None:
    """Pipelines of stages that are data and tensor parallel, under every schedule there is."""
    made = traced(name, HOMES.get(schedule, (0, 1)))
    made.restart()
    compiled = made.lowered.compile(schedule=cg.schedules.by_name(schedule))
    run_steps(compiled, made.model, made.stages, 20, 4, "integers", 2)


@pytest.mark.parametrize(
    ("name", "cls", "schedule"),
    [
        ("pp-dp-tp", Attention, "zb-h1"),
        pytest.param("tp-dp", Block, "1f1b", marks=pytest.mark.slow),
        pytest.param("pp-dp-tp", Block, "zb-h1", marks=pytest.mark.slow),
        ("overlap", Written, "gpipe"),
    ],
)
def test_backwards_for_fused_kernels_train_alike(
    monkeypatch: pytest.MonkeyPatch, name: str, cls: type[Any], schedule: str
) -> None:
    """They compute again what they can, and exchange nothing again."""
    monkeypatch.setitem(
        fuse.FUSERS, "graph", lambda: lambda module, _: lambda values: module(*values)
    )
    places = meshes(name)
    model = chain(cls, len(places), "sgd")
    train(model, model.on(places), 14, 2, schedule, "reals", fuse="graph")


@pytest.mark.parametrize("name", ["dp-tp", "pp-dp-tp"])
def test_dropout_draws_what_one_rank_draws(name: str) -> None:
    """Whatever the layout: the numbers are those of the whole tensors."""
    places = meshes(name)
    model = chain(Block, len(places), "sgd", 0.3)
    cut, whole = model.on(places), model.on([cg.mesh([7], dp=1, tp=1)] * len(places))
    steps = [
        cg.trace(step_of(stages, 2)).lower(*batch(0, 6, "reals")).compile(seed=5)
        for stages in (cut, whole)
    ]
    for seed in range(3):
        found, expected = (step(*batch(seed, 6, "reals")) for step in steps)
        assert_close(found, expected, False, f"step {seed}")
        for stage, other in zip(cut, whole, strict=True):
            for rank, instance in stage.instances.items():
                for path, tensor in instance.state_dict().items():
                    expected = cut_out(other.local.state_dict()[path], region_of(stage, path, rank))
                    assert_close(tensor, expected, False, f"{path} on rank {rank}")


def test_gradients_add_up_over_backwards_updates_and_steps() -> None:
    """And a forward may be computed again by the backward."""
    stage = Block.on(cg.mesh(dp=2, tp=2), plan=PLANS[Block])(1, "sgd")  # type: ignore[attr-defined]
    plain = Block(1, "sgd")

    def step(x: Any, y: Any) -> Any:
        for _ in range(2):
            cg.backward(stage.loss(cg.remat(stage.forward)(x), y))
            cg.backward(stage.loss(stage.forward(2 * x), y))
            stage.update()
        loss = stage.loss(stage.forward(x), y)
        cg.backward(loss)
        return loss

    compiled = cg.trace(step).lower(*batch(0, 5, "reals")).compile()
    for seed in range(2):
        x, y = batch(seed, 5, "reals")
        found = compiled(x, y)
        for _ in range(2):
            plain.loss(plain.forward(x), y).backward()
            plain.loss(plain.forward(2 * x), y).backward()
            plain.update()
        loss = plain.loss(plain.forward(x), y)
        loss.backward()
        assert_close(found, loss.detach(), False, "the loss")
        for rank, instance in stage.instances.items():
            compare(stage, rank, instance, Held.of(plain), False)
            mine = dict(instance.named_parameters())
            for name, parameter in plain.named_parameters():
                left = cut_out(parameter.grad, region_of(stage, name, rank))
                assert_close(mine[name].grad, left, False, f"what is left of {name}")
