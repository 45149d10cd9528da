"""Products of tokens with the matrices of their experts: values, gradients, and cuts over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.layout import Layout
from cg.launch.world.world import use_world
from cg.tracer.graph.layouts.change import Change
from cg.tracer.graph.layouts.versions import End
from cg.tracer.method.experts.expert_products import EXPERT_LINEAR, EXPERT_OUTER, GROUPED_MM
from cg.tracer.method.quantized.quantized_expert_products import QUANTIZED_EXPERT_LINEAR
from cg.tracer.method.quantized.weight_format import WeightFormat

from ...sampling import examples
from .simulation import check, layout, mesh

EXPERTS, IN, OUT = 5, 4, 6


CHOICES = 2
FORMS = ("tokens", "choices")
"""Whether all choices of a token multiply the same row, or each one of its own."""


def integers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


def rows_of(form: str, tokens: int, width: int, seed: int = 0) -> Tensor:
    shape = (tokens, width) if form == "tokens" else (tokens, CHOICES, width)
    return integers(*shape, seed=seed)


def by_rows(rows: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The formula: each token and choice by itself."""
    each = rows if rows.dim() == 3 else rows.unsqueeze(1).expand(*ids.shape, -1)
    return torch.einsum("tkoi,tki->tko", weight[ids], each)


def ids_of(least: int = 0, most: int = EXPERTS - 1, tokens: int = 0) -> st.SearchStrategy[Tensor]:
    pair = st.lists(st.integers(least, most), min_size=CHOICES, max_size=CHOICES)
    tables = st.lists(pair, min_size=tokens, max_size=7)
    return tables.map(lambda rows: torch.tensor(rows, dtype=torch.int64).reshape(-1, CHOICES))


@given(ids_of(), st.sampled_from(FORMS))
@examples(60)
def test_it_is_the_formula(ids: Tensor, form: str) -> None:
    """Also where an expert gets all tokens, or none."""
    tensors = rows_of(form, len(ids), IN), integers(EXPERTS, OUT, IN, seed=7)
    pairs = []
    for function in (cg.expert_linear, by_rows):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        result = function(leaves[0], leaves[1], ids)
        (result * integers(*result.shape, seed=1)).sum().backward()
        pairs.append([result.detach(), *(leaf.grad for leaf in leaves)])
    for mine, wanted in zip(*pairs, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives(form: str) -> None:
    ids = torch.tensor([[3, 0], [0, 4], [3, 3]])
    leaves = [rows_of(form, 3, IN).requires_grad_(), integers(EXPERTS, OUT, IN).requires_grad_()]
    assert torch.autograd.gradgradcheck(lambda x, w: cg.expert_linear(x, w, ids), leaves)


@pytest.mark.parametrize("wrong", [-1, EXPERTS])
def test_ids_of_no_expert(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"{wrong} is the index of no expert: there are 5, 0 to 4"):
        cg.expert_linear(
            torch.ones(2, IN), torch.ones(EXPERTS, OUT, IN), torch.tensor([[0], [wrong]])
        )


@given(ids=ids_of(-1, EXPERTS), form=st.sampled_from(FORMS))
@examples(30)
def test_experts_that_are_elsewhere_give_zeros(ids: Tensor, form: str) -> None:
    rows, weight = rows_of(form, len(ids), IN), integers(EXPERTS, OUT, IN, seed=7)
    is_here = ((ids >= 0) & (ids < EXPERTS)).unsqueeze(-1)
    wanted = torch.where(is_here, by_rows(rows, weight, ids.clamp(0, EXPERTS - 1)), 0)
    assert torch.equal(EXPERT_LINEAR(rows, weight, ids, True), wanted)


@given(data=st.data(), form=st.sampled_from(FORMS))
@examples(60)
def test_pieces(data: st.DataObject, form: str) -> None:
    """Tokens, choices, experts and widths may be cut; integers of float64 are exact."""
    ids = data.draw(ids_of(tokens=1))
    tensors = [rows_of(form, len(ids), IN), integers(EXPERTS, OUT, IN, seed=7), ids]
    place = mesh(dp=2, tp=data.draw(st.sampled_from([2, 3, 7])))
    letters = data.draw(st.permutations("tkeio"))[:2]
    axis_of = dict(zip(letters, ("dp", "tp"), strict=True))

    def cut(*words: str) -> list[Layout]:
        return [layout(",".join(axis_of.get(letter, "-") for letter in word)) for word in words]

    rows = "t" if form == "tokens" else "tk"
    check(EXPERT_LINEAR, tensors, cut(f"{rows}i", "eoi", "tk"), place)
    tensors = [integers(*ids.shape, OUT, seed=1), tensors[0], ids]
    ends = [End(layout("-,-,-" if "tp" in (axis_of.get("o"), axis_of.get("i")) else "tp,-,-"))]
    function = partial(EXPERT_OUTER, experts=EXPERTS)
    for wanted in (None, ends):
        check(function, tensors, cut("tko", f"{rows}i", "tk"), place, ends=wanted)


BY_OUTPUT = WeightFormat("int8", "weight", "scale", 1, 0)
"""A scale of each output."""


@given(data=st.data(), form=st.sampled_from(FORMS), turned=st.booleans())
@examples(40)
def test_pieces_of_quantized_experts(data: st.DataObject, form: str, turned: bool) -> None:
    """Tokens, choices and experts may be cut; a cut of stored levels is undone first."""
    ids = data.draw(ids_of(tokens=1))
    levels, scale = integers(EXPERTS, OUT, IN, seed=7).to(torch.int8), integers(EXPERTS, OUT, 1)
    place = mesh(dp=2, tp=data.draw(st.sampled_from([2, 3, 7])))
    letters = data.draw(st.permutations("tkeio"))[:2]
    axis_of = dict(zip(letters, ("dp", "tp"), strict=True))
    width, letter = (OUT, "o") if turned else (IN, "i")

    def cut(word: str) -> Layout:
        return layout(",".join(axis_of.get(letter, "-") for letter in word))

    def function(rows: Tensor, levels: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
        result: Tensor = QUANTIZED_EXPERT_LINEAR(
            *(rows, [levels, scale.float()], ids, BY_OUTPUT.as_text, [OUT], IN, False, turned)
        )
        return result

    rows = "t" if form == "tokens" else "tk"
    tensors = [rows_of(form, len(ids), width), levels, scale, ids]
    check(function, tensors, [cut(rows + letter), cut("eoi"), cut("eo-"), cut("tk")], place)
    weight = levels.double() * scale
    wanted = by_rows(tensors[0], weight.transpose(1, 2) if turned else weight, ids)
    assert torch.equal(function(*tensors), wanted)


def test_the_gradient_of_weights_is_a_sum_over_pieces_of_the_batch() -> None:
    """A gradient that may not stay a sum over ranks is reduced, once and by nothing else."""
    tensors = [integers(4, CHOICES, OUT), integers(4, IN), torch.tensor([[0, 4], [4, 2]] * 2)]
    layouts = [layout("dp,-,-"), layout("dp,-"), layout("dp,-")]
    function = partial(EXPERT_OUTER, experts=EXPERTS)
    run = check(function, tensors, layouts, mesh(dp=2), ends=[End(layout("-,-,-"))])
    assert run.changes == [Change.REDUCE]
    assert not check(function, tensors, layouts, mesh(dp=2)).changes


GROUPED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "rows": ((9, 4), (3, 4, 8)),
    "columns": ((3, 8, 4), (4, 9)),
    "sums": ((8, 9), (9, 4)),
}


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_products_of_torch(name: str, dtype: torch.dtype) -> None:
    """Any type and stride, though torch's kernels and their fakes take few."""
    left, right = (torch.randint(-2, 3, shape).to(dtype) for shape in GROUPED[name])
    ends = torch.tensor([2, 2, 9], dtype=torch.int32)
    bounds = [(0, 2), (2, 2), (2, 9)]
    parts = {
        "rows": lambda: torch.cat([left[a:b] @ right[i] for i, (a, b) in enumerate(bounds)]),
        "columns": lambda: torch.cat(
            [left[i] @ right[:, a:b] for i, (a, b) in enumerate(bounds)], dim=1
        ),
        "sums": lambda: torch.stack([left[:, a:b] @ right[a:b] for a, b in bounds]),
    }[name]()
    assert torch.equal(GROUPED_MM(left, right, ends), parts)
    cut = {"rows": ("-,-", "-,-,tp"), "columns": ("-,tp,-", "-,-"), "sums": ("tp,-", "-,-")}[name]
    layouts = [*map(layout, cut), layout("-")]
    check(GROUPED_MM, [left, right, ends], layouts, mesh(tp=2))


@pytest.mark.parametrize("name", ["rows", "sums"])
@pytest.mark.parametrize(
    ("dtype", "width", "calls"),
    [
        *[(dtype, 16, 1) for dtype in (torch.float32, torch.bfloat16, torch.float16)],
        *[(torch.float64, 16, 0), (torch.float32, 15, 0)],
    ],
)
def test_a_host_makes_all_products_in_one_call(
    name: str, dtype: torch.dtype, width: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's kernel is called where it takes the rows, and gives the bits of single products."""
    seen: list[int] = []
    kernel = torch.nn.functional.grouped_mm

    def counted(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        seen.append(len(offs))
        return kernel(left, right, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 32, generator=generator).to(dtype)
    ends, parts = torch.tensor([7, 7, 30, 40], dtype=torch.int32), (7, 0, 23, 10)
    if name == "rows":
        matrices = torch.randn(4, width, 32, generator=generator).to(dtype).transpose(1, 2)
        result = GROUPED_MM(rows, matrices, ends)
        expected = torch.cat([p @ m for p, m in zip(rows.split(parts), matrices, strict=True)])
    else:
        others = torch.randn(40, width, generator=generator).to(dtype)
        result = GROUPED_MM(others.t(), rows, ends)
        pairs = zip(others.split(parts), rows.split(parts), strict=True)
        expected = torch.stack([left.t() @ right for left, right in pairs])
    assert torch.equal(result, expected)
    assert result.is_contiguous()
    assert seen == [4] * calls


class Grouped(torch.nn.Module):
    """Sorts its rows itself, and calls torch's grouped product, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = torch.nn.Linear(IN, EXPERTS)
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, OUT, IN))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def loss(self, x: Tensor) -> Tensor:
        shares, ids = self.router(x).softmax(-1).topk(2)
        ranked, order = ids.reshape(-1).sort()
        ends = torch.histc(ranked.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        rows = torch._grouped_mm(x[order // 2], self.weight.transpose(1, 2), offs=ends)
        return (rows * shares.reshape(-1)[order].unsqueeze(1)).square().sum()

    def reference(self, x: Tensor) -> Tensor:
        shares, ids = self.router(x).softmax(-1).topk(2)
        rows = torch.einsum("tkoi,ti->tko", self.weight[ids], x)
        return (rows * shares.unsqueeze(-1)).square().sum()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Linear(Grouped):
    """The same by `cg.expert_linear`, which needs no sorted rows."""

    def loss(self, x: Tensor) -> Tensor:
        shares, ids = self.router(x).softmax(-1).topk(2)
        rows = cg.expert_linear(x, self.weight, ids)
        return (rows * shares.unsqueeze(-1)).square().sum()


def losses_of(actor: Any, x: Tensor) -> list[Tensor]:
    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = actor.loss(x)
        cg.backward(loss)
        actor.update()
        return loss

    compiled = step.lower(x).compile()
    return [compiled(x) for _ in range(3)]


def wanted_losses(x: Tensor) -> list[Tensor]:
    model, losses = Grouped(), []
    for _ in range(3):
        losses.append(model.reference(x))
        losses[-1].backward()
        model.update()
    return [loss.detach() for loss in losses]


@pytest.mark.parametrize("model", [Grouped, Linear])
def test_routing_trains_on_one_rank(model: type[Grouped]) -> None:
    x = torch.randn(6, IN, generator=torch.Generator().manual_seed(0))
    with use_world(VirtualWorld(1)):
        losses = losses_of(cg.actor(model).on(0)(), x)
    torch.testing.assert_close(losses, wanted_losses(x))


@pytest.mark.parametrize(
    ("model", "axes", "cuts"),
    [
        (Grouped, {"tp": 2}, {"weight": cg.cut(1, "tp")}),
        (Linear, {"dp": 2}, {}),
        (Linear, {"dp": 2, "tp": 2}, {"weight": cg.cut(1, "tp")}),
        (Linear, {"tp": 2}, {"weight": cg.cut(2, "tp")}),
        (Linear, {"ep": 2}, {"weight": cg.cut(0, "ep")}),
        (Linear, {"dp": 2, "ep": 2}, {"weight": cg.cut(0, "ep")}),
        (Linear, {"ep": 3}, {"weight": cg.cut(0, "ep"), "loss(x)": cg.cut(0, "ep")}),
        (Linear, {"dp": 2, "ep": 2}, {"weight": cg.cut(0, "ep"), "loss(x)": cg.cut(0, "dp", "ep")}),
        (
            Linear,
            {"ep": 2, "tp": 2},
            {"weight": cg.cut(0, "ep") & cg.cut(1, "tp"), "loss(x)": cg.cut(0, "ep")},
        ),
    ],
)
def test_routing_trains_on_a_mesh(
    model: type[Grouped], axes: dict[str, int], cuts: dict[str, Any]
) -> None:
    """Experts that are cut are computed by their ranks, and the results are added up."""
    x = torch.randn(6, IN, generator=torch.Generator().manual_seed(0))
    with use_world(VirtualWorld(axes.get("dp", 1) * axes.get("tp", 1) * axes.get("ep", 1))):
        plan = {**({"loss(x)": cg.cut(0, "dp")} if "dp" in axes else {}), **cuts}
        losses = losses_of(cg.actor(model).on(cg.mesh(**axes), plan=plan)(), x)
    torch.testing.assert_close(losses, wanted_losses(x))


def test_sorted_rows_need_the_whole_batch() -> None:
    x = torch.randn(6, IN)
    with use_world(VirtualWorld(2)):
        actor = cg.actor(Grouped).on(cg.mesh(dp=2), plan={"loss(x)": cg.cut(0, "dp")})()
        with pytest.raises(cg.LayoutError, match=r"aten\.sort needs"):
            losses_of(actor, x)


@pytest.mark.parametrize(
    ("shapes", "dtypes"),
    [
        (((3, 4), (5, 6, 4), (2, 2)), (torch.float32, torch.float32, torch.int64)),
        (((3, 4), (5, 6, 4), (3,)), (torch.float32, torch.float32, torch.int64)),
        (((3, 4), (5, 6, 3), (3, 2)), (torch.float32, torch.float32, torch.int64)),
        (((3, 1, 4), (5, 6, 4), (3, 2)), (torch.float32, torch.float32, torch.int64)),
        (((3, 4), (5, 6, 4), (3, 2)), (torch.float32, torch.float64, torch.int64)),
        (((3, 4), (5, 6, 4), (3, 2)), (torch.float32, torch.float32, torch.bool)),
        (((3, 4), (6, 4), (3, 2)), (torch.float32, torch.float32, torch.int64)),
    ],
)
def test_what_does_not_fit(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    tensors = [torch.zeros(s, dtype=dtype) for s, dtype in zip(shapes, dtypes, strict=True)]
    with pytest.raises(ValueError, match=r"tokens \[tokens, in\] or \[tokens, choices, in\]"):
        cg.expert_linear(*tensors)


@pytest.mark.parametrize("form", FORMS)
def test_flops(form: str) -> None:
    ids = torch.tensor([[0, 1], [1, 3], [4, 1]])
    rows = rows_of(form, 3, IN).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        cg.expert_linear(rows, integers(EXPERTS, OUT, IN).requires_grad_(), ids).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * ids.numel() * IN * OUT
