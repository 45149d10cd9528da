"""Errors of methods that cannot be traced say what to do instead."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cg.tracer.errors import TraceError

from .function_tools import check_equal, trace

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


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("copies", "make copies in the constructor"),
        ("old_weight_norm", "torch.nn.utils.parametrizations"),
        ("scripted", "use the Python module that it was made from"),
        ("conditional", "torch.where"),
        ("empty", "as of an empty batch"),
        ("distribution", "validate_args=False"),
    ],
)
def test_a_remedy(method: str, remedy: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(Actor(), method, torch.ones(2, 3))
    assert remedy in caught.value.remedy
    assert caught.value.loc is not None
    assert caught.value.loc.function == method


class Shapes(nn.Module):
    """Results whose shapes depend on values, and what does the same with known shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def masks(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[x > 0].mean()

    def masks_with_known_shapes(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        return torch.where(mask, self.linear(x), 0).sum() / mask.sum()

    def selects(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).masked_select(x > 0).mean()

    def chooses(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[(x[:, 0] > 0).nonzero()[:, 0]].mean()

    def chooses_with_known_shapes(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[torch.nonzero_static(x[:, 0] > 0, size=2)[:, 0]].mean()

    def counts(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mean() * torch.bincount(x.argmax(1), minlength=3).amax()

    def counts_with_known_shapes(self, x: torch.Tensor) -> torch.Tensor:
        best = x.argmax(1)
        counts = torch.zeros(3, dtype=torch.int64).scatter_add(0, best, torch.ones_like(best))
        return self.linear(x).mean() * counts.amax()

    def repeats(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).repeat_interleave(x.argmax(1) + 1, 0).mean()

    def repeats_with_known_shapes(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).repeat_interleave(x.argmax(1) + 1, 0, output_size=2).mean()

    def aligns(self, x: torch.Tensor) -> torch.Tensor:
        log_probs = self.linear(x).log_softmax(-1)[:, None].expand(2, 2, 3)
        lengths = torch.tensor([2, 2]), torch.tensor([1, 2])
        return nn.functional.ctc_loss(log_probs, torch.tensor([1, 2, 1]), *lengths)

    def aligns_with_known_shapes(self, x: torch.Tensor) -> torch.Tensor:
        log_probs = self.linear(x).log_softmax(-1)[:, None].expand(2, 2, 3)
        lengths = torch.tensor([2, 2]), torch.tensor([1, 2])
        return nn.functional.ctc_loss(log_probs, torch.tensor([[1, 0], [2, 1]]), *lengths)

    def merges(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mean() * torch.unique_consecutive(x.argmax(1)).amax()


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("masks", "torch.where(mask, x, 0) instead of x[mask], and divide a mean by mask.sum()"),
        ("selects", "torch.where(mask, x, 0) instead of x[mask], and divide a mean by mask.sum()"),
        ("chooses", "torch.nonzero_static(mask, size=n)"),
        ("counts", "torch.zeros(n, dtype=torch.int64).scatter_add(0, x, torch.ones_like(x))"),
        ("repeats", "say how many there are in all by output_size=n"),
        ("aligns", "pad the targets, [rows, longest], and give the lengths as tensors [rows]"),
        ("merges", "torch.library.custom_op with register_fake and register_autograd"),
    ],
)
def test_shapes_that_depend_on_values(method: str, remedy: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(Shapes(), method, torch.ones(2, 3))
    assert remedy in caught.value.remedy
    assert caught.value.loc is not None
    assert caught.value.loc.function == method


@pytest.mark.parametrize("method", ["masks", "chooses", "counts", "repeats", "aligns"])
def test_the_form_of_known_shapes_does_the_same(method: str) -> None:
    """Its values and gradients are those of what is refused."""
    x = torch.tensor([[2.0, -1.0, 0.5], [1.0, -2.0, 0.3]])
    actor, known = Shapes(), f"{method}_with_known_shapes"
    parameters = list(actor.parameters())
    refused, accepted = getattr(actor, method)(x), getattr(actor, known)(x)
    torch.testing.assert_close(refused, accepted)
    pairs = zip(
        torch.autograd.grad(refused, parameters),
        torch.autograd.grad(accepted, parameters),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other)
    check_equal(actor, known, x)


class Recurrent(nn.Module):
    """It keeps its last result."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("last", torch.zeros(2, 3))
        self.detaches = detaches

    def copies(self, x: torch.Tensor) -> torch.Tensor:
        result = self.linear(x + self.last)
        self.last.copy_(result.detach() if self.detaches else result)
        return result

    def rebinds(self, x: torch.Tensor) -> torch.Tensor:
        result = self.linear(x + self.last)
        self.last = result.detach() if self.detaches else result
        return result


@pytest.mark.parametrize("method", ["copies", "rebinds"])
def test_a_gradient_through_earlier_steps(method: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(Recurrent(detaches=False), method, torch.ones(2, 3))
    assert "detach()" in caught.value.remedy
    trace(Recurrent(detaches=True), method, torch.ones(2, 3))
