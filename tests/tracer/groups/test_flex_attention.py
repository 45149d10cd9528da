"""Layers of `flex_attention` train on meshes, under all schedules, as its formula does alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cg
from cg.ir.types import Mesh
from cg.passes.schedules import names
from cg.tracer.values.plan import AttentionForm

from ...worlds import virtual_world
from ..test_models import causal_lm
from .training import HEADS, HOMES, WIDTH, Model, RecordingStage, train


@cg.actor
class Flexible(RecordingStage):
    """Self-attention within documents, with a trained slope for each head.

    Torch has no derivative of `flex_attention` on hosts, so plain instances compute the formula.
    """

    def __init__(self, seed: int, optimizer: str = "adam") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.slopes = nn.Parameter(torch.randn(HEADS))
        self.register_buffer("documents", torch.tensor([0, 1, 1]))
        self.finish(optimizer, False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        attend = self.traced if isinstance(x, FakeTensor) else self.formula
        h = attend(q, k, v)
        return x + self.o(h.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, WIDTH // HEADS).transpose(1, 2)

    def traced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents, slopes = self.documents, self.slopes

        def within(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (documents[i] == documents[j])

        def nearer(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + (j - i) * slopes[h]

        length = q.shape[2]
        mask = create_block_mask(within, None, None, length, length, device=q.device)
        h = flex_attention(q, k, v, score_mod=nearer, block_mask=mask, enable_gqa=True)
        assert isinstance(h, Tensor)
        return h

    def formula(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        at = torch.arange(q.shape[2])
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        scores = scores + (at - at[:, None]) * self.slopes[:, None, None]
        same = self.documents[:, None] == self.documents
        return scores.masked_fill(~(same & (at[:, None] >= at)), -math.inf).softmax(-1) @ v


def plan_of(order: str) -> cg.ShardingPlan:
    tokens = cg.cut(1, "cp", order=order)  # type: ignore[arg-type]
    return cg.plan(
        {
            "forward(x)|loss(h)|loss(y)": cg.cut(0, "dp") & tokens,
            "[qkv].weight|slopes": cg.cut(0, "tp"),
            "o.weight": cg.cut(1, "tp"),
        }
    )


MESHES: dict[str, Callable[[], tuple[Mesh, ...]]] = {
    "cp2": lambda: (cg.mesh(dp=1, cp=2, tp=1),),
    "cp4": lambda: (cg.mesh(dp=1, cp=4, tp=1),),  # with an empty piece, of three tokens
    "dp2-tp2": lambda: (cg.mesh(dp=2, cp=1, tp=2),),
    "cp2-tp2": lambda: (cg.mesh(dp=1, cp=2, tp=2),),
    "pp2-dp2-cp2": lambda: cg.mesh(pp=2, dp=2, cp=2, tp=1).unbind("pp"),
}

_world = virtual_world(8, threads=1)


SLOW = pytest.mark.slow
CASES = [
    pytest.param(name, order, marks=() if (name, order) == ("cp2-tp2", "zigzag") else SLOW)
    for name, order in itertools.product(MESHES, ("rows", "zigzag"))
]


@pytest.mark.parametrize(("name", "order"), CASES)
def test_training(name: str, order: str) -> None:
    places = MESHES[name]()
    model = Model([(Flexible, (seed,)) for seed in range(len(places))])
    stages = model.on(places, plans=[plan_of(order)] * len(places))
    train(model, stages, 4, 2, "zb-h1" if len(places) > 1 else None, "reals", steps=2)


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=() if name == "1f1b" else SLOW) for name in names()]
)
def test_schedules(schedule: str) -> None:
    homes = HOMES.get(schedule, (0, 1))
    meshes = cg.mesh(pp=2, dp=1, cp=2, tp=1).unbind("pp")
    model = Model([(Flexible, (seed,)) for seed in range(len(homes))])
    stages = model.on([meshes[home] for home in homes], plans=[plan_of("rows")] * len(homes))
    train(model, stages, 8, 4, schedule, "reals", steps=1)


@SLOW
def test_fused() -> None:
    model = Model([(Flexible, (0,))])
    stages = model.on(MESHES["cp2"](), plans=[plan_of("rows")])
    train(model, stages, 4, 2, None, "reals", steps=1, fuse="inductor")


@pytest.mark.parametrize("form", ["ring", "heads"])
def test_keys_are_gathered_alone(form: AttentionForm) -> None:
    tokens = {"forward(x)|loss(h)|loss(y)": cg.cut(1, "cp")}
    x = torch.randn(2, 3, WIDTH)

    def step_by(attention: AttentionForm | None) -> Any:
        actor = Flexible.on(cg.mesh(cp=2), plan=cg.plan(tokens, attention=attention))(0)
        return cg.trace(lambda x: actor.forward(x))

    with pytest.raises(cg.LayoutError, match=f"by {form}, and flex_attention gathers") as caught:
        step_by(form)(x)
    assert "leave out attention=" in caught.value.remedy
    torch.testing.assert_close(step_by(None)(x).cpu(), Flexible(0).forward(x))


class Tuned(nn.Module):
    """A model of transformers, by the loss of rows of documents."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.model = causal_lm("llama", num_key_value_heads=2, attn_implementation=attention)

    def loss(self, input_ids: Tensor, labels: Tensor, **others: Any) -> Tensor:
        output = self.model(input_ids=input_ids, labels=labels, use_cache=False, **others)
        loss: Tensor = output.loss
        return loss

    def gradients(self) -> list[Tensor | None]:
        return [self.model.lm_head.weight.grad, self.model.model.norm.weight.grad]


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_documents_of_a_collator(attention: str) -> None:
    """Its borders of documents are those of positions; labels are those of the next tokens."""
    transformers = pytest.importorskip("transformers")
    rows = [torch.randint(30, (size,)).tolist() for size in (5, 8, 3)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = dict(collate([{"input_ids": row} for row in rows]))
    plain = Tuned("sdpa")
    total = torch.zeros(())
    for row in rows:
        ids = torch.tensor([row])
        total = total + plain.loss(ids, ids) * (len(row) - 1)
    expected = total / sum(len(row) - 1 for row in rows)
    expected.backward()
    plan = cg.plans.hf(plain.model, sequence="cp")
    actor = cg.actor(Tuned).on(cg.mesh(cp=2, tp=2), plan=plan)(attention)

    @cg.trace
    def step(batch: Any) -> Any:
        loss = actor.loss(**batch)
        cg.backward(loss)
        return loss, actor.gradients()

    loss, gradients = step(batch)
    torch.testing.assert_close(loss.cpu(), expected.detach())
    torch.testing.assert_close(gradients[1].cpu(), plain.gradients()[1])
