"""Choices of routers and limits to them have the values of one process on any mesh."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from .decoder_runs import EXAMPLE, batches
from .test_experts import model_of


def taken_one_by_one(ids: list[list[int]], most: float) -> list[list[bool]]:
    """The definition: a choice after the other, tokens first."""
    seen: Counter[int] = Counter()
    result = []
    for token in ids:
        result.append([])
        for expert in token:
            seen[expert] += 1
            result[-1].append(seen[expert] <= most)
    return result


@given(
    st.integers(1, 3).flatmap(
        lambda k: st.lists(st.lists(st.integers(0, 3), min_size=k, max_size=k), min_size=1)
    ),
    st.sampled_from([0.01, 0.3, 0.5, 1.0, 1.25, 4.0, 9.0]),
)
def test_capacity_is_filled_in_order(ids: list[list[int]], capacity: float) -> None:
    tensor = torch.tensor(ids)
    expected = taken_one_by_one(ids, capacity * tensor.numel() / 4)
    assert cg.expert_capacity(tensor, 4, capacity).tolist() == expected


@cg.actor
class Chooser(nn.Module):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        taken = cg.expert_capacity(ids, 4, 0.75)
        return taken * 1, (~taken).sum()


@pytest.mark.parametrize("cut", [cg.cut(0, "dp", "ep"), cg.cut(0, "ep"), cg.whole], ids=str)
def test_capacity_on_a_mesh(cut: Any) -> None:
    """Ten tokens are no equal pieces on four ranks."""
    ids = torch.randint(4, (10, 2), generator=torch.Generator().manual_seed(0))
    with use_world(VirtualWorld(4)):
        actor = Chooser.on(cg.mesh(dp=2, ep=2), plan={"forward(ids)": cut})()  # type: ignore[attr-defined]
        taken, dropped = cg.trace(actor.forward)(ids)
    expected = torch.tensor(taken_one_by_one(ids.tolist(), 3.75))
    assert torch.equal(taken, expected * 1)
    assert dropped == (~expected).sum() > 0


@pytest.mark.parametrize(
    ("ids", "experts", "capacity", "message"),
    [
        (torch.zeros(2), 4, 1.0, r"takes integers \[tokens, choices\], not torch.float32 \[2\]"),
        (torch.zeros(2, 2, dtype=torch.int64), 0, 1.0, "positive numbers, not experts=0"),
        (torch.zeros(2, 2, dtype=torch.int64), 4, 0.0, "capacity=0.0"),
    ],
)
def test_capacities_that_are_refused(
    ids: Tensor, experts: int, capacity: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cg.expert_capacity(ids, experts, capacity)


@cg.actor
class Counting(nn.Module):
    def __init__(self, cuts: Any) -> None:
        super().__init__()
        self.part = cuts.part(0)

    def forward(self, ids: Tensor) -> Any:
        with cg.expert_choices(self.part, capacity=0.75) as choices:
            logits = self.part(None, input_ids=ids, use_cache=False).logits
        return logits.float(), choices.counts(), choices.dropped()


def test_choices_of_the_whole_batch_are_counted() -> None:
    model, (ids, *_) = model_of("Mixtral"), batches()
    model.set_experts_implementation("eager")  # type: ignore[operator]
    with cg.expert_choices(model, capacity=0.75) as expected:
        assert expected.layers == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
        logits = model(input_ids=ids, use_cache=False).logits
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert expected.counts().sum(1).tolist() == [ids.numel() * 2] * 2
    assert expected.dropped().sum() > 0
    assert [tuple(t.shape) for t in expected.logits] == [(ids.numel(), 4)] * 2
    with use_world(VirtualWorld(4)):
        cuts = cg.cut_layers(model, 1, example=EXAMPLE)
        plan = cg.plans.hf(model, batch=None, experts="ep") | cg.plan(
            {"forward(ids)": cg.cut(0, "dp", "ep")}
        )
        on = Counting.on  # type: ignore[attr-defined]
        actor = on(cg.mesh(dp=2, ep=2, tp=1), plan=plan)(cuts)
        given_logits, counts, dropped = cg.trace(actor.forward)(ids)
    assert torch.equal(counts, expected.counts())
    assert torch.equal(dropped, expected.dropped())
    torch.testing.assert_close(given_logits, logits.float())


def test_a_model_without_experts_has_no_choices() -> None:
    with cg.expert_choices(nn.Linear(2, 2)) as choices:
        pass
    assert not choices.ids
    assert not choices.logits


def test_a_limit_that_a_backward_would_lose_is_refused() -> None:
    model = model_of("Mixtral").train()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    message = "computed again in the backward .* call gradient_checkpointing_disable"
    with pytest.raises(ValueError, match=message), cg.expert_choices(model, capacity=1.0):
        pass
    with cg.expert_choices(model):
        pass
    model.gradient_checkpointing_disable()  # type: ignore[operator]
    with cg.expert_choices(model, capacity=1.0):
        pass


def test_an_auxiliary_loss_of_a_part_is_refused() -> None:
    """It would be that of the last part's layers."""
    model, (ids, *_) = model_of("Mixtral"), batches()
    cuts = cg.cut_layers(model, 2, example=EXAMPLE)
    moving = cuts.part(0)(None, input_ids=ids, use_cache=False)
    last = cuts.part(1)
    with pytest.raises(ValueError, match="of its own layers alone; give output_router_logits=Fal"):
        last(moving, input_ids=ids, use_cache=False, output_router_logits=True)
    last(moving, input_ids=ids, use_cache=False)
    model.config.output_router_logits = True  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="computes inside and does not give as its output"):
        cg.cut_layers(model, 2, example=EXAMPLE)
