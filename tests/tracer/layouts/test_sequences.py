"""Attention over a cut sequence equals that of one process, and ranks receive what it needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cg
from cg.ir.layout import overlap, volume
from cg.tracer.graph.layouts.change import DEFAULT
from cg.tracer.graph.layouts.propagation.partition import partition
from cg.tracer.graph.layouts.propagation.propagate import propagate
from cg.tracer.graph.layouts.versions import End, LayoutTransfer, Propagation

from ...sampling import examples
from .joint_tools import compare
from .op_cases import ints
from .self_attention import MASKS, WIDTH, SelfAttention
from .simulation import layout, mesh, simulate


def received(transfer: LayoutTransfer, propagation: Propagation) -> int:
    """The entries that all ranks receive together, at least, in a transfer."""
    place, shape = propagation.place, tuple(transfer.before.node.meta["val"].shape)
    before, after = transfer.before.layout, transfer.after.layout
    positions = [*map(place.position, place.ranks)]
    needed = [after.region(shape, position) for position in positions]
    if before.summands:
        return sum(map(volume, needed)) * (len(positions) - 1)
    held = [before.region(shape, position) for position in positions]
    return sum(
        volume(mine) - volume(overlap(mine, there))
        for mine, there in zip(needed, held, strict=True)
    )


def bound(rows: int, length: int, heads: int, groups: int, ranks: int, mask: str) -> int:
    """The entries that all ranks receive in a forward, by the form with fewer of them.

    A mask that has rows is not exchanged for one of heads.
    """
    keys, queries = (2 * rows * length * WIDTH * number for number in (groups, heads))
    by_rows = keys * (ranks - 1)
    by_heads = (queries + keys) * (ranks - 1) // ranks
    can_choose = groups % ranks == 0 and mask in ("none", "causal", "padding")
    return min(by_rows, by_heads) if can_choose else by_rows


@examples(48)
@given(
    st.sampled_from([(4, 4), (4, 2), (6, 3), (6, 6), (4, 1), (8, 4)]),
    st.integers(2, 4),
    st.integers(1, 3),
    st.one_of(st.integers(2, 12), st.sampled_from([31, 64, 127, 257])),
    st.sampled_from(MASKS),
)
def test_values_gradients_and_bytes(
    heads: tuple[int, int], ranks: int, rows: int, length: int, mask: str
) -> None:
    actor = SelfAttention(*heads, mask)
    x = torch.randn(rows, length, 6, generator=torch.Generator().manual_seed(length)).double()
    run = compare(actor, "forward", {}, mesh(cp=ranks), [x], ["-,cp,-"], tolerance=1e-10)
    moved = [received(t, run.propagation) for t in run.propagation.transfers]
    assert sum(moved) == 2 * bound(rows, length, *heads, ranks, mask), "forward and backward"


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 2)])
def test_with_cut_heads_and_rows_of_the_batch(heads: int, groups: int) -> None:
    actor = SelfAttention(heads, groups, "causal")
    plan = {"[qkv].*": "tp,-", "o.weight": "-,tp"}
    plan = {"[qkv].bias": "tp"} | plan
    x = torch.randn(3, 9, 6, generator=torch.Generator().manual_seed(0)).double()
    place = mesh(dp=2, cp=2, tp=2)
    compare(actor, "forward", plan, place, [x], ["dp,cp,-"], tolerance=1e-10)


@pytest.mark.parametrize(("queries", "keys"), [(7, 4), (4, 7), (5, 1)])
def test_lengths_of_queries_and_keys_may_differ(queries: int, keys: int) -> None:
    """A causal mask begins at the first query and the first key."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        aten = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, statistics = aten(q, k, v, 0.0, True)
        return out, statistics

    shapes = [(2, 4, queries, 8), (2, 4, keys, 8), (2, 4, keys, 8)]
    tensors = [ints(*shape) for shape in shapes]
    layouts = [layout("-,-,cp,-")] + [layout("-,-,-,-")] * 2
    _, found = simulate(function, tensors, layouts, mesh(cp=3))
    for mine, theirs in zip(found, function(*tensors), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_rank_makes_its_own_rows_of_a_mask() -> None:
    actor = SelfAttention(4, 2, "documents")
    x = torch.randn(1, 9, 6, generator=torch.Generator().manual_seed(0)).double()
    run = compare(actor, "forward", {}, mesh(cp=3), [x], ["-,cp,-"], tolerance=1e-10)
    sizes = [
        node.meta["val"].shape[-2:]
        for part in run.cut.parts
        for node in part.bodies.at(0).nodes
        if isinstance(node.meta.get("val"), Tensor)
    ]
    assert (3, 9) in sizes
    assert (9, 9) not in sizes


ATEN = torch.ops.aten


def efficient(*operands: Tensor) -> Any:
    gradient, q, k, v, *mask = operands
    bias = mask[0] if mask else None
    out, *seen = ATEN._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, not mask)
    backward = ATEN._scaled_dot_product_efficient_attention_backward
    mine = backward(
        *(gradient, q, k, v, bias, out, *seen, 0.0), [True, True, True, False], not mask
    )
    return out, mine[:3]


def flash(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    out, *seen, seed, offset, _ = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    backward = ATEN._scaled_dot_product_flash_attention_backward
    return out, backward(gradient, q, k, v, out, *seen, 0.0, True, seed, offset)


def cudnn(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    forward = ATEN._scaled_dot_product_cudnn_attention
    out, statistics, *seen, seed, offset, _ = forward(q, k, v, None, True, 0.0, True)
    backward = ATEN._scaled_dot_product_cudnn_attention_backward
    known = (out, statistics, seed, offset, None)
    return out, backward(gradient, q, k, v, *known, *seen, 0.0, True)


def on_gpus(
    kernel: Any, rows: int, ranks: int, masked: bool = False, ring: bool = False
) -> list[str]:
    """What travels for a kernel of GPUs, whose pieces have fakes on them; or in its ring."""
    with FakeTensorMode():
        tensors = [torch.empty(2, 4, rows, 16, device="cuda").bfloat16() for _ in range(4)]
        if masked:
            tensors.append(torch.empty(2, 1, rows, rows, device="cuda").bfloat16())
        graph = make_fx(kernel)(*tensors).graph
    cut, attention = ("cp~", "ring") if ring else ("cp", None)
    given = dict.fromkeys([*graph.find_nodes(op="placeholder")][:4], layout(f"-,-,{cut},-"))
    ends = [End(None, True)] * 4
    propagation = propagate(graph, mesh(cp=ranks), given, ends=ends, attention=attention)
    partition(propagation)  # a piece that has not the shape of its layout is an error
    changes = (transfer.change for transfer in propagation.transfers)
    return [change.value for change in changes if change.communicates]


@pytest.mark.parametrize("kernel", [efficient, flash, cudnn])
def test_kernels_of_gpus(kernel: Any) -> None:
    assert on_gpus(kernel, 64, 3) == ["gather", "gather", "reduce", "reduce"]
    assert on_gpus(kernel, 64, 2) == ["reshard"] * 8


def test_statistics_that_a_kernel_pads() -> None:
    assert on_gpus(efficient, 64, 2, masked=True) == ["gather", "gather", "reduce", "reduce"]
    with pytest.raises(cg.LayoutError, match="70 rows are cut, and the kernel pads") as caught:
        on_gpus(efficient, 70, 2, masked=True)
    assert caught.value.remedy.startswith("pad sequences to a multiple of 32 tokens")


def test_a_shift_of_a_cut_sequence_is_refused() -> None:
    with pytest.raises(cg.LayoutError, match="is sliced to 8 of 9"):
        simulate(lambda x: x[:, :-1], [ints(2, 9)], [layout("-,cp")], mesh(cp=3), allowed=DEFAULT)
