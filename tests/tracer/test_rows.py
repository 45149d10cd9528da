"""Rows that the data chooses: computed with static shapes, and equal to what plain Python gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cg.tracer.errors import TraceError

from .function_tools import check_equal, trace

TOKENS, WIDTH, EXPERTS, CHOICES = 6, 4, 3, 2


class Chosen(nn.Module):
    """Experts, and adapters, in the ways in which models write them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(EXPERTS))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def _routed(self, x: torch.Tensor) -> Any:
        shares, ids = self.router(x).softmax(-1).topk(CHOICES)
        mask = functional.one_hot(ids, EXPERTS).permute(2, 1, 0)
        return shares, mask, torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()

    def by_tensors(self, x: torch.Tensor) -> torch.Tensor:
        shares, mask, hit = self._routed(x)
        result = torch.zeros_like(x)
        for expert in hit:
            expert = expert[0]
            with torch.no_grad():
                choice, token = torch.where(mask[expert])
            h = functional.linear(x[token], self.up[expert], self.bias[expert])
            gate, up = h.chunk(2, dim=-1)
            h = (functional.silu(gate) * up) @ self.down[expert].T
            h = h.view(-1, WIDTH) * shares[token, choice, None] * self.scale[expert]
            result.index_add_(0, token, h)
        return result

    def by_numbers(self, x: torch.Tensor) -> torch.Tensor:
        """The last expert computes nothing."""
        shares, mask, hit = self._routed(x)
        result = torch.zeros_like(x)
        for expert in hit:
            number = int(expert.item())
            choice, token = torch.where(mask[number].squeeze(0))
            if token.numel() == 0:
                continue
            h = x[token]
            if number < EXPERTS - 1:
                h = functional.linear(h, self.down[number]).tanh()
            result.index_add_(0, token, (h * shares[token, choice, None]).to(x.dtype))
        return result

    def by_counts(self, x: torch.Tensor) -> torch.Tensor:
        ids = self.router(x).argmax(-1)
        order = ids.argsort(stable=True)
        counts = functional.one_hot(ids, EXPERTS).sum(0).tolist()
        parts = x[order].split(counts, dim=0)
        rows = [functional.linear(parts[i], self.down[i]) for i in range(EXPERTS)]
        return torch.zeros_like(x).index_add(0, order, torch.cat(rows, dim=0))

    def by_masks(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for number, adapter in enumerate((self.first, self.second)):
            mask = (x[:, 0] > 0) == number
            h = functional.gelu(adapter(self.norm(x[mask])))
            result[mask] = h + adapter.bias
        return result + x

    def in_place(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        mask = x[:, 0] > 0
        x[mask] = self.first(x[mask])
        return x


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "method", ["by_tensors", "by_numbers", "by_counts", "by_masks", "in_place"]
)
def test_rows_are_those_of_plain_python(method: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    check_equal(Chosen(), method, x.requires_grad_(), tolerance=1e-5)


@pytest.mark.parametrize("method", ["by_tensors", "by_numbers", "by_counts", "by_masks"])
def test_classes_without_rows(method: str) -> None:
    x = torch.ones(TOKENS, WIDTH)  # all rows go the same way
    check_equal(Chosen(), method, x.requires_grad_(), tolerance=1e-5)


class Steep(nn.Module):
    """An adapter that takes rows, of which others hold what is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def finite(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.isfinite().all(-1)
        result = torch.zeros_like(x)
        result[mask] = self.linear(x[mask])
        return result


def test_other_rows_leave_no_trace() -> None:
    x = torch.ones(3, WIDTH)
    x[0, 1], x[2, 0] = torch.nan, torch.inf
    check_equal(Steep(), "finite", x.requires_grad_(), tolerance=1e-6)


class Refused(Chosen):
    def summed(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0].sum()

    def returned(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0]

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        mask = x[:, 0] > 0
        x = x.clone()
        x[mask] = x[mask].softmax(0)
        return x

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[x[:, 0] > 0]
        return rows / rows.shape[0]

    def elsewhere(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        result[x[:, 1] > 0] = self.first(x[x[:, 0] > 0])
        return result

    def rewritten(self, x: torch.Tensor) -> torch.Tensor:
        x, mask = x.clone(), x[:, 0] > 0
        rows = x[mask]
        x += 1
        result = torch.zeros_like(x)
        result[mask] = rows
        return result

    def masked_again(self, x: torch.Tensor) -> torch.Tensor:
        mask, result = x[:, 0] > 0, torch.zeros_like(x)
        rows = x[mask]
        mask[0] = False
        result[mask] = rows
        return result

    def rectified(self, x: torch.Tensor) -> torch.Tensor:
        mask, result = x[:, 0] > 0, torch.zeros_like(x)
        result[mask] = functional.relu(x[mask], inplace=True)
        return result

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        mask, result = x[:, 0] > 0, torch.zeros_like(x)
        result[mask] = functional.dropout(x[mask], 0.5)
        return result

    def enumerated(self, x: torch.Tensor) -> torch.Tensor:
        _, mask, hit = self._routed(x)
        result = torch.zeros_like(x)
        for _, expert in enumerate(hit):
            _, token = torch.where(mask[expert[0]])
            result.index_add_(0, token, x[token])
        return result

    def written(self, x: torch.Tensor) -> torch.Tensor:
        _, mask, _ = self._routed(x)
        mask[0] = 0
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            x = x + expert
        return x

    def looped(self, x: torch.Tensor, way: str) -> torch.Tensor:
        _, mask, hit = self._routed(x)
        result, count, sizes = torch.zeros_like(x), 1, [0]
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            result.index_add_(0, token, x[token])
            if way == "counts":
                count += 1
            if way == "appends":
                sizes.append(1)
            if way == "adds":
                result += self.down[expert[0]][0]
            if way == "reads":
                result.index_add_(0, token, result[token])
            if way == "twice":
                result.index_add_(0, token, x[token])
            if way == "leaves":
                break
        return result / (count + len(sizes)) + (x[token] if way == "behind" else 0)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("summed", "sum is not known to compute each row by itself"),
        ("returned", "the method returns them"),
        ("normed", "softmax is not known to compute each row by itself"),
        ("counted", "Tensor.shape of them is read"),
        ("elsewhere", "they are put back by another mask"),
        ("rewritten", "what they are computed from is written to before they are put back"),
        ("masked_again", "by another mask|written to before they are put back"),
        ("rectified", "relu writes to them in place"),
        ("dropped", "dropout draws a number for each of them"),
        ("enumerated", "Python counts the classes that occur"),
        ("written", ""),
    ],
)
def test_what_is_refused(method: str, reason: str) -> None:
    x = torch.randn(TOKENS, WIDTH)
    getattr(Refused(), method)(x)
    with pytest.raises(TraceError, match=f"depends on the values of a tensor.*{reason}"):
        trace(Refused(), method, x)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("counts", "each iteration over classes changes 'count'"),
        ("appends", "each iteration over classes changes 'sizes'"),
        ("adds", "an iteration over their classes calls add_, for no rows"),
        ("reads", "an iteration reads a tensor to which iterations add rows"),
        ("twice", "an iteration adds rows twice to one tensor"),
        ("leaves", "a loop over classes is left before its end"),
        ("behind", "getitem takes a RowIndex"),
    ],
)
def test_loops_that_are_refused(way: str, reason: str) -> None:
    with pytest.raises(TraceError, match=f"depends on the values of a tensor.*{reason}"):
        trace(Refused(), "looped", torch.randn(TOKENS, WIDTH), way)


class Counted:
    """Something that iterations change."""

    number = 0


class Leaking(Chosen):
    """Loops whose iterations leave something behind, beside the rows that they add."""

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        _, mask, hit = self._routed(x)
        result, rows, used, counted = torch.zeros_like(x), (), [0] * EXPERTS, Counted()
        weight, number = self.down[0], 0
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            result.index_add_(0, token, x[token] @ self.down[expert[0]])
            if way == "part":
                weight = self.down[expert[0]]
            elif way == "view":
                weight = self.down[expert[0]].reshape(WIDTH, WIDTH)
            elif way == "number":
                index = expert.item()
            elif way == "slot":
                used[expert.item()] = 1
            elif way == "object":
                counted.number += 1
            elif way == "tuple":
                rows = (*rows, 1)
        if way == "number":
            number = index
        if way == "comprehension":
            number = len([int(expert) for expert in hit])
        return result @ weight * (number + sum(used) + counted.number + len(rows))

    def uneven(self, x: torch.Tensor) -> torch.Tensor:
        """How often an iteration has run before is in what it computes."""
        _, mask, hit = self._routed(x)
        result, counted = torch.zeros_like(x), Counted()
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            result.index_add_(0, token, x[token] * counted.number)
            counted.number += 1
        return result

    def compared(self, x: torch.Tensor) -> torch.Tensor:
        _, mask, hit = self._routed(x)
        result = torch.zeros_like(x)
        for expert in hit:
            if expert[0] == 1 or expert[0] > 5:
                continue
            _, token = torch.where(mask[expert[0]])
            result.index_add_(0, token, x[token])
        return result


@pytest.mark.parametrize(
    "way", ["part", "view", "number", "slot", "object", "tuple", "comprehension"]
)
def test_nothing_may_depend_on_which_classes_occur(way: str) -> None:
    """The last class does not occur, or others do not: plain Python runs fewer iterations."""
    x = torch.ones(TOKENS, WIDTH)
    Leaking()(x, way)
    with pytest.raises(TraceError, match="depends on which of them occur"):
        trace(Leaking(), "forward", x, way)


def test_iterations_may_not_depend_on_those_before() -> None:
    with pytest.raises(TraceError, match=r"depends on which of them occur.*the first"):
        trace(Leaking(), "uneven", torch.ones(TOKENS, WIDTH))


def test_a_class_is_compared_as_a_number() -> None:
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    check_equal(Leaking(), "compared", x.requires_grad_(), tolerance=1e-6)


class Asked(Chosen):
    """What Python asks of rows and of classes, whose number is not known."""

    def forward(self, x: torch.Tensor, way: str) -> Any:
        mask = x[:, 0] > 0
        hit = self._routed(x)[2]
        if way == "shape":
            return x * hit.shape[0]
        if way == "numel":
            return x * hit.numel()
        if way == "first":
            return x * self.down[hit[0]]
        if way == "equal":
            return x * float(x[mask] == 0)
        if way == "greater":
            return x * float(x[mask] > 0)
        if way == "eps":
            x = x.clone()
            x[mask] = functional.layer_norm(x[mask], (WIDTH,), eps=0.0)
        if way == "type":
            x = x.clone()
            x[mask] = self.first(x[mask]).double()
        return x


@pytest.mark.parametrize("way", ["shape", "numel", "first", "equal", "greater", "eps", "type"])
def test_what_is_not_known_is_refused_in_words(way: str) -> None:
    with pytest.raises(TraceError, match="depends on the values of a tensor") as error:
        trace(Asked(), "forward", torch.randn(TOKENS, WIDTH), way)
    assert "it raised" not in error.value.reason
