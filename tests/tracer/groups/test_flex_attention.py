"""Layers of `flex_attention` train on meshes, under all schedules, as its formula does alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.types import Mesh
from cg.launch.world.world import use_world
from cg.passes.schedules import names

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


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with use_world(VirtualWorld(8)):
        yield
    torch.set_num_threads(threads)


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
