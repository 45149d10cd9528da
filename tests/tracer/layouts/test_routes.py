"""Rows of experts that are cut: they go through what keeps rows apart, and are added up elsewhere.

Tokens are cut over the ranks of the experts, too, so they are gathered for the experts, and the
results are reduced to pieces of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import cg
from cg.tracer.graph.layouts.change import Change

from ...sampling import examples
from .simulation import check, layout, mesh, simulate

EXPERTS, WIDTH = 4, 6

Step = Callable[[Tensor, Tensor], Tensor]
"""Takes rows `[tokens, choices, width]` and shares `[tokens, choices]`; gives rows."""

APART: dict[str, Step] = {
    "relu": lambda h, s: h.relu(),
    "silu": lambda h, s: functional.silu(h),
    "gelu": lambda h, s: functional.gelu(h, approximate="tanh"),
    "shares": lambda h, s: h * s.unsqueeze(-1),
    "square": lambda h, s: h * h,
    "power": lambda h, s: h**2,
    "gate": lambda h, s: torch.cat([h[..., :3].relu() * h[..., 3:], h[..., 3:]], -1),
    "twice": lambda h, s: h + h.abs(),
    "turned": lambda h, s: (h.transpose(1, 2).tanh() * 2).transpose(1, 2),
    "rows": lambda h, s: h.unflatten(2, (2, 3)).flip(3).flatten(2),
    "clamp": lambda h, s: h.clamp(-1, 2),
    "dropped": lambda h, s: h.masked_fill(s.unsqueeze(-1) > 0, 0),
    "float": lambda h, s: h.float().double(),
}
"""They keep rows apart, and give zeros for zeros."""

ACROSS: dict[str, Step] = {
    "norm": lambda h, s: functional.rms_norm(h, (WIDTH,)),
    "one more": lambda h, s: h + 1,
    "sigmoid": lambda h, s: h * h.sigmoid(),
    "clamped away": lambda h, s: h.clamp(1, 2),
    "tokens turned": lambda h, s: h * h.flip(0),
    "tokens rolled": lambda h, s: h * h.roll(1, 0),
    "choices turned": lambda h, s: h * h.flip(1),
    "choices and tokens": lambda h, s: h * h.transpose(0, 1),
    "next token": lambda h, s: torch.cat([h[1:], h[:1]]) * h,
    "cumulated": lambda h, s: h.cumsum(0).relu(),
    "most": lambda h, s: h - h.amax(1, keepdim=True),
    "softmax": lambda h, s: h.softmax(-1),
    "quotient": lambda h, s: h / (h.abs() + 1),
    "signs": lambda h, s: torch.where(h > 0, h, -h),
    "sum of choices": lambda h, s: h.relu() * h.sum(1, keepdim=True),
    "sum of tokens": lambda h, s: h.relu() * h.sum(0),
    "products of rows": lambda h, s: torch.bmm(h, h.transpose(1, 2)).relu() @ h,
    "other rows": lambda h, s: h[[1, 0]] * h,
}
"""They bring rows together, or make something of zeros."""


def tensors(seed: int = 0, tokens: int = 2, choices: int = 2) -> list[Tensor]:
    """Tokens, weights, numbers of experts and shares; as many tokens as choices."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, EXPERTS, (tokens, choices), generator=generator)
    shapes = (tokens, WIDTH), (EXPERTS, WIDTH, WIDTH), (EXPERTS, WIDTH, WIDTH), (tokens, choices)
    x, up, down, shares = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return [x, up, down, ids, shares]


def mixture(
    steps: list[Step], x: Tensor, up: Tensor, down: Tensor, ids: Tensor, s: Tensor
) -> Tensor:
    h = cg.expert_linear(x, up, ids)
    for step in steps:
        h = step(h, s)
    return x + (cg.expert_linear(h, down, ids) * s.unsqueeze(-1)).sum(1)


def gradients(values: Sequence[Tensor], function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """The result of a function, and the gradients of all tensors that can have one."""
    leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in values]
    result = function(*leaves)
    floating = [leaf for leaf in leaves if leaf.requires_grad]
    return result.detach(), *torch.autograd.grad(result.square().sum(), floating)


@given(
    st.lists(st.sampled_from([*APART, *ACROSS]), max_size=4),
    st.sampled_from([("ep,-", 1), ("dp.ep,-", 2), ("ep.dp,-", 2), ("-,-", 2), ("dp,-", 2)]),
    st.integers(0, 9),
)
@examples(150)
def test_values(names: list[str], cut: tuple[str, int], seed: int) -> None:
    """Whatever stands between the products; forward and backward."""
    steps = [(APART | ACROSS)[name] for name in names]
    tokens, axes = cut[0], {"dp": cut[1], "ep": 2}
    layouts = [layout(text) for text in (tokens, "ep,-,-", "ep,-,-", tokens, tokens)]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        return gradients(values, partial(mixture, steps))

    check(function, tensors(seed), layouts, mesh(**axes), tolerance=1e-9, absolute=1e-9)


@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_are_gathered_once_and_reduced_once(name: str) -> None:
    layouts = [layout(text) for text in ("ep,-", "ep,-,-", "ep,-,-", "ep,-", "ep,-")]

    def function(*values: Tensor) -> Tensor:
        return mixture([APART[name]], *values)

    # Torch rounds silu and gelu by an entry's place in memory: in a vector, or behind the last one.
    tolerance = 1e-15 if name in ("silu", "gelu") else 0
    run = check(function, tensors(tokens=8), layouts, mesh(ep=2), tolerance=tolerance)
    # Tokens, the numbers of their experts and shares; then the sums of choices.
    mask = [Change.GATHER] * (name == "dropped")
    assert run.changes == [Change.GATHER] * 3 + mask + [Change.REDUCE]


def test_a_backward_gathers_one_gradient_a_token() -> None:
    """Not one for each choice of a token. Gradients of shares may stay a sum, as ends allow it."""
    layouts = [layout(text) for text in ("dp.ep,-", "ep,-,-", "ep,-,-", "dp.ep,-", "dp.ep,-")]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        return gradients(values, partial(mixture, [APART["gate"]]))

    given = tensors(tokens=8, choices=4)
    run = check(function, given, layouts, mesh(dp=2, ep=2), tolerance=1e-9, absolute=1e-9)
    gathered = [t.after for t in run.propagation.transfers if t.change is Change.GATHER]
    lengths = [version.node.meta["val"].numel() for version in gathered]
    assert sorted(lengths) == sorted([8 * WIDTH, 8 * 4, 8 * 4, 8 * WIDTH])
    for version in gathered:
        assert version.layout.cuts[0].axes == ("dp",), "tokens of other groups stay there"
    reduced = [t.before for t in run.propagation.transfers if t.change is Change.REDUCE]
    lengths = [version.node.meta["val"].numel() for version in reduced]
    assert lengths == [8 * WIDTH, 8 * WIDTH]


@pytest.mark.parametrize("tokens", ["-,-", "ep,-", "dp.ep,-"])
@pytest.mark.parametrize("wrong", [-1, EXPERTS, EXPERTS + 3])
def test_an_id_of_no_expert_is_an_error(tokens: str, wrong: int) -> None:
    """As where a rank has all experts. No rank would have its rows, so they would be zeros."""
    x, up, _, ids, _ = tensors(tokens=4)
    ids[3, 1] = wrong
    layouts = [layout(text) for text in (tokens, "ep,-,-", tokens)]
    with pytest.raises(IndexError, match=rf"expert_linear: index {wrong} at \[3, 1\] is out of"):
        simulate(cg.expert_linear, [x, up, ids], layouts, mesh(dp=2, ep=2))


def test_pieces_of_groups_that_lie_otherwise_in_memory() -> None:
    """A group norm's backward takes its gradient for contiguous, as it is in the whole graph."""

    def step(h: Tensor, s: Tensor) -> Tensor:
        return functional.group_norm(h.transpose(1, 2), 2).transpose(1, 2).relu()

    layouts = [layout(text) for text in ("dp,-", "dp,-,-", "ep,-,-", "dp,-", "dp,-")]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        return gradients(values, partial(mixture, [step]))

    place = mesh(dp=2, ep=2)
    check(function, tensors(seed=1), layouts, place, tolerance=1e-9, absolute=1e-9)


Part = Callable[[Tensor, int], Tensor]
"""Some first columns of a tensor, as a view that is written in place."""


def _read_before(part: Part, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    tokens = x.exp()
    before = cg.expert_linear(tokens, w, ids)
    part(tokens, 2).mul_(2)
    return before + cg.expert_linear(tokens, w, ids)


def _computed_again(part: Part, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    column = x[:, :1].exp()
    tokens = column * x.new_ones(WIDTH)
    part(column, 1).add_(1)
    return cg.expert_linear(tokens, w, ids)


def _written_late(part: Part, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    tokens = x.exp()
    part(tokens, 2).add_(part(x.sum(0).exp().unsqueeze(0), 2))
    return tokens


def _other_ids(part: Part, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    own = ids.clone()
    h = cg.expert_linear(x, w, own)
    part(own, 1).zero_()
    return cg.expert_linear(h, w, own)


WRITERS = (_read_before, _computed_again, _written_late, _other_ids)


def _columns(tensor: Tensor, count: int) -> Tensor:
    return tensor[:, :count]


def _turned(tensor: Tensor, count: int) -> Tensor:
    return tensor.t()[:count]


@pytest.mark.parametrize("step", WRITERS)
def test_writes_in_place_that_copies_do_not_see(step: Callable[..., Tensor]) -> None:
    """Slices are written as new tensors; other views are refused."""
    x, up, _, ids, _ = tensors(tokens=4)
    layouts = [layout(text) for text in ("ep,-", "ep,-,-", "ep,-")]
    given = [x, up, ids]
    check(partial(step, _columns), given, layouts, mesh(ep=2), tolerance=1e-9, absolute=1e-9)
    with pytest.raises(cg.LayoutError, match="its memory is written in place"):
        simulate(partial(step, _turned), given, layouts, mesh(ep=2))


def test_ids_that_are_written_route_no_rows() -> None:
    x, up, _, ids, _ = tensors(tokens=4)
    layouts = [layout(text) for text in ("-,-", "ep,-,-", "-,-")]
    check(partial(_other_ids, _turned), [x, up, ids], layouts, mesh(ep=2), tolerance=1e-9)
