"""`torch.utils.checkpoint` in a method: what its policy saves is not computed again."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .function_tools import check_equal, trace_vjp

_ATEN = torch.ops.aten
PRODUCT = _ATEN.addmm.default
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


def choosing(policy: CheckpointPolicy) -> Any:
    """Policies that do this with products of matrices, and compute the rest again."""

    def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if operator == PRODUCT else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, choose)


class Layer(nn.Module):
    def __init__(self, context: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down, self.context = nn.Linear(4, 4), nn.Linear(4, 4), context

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.sigmoid(self.up(x)))) * 2

    def forward(self, x: Tensor) -> Tensor:
        options = {} if self.context is None else {"context_fn": self.context}
        return checkpoint(self.inner, x, use_reentrant=False, **options)  # type: ignore[no-any-return]


class Layers(nn.Module):
    def __init__(self, *contexts: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, contexts))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
POLICIES: dict[str, tuple[Any, int]] = {
    "none": (None, 2),
    "must save": (choosing(SAVE), 0),
    "prefer save": (choosing(CheckpointPolicy.PREFER_SAVE), 0),
    "must recompute": (choosing(RECOMPUTE), 2),
    "a list": (partial(create_selective_checkpoint_contexts, [PRODUCT]), 0),
    "an empty list": (partial(create_selective_checkpoint_contexts, []), 2),
}
"""Each with the products that the backward of a layer computes again."""


def again(*contexts: Any) -> Counter[object]:
    """The operators of a backward."""
    vjp = trace_vjp(Layers(*contexts), "forward", (0,), (0,), X)
    return Counter(node.target for node in vjp.second.only_body.graph_and_lines()[0].nodes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", POLICIES)
def test_a_backward_computes_again_what_its_policy_does_not_save(name: str) -> None:
    context, products = POLICIES[name]
    operators = again(context)
    assert operators[PRODUCT] == products
    assert operators[_ATEN.sigmoid.default] == operators[_ATEN.tanh.default] == 1


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_those_of_plain_python(name: str) -> None:
    context, _ = POLICIES[name]
    check_equal(Layers(context, context), "forward", X)


def test_each_layer_has_its_own_policy() -> None:
    contexts = (choosing(SAVE), choosing(RECOMPUTE), None, choosing(SAVE))
    assert again(*contexts)[PRODUCT] == 4
    check_equal(Layers(*contexts), "forward", X)
