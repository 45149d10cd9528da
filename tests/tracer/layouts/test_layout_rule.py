"""Layout rules that users declare for their own operators: right on pieces, refused if wrong."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor

import cg
from cg.tracer.graph.layouts.cases import LayoutError
from cg.tracer.graph.layouts.change import DEFAULT

from ...sampling import scale
from .op_cases import ints
from .simulation import check, cuts, layout, mesh


@torch.library.custom_op("cg_tests::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention without a softmax, which is exact in integers; and its scores, added up."""
    assert query.numel() > 0, "a kernel that takes no empty piece"
    scores = query @ key.transpose(-1, -2)
    return scale * (scores @ value), scores.sum(-1)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return query.new_empty((*query.shape[:3], value.shape[3])), query.new_empty(query.shape[:3])


@torch.library.custom_op("cg_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


cg.layout_rule(torch.ops.cg_tests.attend.default, "bhqw, bhkw, bhkv -> bhqv, bhq", cut="bhq")
TENSORS = [ints(2, 3, 4, 2), ints(2, 3, 5, 2), ints(2, 3, 5, 2)]


@pytest.mark.parametrize("grid", [mesh(tp=3), mesh(dp=2, tp=2), mesh(tp=5)], ids=str)
def test_pieces_are_those_of_the_whole(grid: cg.Place) -> None:
    layouts = list(cuts(4, grid, summands=False))
    stride = 83 if scale() == 1 else 41
    for given in itertools.islice(itertools.product(layouts, repeat=3), 0, None, stride):
        check(lambda q, k, v: attend(q, k, v, 2.0), TENSORS, list(given), grid)


def test_cut_letters_need_no_transfer() -> None:
    run = check(
        lambda q, k, v: attend(q, k, v, 2.0)[1],
        TENSORS,
        [layout(text) for text in ("dp,tp,-,-", "dp,tp,-,-", "dp,tp,-,-")],
        mesh(dp=2, tp=3),
        allowed=DEFAULT,
    )
    assert run.changes == []
    assert run.outputs == [layout("dp,tp,-")]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["-,-,-,-", "-,-,tp,-", "-,-,tp,-"], r"'k' in bhqw,bhkw,bhkv->bhqv,bhq, of which bhq may"),
        (["-,-,-,tp", "-,-,-,-", "-,-,-,-"], r"'w' in bhqw,bhkw,bhkv->bhqv,bhq, of which bhq may"),
    ],
)
def test_other_letters_must_be_whole(texts: list[str], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        check(
            lambda q, k, v: attend(q, k, v, 2.0),
            TENSORS,
            [layout(text) for text in texts],
            mesh(tp=2),
            allowed=DEFAULT,
        )


def test_without_a_rule_the_remedy_names_the_function() -> None:
    with pytest.raises(LayoutError, match=r"cg_tests\.doubled has no rule") as caught:
        check(doubled, [ints(4, 6)], [layout("tp,-")], mesh(tp=2), allowed=DEFAULT)
    assert "cg.layout_rule" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("dimensions", "cut", "message"),
    [
        ("ab", "a", "it takes a word of letters"),
        ("aa->a", "a", "it takes a word of letters"),
        ("a1->a", "a", "it takes a word of letters"),
        ("ab->b", "a", "may not cut a, which is not in each of its results b"),
        ("ab->ab,b", "a", "may not cut a"),
        ("bhqw,bhkw,bhkv->bhqv,bhq", "b", "has another layout rule"),
    ],
)
def test_wrong_rules_are_refused(dimensions: str, cut: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        cg.layout_rule(torch.ops.cg_tests.attend.default, dimensions, cut=cut)


def test_a_rule_is_one_of_an_overload() -> None:
    with pytest.raises(TypeError, match=r"torch\.ops\.mine\.attend\.default"):
        cg.layout_rule(torch.ops.cg_tests.attend, "a->a", cut="a")


@pytest.mark.parametrize(
    ("name", "dimensions", "message"),
    [
        ("flat", "a->a", "its layout rule names a->a, but its tensors have 2 -> 2 dimensions"),
        ("another", "ab,b->ab", "names ab,b->ab, but its tensors have 2 -> 2 dimensions"),
        ("unequal", "ab->ba", "has one letter 'b' for dimensions of 6 and 4"),
    ],
)
def test_rules_that_do_not_fit_the_tensors(name: str, dimensions: str, message: str) -> None:
    schema = "(Tensor x) -> Tensor"
    op = torch.library.custom_op(
        f"cg_tests::{name}", lambda x: 2 * x, mutates_args=(), schema=schema
    )
    op.register_fake(torch.empty_like)
    cg.layout_rule(getattr(torch.ops.cg_tests, name).default, dimensions, cut="a")
    with pytest.raises(LayoutError, match=re.escape(message)):
        check(op, [ints(4, 6)], [layout("tp,-")], mesh(tp=2), allowed=DEFAULT)
