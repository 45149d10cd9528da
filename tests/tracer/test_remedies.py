"""Errors of methods that cannot be traced say what to do instead."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cg.tracer.errors import TraceError

from .function_tools import trace

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.normed = torch.nn.utils.weight_norm(nn.Linear(3, 3))
        self.script = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))

    def copies(self, x: torch.Tensor) -> torch.Tensor:
        return copy.deepcopy(self.linear)(x)

    def old_weight_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x)

    def scripted(self, x: torch.Tensor) -> torch.Tensor:
        return self.script(x)

    def conditional(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))

    def empty(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 // x[:0].shape[0])

    def distribution(self, x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Dirichlet(x, validate_args=True).log_prob(x / 3)

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([1, 2], dtype=torch.int32)
        return torch._grouped_mm(x, self.linear.weight.expand(2, 3, 3), offs=ends)


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("copies", "make copies in the constructor"),
        ("old_weight_norm", "torch.nn.utils.parametrizations"),
        ("scripted", "use the Python module that it was made from"),
        ("conditional", "torch.where"),
        ("empty", "as of an empty batch"),
        ("distribution", "validate_args=False"),
        ("grouped", 'experts_implementation="batched_mm"'),
    ],
)
def test_a_remedy(method: str, remedy: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(Actor(), method, torch.ones(2, 3))
    assert remedy in caught.value.remedy
    assert caught.value.loc is not None
    assert caught.value.loc.function == method
