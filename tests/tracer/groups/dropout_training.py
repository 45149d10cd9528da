"""Layers with dropout, whose plan cuts the sequence, beside the same layers in one process.

What a step draws is known from its seed and its calls. So the oracle is plain PyTorch in one
process, with attention written down (`written_dropout.py`), from the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import cg
from cg.backends.program.random import call_seeds
from cg.ir.ops import Call
from cg.tracer.values.plan import AttentionForm

from ..layouts.self_attention import SelfAttention
from ..written_dropout import WrittenDropout
from .training import cut_out, region_of

SEED = 7
LENGTH = 13


class PlainLayer(SelfAttention):
    """A layer of attention in float64, with three dropouts.

    Args:
        mask: one of `MASKS`.
        is_again: whether a checkpoint computes it again for the backward.
    """

    def __init__(self, mask: str, is_again: bool = False) -> None:
        super().__init__(4, 2, mask, rate=0.3)
        self.is_again = is_again
        self.gradients: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.is_again:
            made: Tensor = checkpoint(self.layer, x, use_reentrant=False)
            return made
        return self.layer(x)

    def layer(self, x: Tensor) -> Tensor:
        return x + functional.dropout(super().forward(functional.dropout(x, 0.2)), 0.4)

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(h, y)

    def update(self) -> None:
        self.gradients = {
            name: parameter.grad.clone()
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }
        self.zero_grad()


@cg.actor
class Layer(PlainLayer):
    """The same on a mesh."""


Places = Callable[[], Sequence[Any]]
MESHES: dict[str, Places] = {
    "one": lambda: (cg.mesh(dp=1, cp=1, tp=1),),
    "cp2": lambda: (cg.mesh(dp=1, cp=2, tp=1),),
    "cp3": lambda: (cg.mesh(dp=1, cp=3, tp=1),),
    "cp4": lambda: (cg.mesh(dp=1, cp=4, tp=1),),
    "cp2-tp2": lambda: (cg.mesh(dp=1, cp=2, tp=2),),
    "dp2-cp2": lambda: (cg.mesh(dp=2, cp=2, tp=1),),
    "pp2-cp2": lambda: cg.mesh(pp=2, dp=1, cp=2, tp=1).unbind("pp"),
    "3-and-1": lambda: (cg.mesh(dp=1, cp=3, tp=1), cg.mesh([3], dp=1, cp=1, tp=1)),
}
FORMS: dict[str, tuple[AttentionForm | None, Literal["rows", "zigzag"]]] = {
    "best": (None, "rows"),
    "gather": ("gather", "zigzag"),
    "ring": ("ring", "rows"),
    "zigzag-ring": ("ring", "zigzag"),
}


def plan_of(form: str) -> cg.ShardingPlan:
    attention, order = FORMS[form]
    shardings = {
        "forward(x)|loss(h)|loss(y)": cg.cut(0, "dp") & cg.cut(1, "cp", order=order),
        "[qkv].weight|[qkv].bias": cg.cut(0, "tp"),
        "o.weight": cg.cut(1, "tp"),
    }
    return cg.plan(shardings, attention=attention)


def step_of(stages: Sequence[Any], remat: bool) -> Any:
    """A step of two microbatches; gives their losses, and what goes into them."""

    def step(x: Tensor, y: Tensor) -> Any:
        losses, outputs = [], []
        for part, target in cg.microbatches((x, y), 2):
            for stage in stages:
                part = (cg.remat(stage.forward) if remat else stage.forward)(part)
            outputs.append(part)
            losses.append(stages[-1].loss(part, target))
        cg.backward(cg.mean(losses))
        for stage in stages:
            stage.update()
        return losses, outputs

    return cg.trace(step)


def batch() -> Tensor:
    shape = (2, 4, LENGTH, 6)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()


def alone(plain: Sequence[PlainLayer], keys: Sequence[int], execution: int) -> Any:
    """The step in one process, from the draws of the calls with these keys."""
    x, y = batch()
    losses, outputs = [], []
    of_calls = iter(keys)
    with WrittenDropout(), torch.random.fork_rng():
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            for stage in plain:
                torch.manual_seed(call_seeds(SEED, next(of_calls))(execution))
                part = stage(part)
            outputs.append(part)
            losses.append(plain[-1].loss(part, target))
        torch.stack(losses).mean().backward()
    for stage in plain:
        stage.update()
    return [each.detach() for each in losses], [each.detach() for each in outputs]


def check(
    places: Sequence[Any],
    form: str,
    mask: str = "causal",
    *,
    is_again: bool = False,
    remat: bool = False,
    store: Any = cg.whole,
) -> None:
    """Two executions of a step equal those of one process, with their gradients."""
    stages = [
        Layer.on(place, plan=plan_of(form), store=store)(mask, is_again)  # type: ignore[attr-defined]
        for place in places
    ]
    plain = [PlainLayer(mask) for _ in places]
    lowered = step_of(stages, remat).lower(*batch())
    calls = [op for op in lowered.trace.module.program.ops if isinstance(op, Call)]
    keys = [call.key for call in calls if call.key is not None]
    assert len({*keys}) == len(keys) >= 2 * len(places), "microbatches and stages draw others"
    schedule = cg.schedules.zb_h1() if len(places) > 1 else cg.schedules.one_f_one_b()
    compiled = lowered.compile(schedule=schedule, seed=SEED)
    for execution in range(2):
        found, expected = compiled(*batch()), alone(plain, keys[: 2 * len(places)], execution)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        for stage, other in zip(stages, plain, strict=True):
            for rank, instance in stage.instances.items():
                for name, whole in other.gradients.items():
                    mine = instance.gradients[name]
                    theirs = cut_out(whole, region_of(stage, name, rank))
                    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
