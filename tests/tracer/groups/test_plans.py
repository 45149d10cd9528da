"""Meshes, sharding plans, and the pieces of an actor's state."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cg.ir.layout import Cut, Layout
from cg.ir.layout import whole as everything
from cg.ir.types import Mesh
from cg.tracer.values.mesh import describe, mesh
from cg.tracer.values.pieces import keep_pieces, lay_out, piece
from cg.tracer.values.plan import Sharding, ShardingPlan, cut, plan, whole


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.register_buffer("steps", torch.zeros(()))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


PLAN = ShardingPlan.of(
    {"up.*": cut(0, "tp"), "down.weight": cut(1, "tp"), "forward(x)": cut(0, "dp")}
)


def test_the_last_axis_varies_fastest() -> None:
    grid = mesh(pp=2, dp=2, tp=2)
    assert grid == Mesh(tuple(range(8)), "pp2_dp2_tp2", (("pp", 2), ("dp", 2), ("tp", 2)))
    assert grid.position(5) == {"pp": (1, 2), "dp": (0, 2), "tp": (1, 2)}


def test_an_unbound_mesh_is_one_for_each_index() -> None:
    first, second = mesh(dp=2, pp=2, tp=2).unbind("pp")
    assert (first.ranks, second.ranks) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert first.grid == second.grid == (("dp", 2), ("tp", 2))
    assert (first.name, second.name) == ("dp2_tp2_at0_1_4_5", "dp2_tp2_at2_3_6_7")


def test_equal_meshes_have_equal_names_and_others_have_not() -> None:
    made = [mesh(tp=2), mesh((0, 1), tp=2), mesh((1, 0), tp=2), mesh((1, 2), tp=2), mesh(dp=2)]
    for one in made:
        for other in made:
            assert (one == other) == (one.name == other.name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mesh(), "at least one axis"),
        (lambda: mesh(dp=0), "axis dp has size 0"),
        (lambda: mesh(dp=True), "axis dp has size True"),
        (lambda: mesh((0, 1, 2), dp=2, tp=2), "a grid of 4 ranks, and 3 are given"),
        (lambda: mesh((0, 0), dp=2), "twice"),
        (lambda: mesh(ranks=2), "'ranks' is no name"),
        (lambda: mesh(dp=2, tp=2).unbind("pp"), "no axis 'pp'"),
        (lambda: mesh(dp=2).unbind("dp"), "its parts are single ranks: [0, 1]"),
    ],
)
def test_meshes_that_cannot_be(make, message: str) -> None:
    with pytest.raises(ValueError, match=r".*") as raised:
        make()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (cut(2, "tp"), "'w' has 2 dimensions, so dimension 2 cannot be cut"),
        (cut(-3, "tp"), "dimension -3 cannot be cut; those that can are [0, 1]"),
        (cut(0, "ep"), "'w' is cut along 'ep', but the mesh dp=2, tp=3 of ranks {0..5} has none"),
        (cut(0, "tp", "tp"), "'w' is cut along 'tp' twice"),
        (cut(0, "tp") & cut(1, "tp"), "'w' is cut along 'tp' twice"),
        (cut(1, "tp", blocks=3), "8 entries in dimension 1, which are not 3 blocks"),
        (cut(0, "tp") & cut(0, "dp", blocks=2), "give the blocks with the first cut"),
    ],
)
def test_shardings_that_do_not_fit(sharding: Sharding, message: str) -> None:
    with pytest.raises(ValueError, match=r".*") as raised:
        sharding.layout(mesh(dp=2, tp=3), (6, 8), "'w'")
    assert message in str(raised.value)


def test_what_is_cut_along_nothing_is_whole() -> None:
    for sharding in (whole, cut(0, "tp"), cut(0, "tp", blocks=2)):
        assert sharding.layout(mesh(dp=2, tp=1), (6, 8), "'w'") is None


def test_a_cut_of_a_cut_is_minor() -> None:
    layout = (cut(0, "tp", blocks=2) & cut(0, "dp")).layout(mesh(dp=2, tp=3), (8, 2), "'w'")
    assert layout == Layout((Cut(("tp", "dp"), 2), Cut()))
    assert cut(-1, "dp").layout(mesh(dp=2), (3, 2), "'w'") == Layout((Cut(), Cut(("dp",))))


def test_the_first_pattern_counts() -> None:
    plan = ShardingPlan.of({"a.weight|b.*": cut(0, "tp"), "*.weight": cut(1, "tp")})
    assert plan.of_tensor("a.weight") == plan.of_tensor("b.weight") == cut(0, "tp")
    assert plan.of_tensor("c.weight") == cut(1, "tp")
    assert plan.of_tensor("c.bias") is None
    assert plan.of_argument("forward", "x") is None
    assert PLAN.of_argument("forward", "x") == cut(0, "dp")


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    paths = [each.path for each in lay_out(Block(), ShardingPlan(), whole, mesh(tp=2))]
    PLAN.check(Block, paths, [("forward", "x")])
    for pattern, message in (
        (
            "upp.*|down.*",
            "'upp.*' of 'upp.*|down.*' matches nothing of Block; its tensors are steps, up.",
        ),
        ("forward(y)", "'forward(y)' matches nothing of Block; its arguments are forward(x)"),
    ):
        with pytest.raises(ValueError, match=r".*") as raised:
            ShardingPlan.of({pattern: whole}).check(Block, paths, [("forward", "x")])
        assert message in str(raised.value)
    with pytest.raises(TypeError, match=r"give cg.cut\(\.\.\.\) or cg.whole"):
        ShardingPlan.of({"up.*": "tp"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="needs an axis"):
        cut(0)
    with pytest.raises(ValueError, match="blocks is 0"):
        cut(0, "tp", blocks=0)


@pytest.mark.parametrize("grid", [mesh(tp=2), mesh(tp=5), mesh(dp=2, tp=3), mesh((3, 1), tp=2)])
def test_pieces_are_those_of_the_whole(grid: Mesh) -> None:
    original = dict(Block().named_parameters())
    store = cut(0, "dp") if dict(grid.grid).get("dp") else whole
    for rank in grid.ranks:
        block = Block()
        block.load_state_dict(
            {**{k: v.detach() for k, v in original.items()}, "steps": torch.ones(())}
        )
        block(torch.ones(2, 6)).sum().backward()
        gradients = {name: p.grad.clone() for name, p in block.named_parameters()}
        kept = dict(block.named_parameters())
        logical = lay_out(block, PLAN, store, grid)
        keep_pieces(block, logical, grid, rank)
        for each in logical:
            if each.path not in original:
                assert each.layout is None
                continue
            expected = everything(each.shape)
            if each.layout is not None:
                expected = each.layout.region(each.shape, grid.position(rank))
            mine = block.get_parameter(each.path)
            assert mine is kept[each.path], "the optimizer's tensor is the actor's"
            assert torch.equal(mine, piece(original[each.path], expected))
            assert torch.equal(mine.grad, piece(gradients[each.path], expected))
        block.optimizer.step()
        momentum = block.optimizer.state[block.up.weight]["momentum_buffer"]
        assert momentum.shape == block.up.weight.shape


def test_the_meta_device_has_layouts_too() -> None:
    with torch.device("meta"):
        block = Block()
    layouts = {each.path: each.layout for each in lay_out(block, PLAN, whole, mesh(tp=2))}
    assert layouts["up.weight"] == Layout((Cut(("tp",)), Cut()))
    assert layouts["steps"] is None


def test_tied_tensors_have_one_sharding() -> None:
    block = Block()
    block.head = block.up
    block.tied = block.up.weight
    layouts = {each.path: each.layout for each in lay_out(block, PLAN, whole, mesh(tp=2))}
    assert layouts["tied"] == Layout((Cut(("tp",)), Cut())), "one of its names is in the plan"
    plan = ShardingPlan.of({"tied": cut(1, "tp"), **dict(PLAN.items)})
    with pytest.raises(ValueError, match=r"'tied' and 'up.weight' are one tensor, and the plan"):
        lay_out(block, plan, whole, mesh(tp=2))


def test_a_view_of_another_tensor_is_not_cut() -> None:
    block = Block()
    block.register_buffer("row", block.up.weight.detach()[0])
    with pytest.raises(ValueError, match="shares memory with another tensor of the actor"):
        lay_out(block, PLAN, whole, mesh(tp=2))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_pieces_make_up_the_tensor(shape: list[int], count: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    grid = mesh(tp=count)
    layout = cut(dim, "tp").layout(grid, tuple(shape), "'w'")
    if layout is None:
        assert count == 1
        return
    regions = [layout.region(tuple(shape), grid.position(rank)) for rank in grid.ranks]
    assert torch.equal(torch.cat([piece(tensor, region) for region in regions], dim), tensor)


def test_meshes_in_words() -> None:
    assert describe(mesh(dp=2, tp=2)) == "the mesh dp=2, tp=2 of ranks {0..3}"


def test_an_order_is_a_part_of_a_cut() -> None:
    zigzag = cut(0, "dp", order="zigzag")
    assert str(zigzag) == 'cg.cut(0, "dp", order="zigzag")'
    assert zigzag.layout(mesh(dp=2), (8,), "'w'") == Layout((Cut(("dp",), zigzag=True),))
    assert str(zigzag.layout(mesh(dp=1), (8,), "'w'")) == "None"
    with pytest.raises(ValueError, match="one of the cuts is in zigzag order; give both"):
        (zigzag & cut(0, "tp")).layout(mesh(dp=2, tp=2), (8,), "'w'")
    with pytest.raises(ValueError, match="order is 'striped'; it is 'rows' or 'zigzag'"):
        cut(0, "dp", order="striped")  # type: ignore[arg-type]


def test_a_plan_asks_for_a_form_of_attention() -> None:
    asking = plan({"w": cut(0, "dp")}, attention="ring")
    assert str(asking).endswith('}, attention="ring")')
    assert (plan({}) | asking).attention == "ring"
    with pytest.raises(ValueError, match="it is 'gather', 'heads' or 'ring', or None"):
        plan({}, attention="rings")  # type: ignore[arg-type]
