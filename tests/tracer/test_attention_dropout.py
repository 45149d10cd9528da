"""The mask of attention with dropout: its numbers, its statistics; and attention tile by tile."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import cg
from cg.ir.layout import Interval, Intervals, merge
from cg.ir.types import Mesh
from cg.tracer.method.dropout import tiled_attention
from cg.tracer.method.dropout.dropout_operators import (
    DROPOUT_ATTENTION,
    DROPOUT_ATTENTION_BACKWARD,
    fused_dropout,
)
from cg.tracer.method.dropout.random_masks import RandomMask, philox
from cg.tracer.values.group import Group
from cg.tracer.values.interface import MethodTarget

from ..sampling import examples
from . import function_tools, written_dropout
from .function_tools import check_equal, run_traced, trace
from .layouts.joint_tools import joint_of
from .written_dropout import WrittenDropout, kept


@pytest.fixture(autouse=True)
def _mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods are called by the one rank of a mesh: elsewhere, torch's kernels draw the mask."""
    group = Group(Mesh.of_grid((0,), (("dp", 1),)), (None,) * 4, (0,))
    monkeypatch.setattr(function_tools, "MethodTarget", partial(MethodTarget, group=group))


ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("given_words", "expected"),
    [
        ((0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers(given_words: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Those that Random123, the library of the generator's authors, has for ten rounds."""
    a, b, c, d, *key = map(torch.tensor, given_words)
    assert tuple(map(int, philox((a, b, c, d), torch.stack(key)))) == expected


def mask(words: Tensor, rate: float, *indices: Intervals) -> RandomMask:
    return RandomMask(words, rate, *indices)


def intervals(length: int) -> st.SearchStrategy[Intervals]:
    """One run of indices, or several, of which none is empty."""
    bounds = st.lists(st.integers(0, length), min_size=2, max_size=6, unique=True).map(sorted)
    pairs = bounds.map(lambda b: merge(zip(b[::2], b[1::2], strict=False)))
    return pairs.filter(bool)


@examples(60)
@given(
    st.tuples(st.integers(0, ONES), st.integers(0, ONES)),
    st.sampled_from((0.1, 0.5, 1.0)),
    *(intervals(size) for size in (2, 5, 7, 19)),
    st.data(),
)
def test_a_part_of_a_mask_is_that_of_the_whole(
    words: tuple[int, int],
    rate: float,
    batch: Intervals,
    heads: Intervals,
    rows: Intervals,
    columns: Intervals,
    data: st.DataObject,
) -> None:
    key = torch.tensor(words)
    whole = kept(key, rate, (2, 5, 7, 19))
    for dim, indices in enumerate((batch, heads, rows, columns)):
        at = torch.cat([torch.arange(*interval) for interval in indices])
        whole = whole.index_select(dim, at)
    first = data.draw(st.integers(0, whole.shape[3] - 1))
    tile: Interval = (first, data.draw(st.integers(first + 1, whole.shape[3])))
    own = mask(key, rate, batch, heads, rows, columns)
    found = own.tile(own.axes(), tile)
    assert torch.equal(found, whole[..., slice(*tile)])


def test_statistics() -> None:
    """Shares, and products of neighbours along each dimension and between keys, are as of chance.

    Deviations are counted in standard ones of so many independent entries; all is deterministic.
    """
    shape, rate = (3, 4, 32, 128), 0.3
    drawn = torch.randint(1 << 32, (2, 2), generator=torch.Generator().manual_seed(3))
    masks = []
    for key in drawn:
        own = mask(key, rate, *(((0, size),) for size in shape))
        masks.append(own.tile(own.axes(), (0, shape[3])).double() - (1 - rate))
    first, second = masks
    variance = rate * (1 - rate)
    for value in masks:
        assert abs(value.mean()) < 4 * (variance / value.numel()) ** 0.5
        for dim, size in enumerate(shape):
            ends = value.narrow(dim, 0, size - 1) * value.narrow(dim, 1, size - 1)
            assert abs(ends.mean()) < 4 * variance / ends.numel() ** 0.5, f"dimension {dim}"
            of_slices = value.transpose(0, dim).flatten(1).mean(1)
            bound = 5 * (variance / (value.numel() // size)) ** 0.5
            assert of_slices.abs().max() < bound, f"dimension {dim}"
    assert abs((first * second).mean()) < 4 * variance / first.numel() ** 0.5


BIASES = {
    "none": lambda: None,
    "causal": lambda: None,
    "padding": lambda: torch.arange(9).ge(4).expand(2, 1, 1, 9).clone(),
    "hidden rows": lambda: torch.arange(7)[:, None].ne(3).expand(7, 9).clone(),
    "bias": lambda: torch.randn(6, 7, 9).double(),
    "of keys": lambda: torch.randn(1, 1, 1, 9).double(),
}


@pytest.mark.parametrize("side", [4, 32])
@pytest.mark.parametrize("bias", BIASES)
def test_tiles(bias: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are those of all scores at once, also where a row sees no key."""
    monkeypatch.setattr(tiled_attention, "_SHORTEST", side)
    monkeypatch.setattr(tiled_attention, "_ENTRIES", {"cpu": 1})
    torch.manual_seed(0)
    shapes = ((2, 6, 7, 4), (2, 3, 9, 4), (2, 3, 9, 5))
    operands = [torch.randn(shape).double().requires_grad_() for shape in shapes]
    attn_mask, words = BIASES[bias](), torch.tensor([ONES, 5])
    needs = attn_mask is not None and attn_mask.is_floating_point()
    inputs = [*operands, attn_mask.requires_grad_()] if needs else operands
    options: dict[str, Any] = {"dropout_p": 0.4, "is_causal": bias == "causal"}
    monkeypatch.setattr(torch, "randint", lambda *_: words)
    expected = written_dropout.attention(*operands, attn_mask, **options, enable_gqa=True)
    gradient = torch.randn(expected.shape).double()
    gradients = torch.autograd.grad(expected, inputs, gradient)
    with torch.no_grad():
        out, logsumexp = DROPOUT_ATTENTION(
            *operands, words, **options, attn_mask=attn_mask, scale=0.5
        )
        own = DROPOUT_ATTENTION_BACKWARD(
            *(gradient, *operands, out, logsumexp, words),
            **options,
            attn_mask=attn_mask,
            scale=0.5,
            of_mask=needs,
        )
    for mine, theirs in zip((out, *own), (expected, *gradients), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


class Attention(nn.Module):
    """Calls of torch's function, in forms that it takes."""

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, None, 0.3)

    def grouped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, dropout_p=0.3, is_causal=True, scale=0.7, enable_gqa=True
        )

    def masked(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, m, dropout_p=1.0 - 1e-3)

    def dropped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=1.0)

    def twice(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.plain(q, k, v), self.plain(q, k, v)

    def under_autocast(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.scaled_dot_product_attention(q, k.bfloat16(), v, dropout_p=0.3)


def reals(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).double().requires_grad_()


@pytest.mark.parametrize(
    ("method", "shapes"),
    [
        ("plain", [(5, 4), (7, 4), (7, 3)]),
        ("plain", [(3, 5, 4), (3, 7, 4), (1, 7, 3)]),
        ("plain", [(2, 1, 3, 5, 4), (1, 2, 3, 7, 4), (3, 7, 3)]),
        ("grouped", [(2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3)]),
        ("grouped", [(6, 5, 4), (2, 7, 4), (2, 7, 3)]),
        ("masked", [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 3), (5, 1)]),
        ("masked", [(2, 2, 3, 5, 4), (2, 2, 3, 7, 4), (2, 2, 3, 7, 3), (2, 1, 1, 5, 7)]),
        ("dropped", [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 3)]),
        ("twice", [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 3)]),
    ],
)
def test_forms_of_a_call(method: str, shapes: list[tuple[int, ...]]) -> None:
    with WrittenDropout():
        check_equal(Attention(), method, *(reals(*shape) for shape in shapes), tolerance=1e-10)


def test_layers_draw_differently() -> None:
    q = torch.ones(2, 3, 5, 4)
    first, second = run_traced(Attention(), "twice", (q, q, q), {}, seed=3).outputs
    assert not torch.equal(first, second)


def test_autocast_casts_operands_as_it_does_those_of_torch() -> None:
    q, k, v = (torch.randn(2, 3, size, 4) for size in (5, 7, 7))
    (found,) = run_traced(Attention(), "under_autocast", (q, k, v), {}, seed=3).outputs
    torch.manual_seed(3)
    wide = [tensor.bfloat16().float() for tensor in (q, k, v)]
    expected = written_dropout.attention(*wide, dropout_p=0.3)
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2e-2, atol=1e-2)
    assert found.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("method", "shapes", "words"),
    [
        ("plain", [(2, 3, 5, 4), (2, 3, 7, 5), (2, 3, 7, 3)], "raised RuntimeError"),
        ("grouped", [(2, 6, 5, 4), (2, 4, 7, 4), (2, 4, 7, 3)], "must divide the number"),
        ("masked", [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 3), (5, 2)], "broadcast"),
    ],
)
def test_torch_refuses_what_it_refuses(
    method: str, shapes: list[tuple[int, ...]], words: str
) -> None:
    operands = [reals(*shape) for shape in shapes]
    with pytest.raises(RuntimeError):
        getattr(Attention(), method)(*operands)
    with pytest.raises(cg.TraceError, match=words):
        trace(Attention(), method, *operands)


def test_the_backward_computes_the_mask_again() -> None:
    """It takes two words, and nothing of the size of scores."""
    joint = joint_of(Attention(), "grouped", (0, 1, 2), *(reals(2, 2, 50, 4) for _ in range(3)))
    scores = 2 * 2 * 50 * 50
    sizes = {node: node.meta["val"].numel() for node in joint.graph.nodes if is_tensor(node)}
    assert max(sizes.values()) < scores
    targets = [str(node.target) for node in joint.graph.nodes]
    assert [targets.count(f"cg.dropout_attention{end}.default") for end in ("", "_backward")] == [
        1,
        1,
    ]
    assert targets.count("aten.randint.default") == 1


def is_tensor(node: Any) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


@pytest.mark.parametrize(("length", "is_fused"), [(704, True), (736, False)])
def test_a_compiler_for_devices_gets_the_operators_of_one_tile(length: int, is_fused: bool) -> None:
    """Of several it calls the operator; on hosts, it always does."""
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            q, k, v = (torch.empty(2, heads, length, 8, device=device) for heads in (8, 4, 4))
            words = torch.empty(2, dtype=torch.int64, device=device)
            graph = make_fx(lambda *x: DROPOUT_ATTENTION(*x, 0.5, False))(q, k, v, words).graph
            (node,) = graph.find_nodes(op="call_function", target=DROPOUT_ATTENTION)
            function = fused_dropout(node)
            assert (function is not None) == (is_fused and device == "cuda")
    if is_fused:
        q, k, v, words = *(torch.randn(1, 2, 3, 4) for _ in range(3)), torch.tensor([1, 2])
        options = {"attn_mask": torch.ones(3).bool(), "scale": 0.2, "columns": [5, 8]}
        assert function is not None
        fused = function(q, k, v, words, 0.5, False, **options)
        expected = DROPOUT_ATTENTION(q, k, v, words, 0.5, False, **options)
        assert all(map(torch.equal, fused, expected))
