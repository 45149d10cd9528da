"""Rings of attention, and zigzag order: values, bytes, work, and what is computed in which part."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

import cg
from cg.ir.layout import Cut
from cg.tracer.graph.autodiff.recomputation import Recompute
from cg.tracer.graph.layouts.attention.attention_forms import Sizes, best, estimates
from cg.tracer.graph.layouts.attention.attention_ring import BACKWARDS, FORWARDS
from cg.tracer.graph.layouts.propagation.partition import Partition
from cg.tracer.graph.layouts.propagation.sections import SectionCutter

from ...sampling import examples
from .joint_tools import compare
from .self_attention import MASKS, WIDTH, SelfAttention
from .simulation import Run, mesh
from .test_sequences import cudnn, efficient, flash, on_gpus, received


def run_of(
    form: str | None,
    order: str,
    heads: tuple[int, int] = (4, 2),
    ranks: int = 3,
    length: int = 12,
    mask: str = "causal",
    rows: int = 1,
    rate: float = 0.0,
) -> Run:
    """Attention in a form, whose values and gradients equal those of one process."""
    actor = SelfAttention(*heads, mask, rate)
    x = torch.randn(rows, length, 6, generator=torch.Generator().manual_seed(length)).double()
    cut = f"-,cp{order},-"
    return compare(
        *(actor, "forward", {}, mesh(cp=ranks), [x], [cut]), tolerance=1e-10, attention=form
    )


def sections(run: Run) -> tuple[Partition, Partition]:
    """The parts of the forward, and of the backward."""
    assert run.joint is not None
    cutter = SectionCutter(run.joint, run.propagation, run.propagation.place.ranks, {})
    made = cutter.sections((), Recompute.NOTHING)
    return made.forward.partition, made.backward.partition


def moved(parts: Partition, run: Run) -> int:
    """The entries that all ranks receive together."""
    transfers = [transfer for _, behind in parts.steps for transfer in behind]
    parameters = {node for node, _ in run.joint.state} if run.joint is not None else set()
    copies = run.propagation.copies
    kept = [t for t in transfers if t.before.node not in {copies[n] for n in parameters}]
    return sum(received(transfer, run.propagation) for transfer in kept)


def bounds(form: str, rows: int, length: int, heads: int, groups: int, ranks: int) -> list[int]:
    """The entries that all ranks receive in a forward and in a backward."""
    keys, queries = (2 * rows * length * WIDTH * number for number in (groups, heads))
    if form == "heads":
        return [(queries + keys) * (ranks - 1) // ranks] * 2
    return [keys * (ranks - 1), keys * (ranks - 1) * (2 if form == "ring" else 1)]


@examples(200)
@given(
    st.sampled_from(("gather", "heads", "ring", "ring")),
    st.sampled_from(("", "~")),
    st.sampled_from([(4, 4), (4, 2), (6, 3), (4, 1)]),
    st.integers(2, 4),
    st.integers(1, 2),
    st.one_of(st.integers(2, 12), st.sampled_from([31, 64, 127, 257])),
    st.sampled_from(MASKS),
    st.sampled_from((0.0, 0.4)),
)
def test_values_gradients_and_bytes(
    form: str,
    order: str,
    heads: tuple[int, int],
    ranks: int,
    rows: int,
    length: int,
    mask: str,
    rate: float,
) -> None:
    if form == "heads" and (heads[1] % ranks or mask in ("window", "documents", "bias")):
        form = "gather"
    run = run_of(form, order, heads, ranks, length, mask, rows, rate)
    found = [moved(parts, run) for parts in sections(run)]
    assert found == bounds(form, rows, length, *heads, ranks)


def kernels(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in (*FORWARDS, *BACKWARDS)]


def products(graph: fx.Graph) -> int:
    """The pairs of rows and keys that a rank's graph multiplies, for each head."""
    total = 0
    for node in kernels(graph):
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        rows, keys = (given[name].meta["val"].shape[2] for name in ("query", "key"))  # type: ignore[union-attr]
        skipped = min(rows, keys) * (min(rows, keys) - 1) // 2 if given["is_causal"] else 0
        total += rows * keys - skipped
    return total


def work(parts: Partition, ranks: int) -> list[int]:
    return [sum(products(part.bodies.at(rank)) for part in parts.parts) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("form", "ranks", "length"), [("gather", 2, 64), ("ring", 3, 257), ("ring", 4, 128)]
)
def test_ranks_do_equal_work_in_zigzag_order(form: str, ranks: int, length: int) -> None:
    run = run_of(form, "~", ranks=ranks, length=length)
    for parts in sections(run):
        found = work(parts, ranks)
        assert sum(found) == length * (length + 1) // 2, "nothing of the future is computed"
        assert max(found) * ranks <= 1.05 * sum(found), found
    plain, _ = sections(run_of(form, "", ranks=ranks, length=length))
    found = work(plain, ranks)
    assert max(found) * ranks > 1.3 * sum(found), "in the order of rows it is not equal"


@pytest.mark.parametrize("order", ["", "~"])
@pytest.mark.parametrize(("ranks", "length"), [(2, 9), (3, 13), (4, 40)])
def test_a_rank_computes_the_pairs_that_its_rows_see(order: str, ranks: int, length: int) -> None:
    forward, _ = sections(run_of("ring", order, ranks=ranks, length=length))
    cut = Cut(("cp",), zigzag=bool(order))
    pieces = [cut.piece(length, {"cp": (rank, ranks)}) for rank in range(ranks)]
    seen = [sum(row + 1 for run in piece for row in range(*run)) for piece in pieces]
    assert work(forward, ranks) == seen


def test_the_next_block_is_on_its_way_while_one_is_computed() -> None:
    """Behind a step's transfers stands the part that computes with the block before."""
    run = run_of("ring", "", ranks=4, length=16)
    for parts, apart in zip(sections(run), ([1, 1, 1], [1, 1, 2]), strict=True):
        with_kernels = [
            index for index, (part, _) in enumerate(parts.steps) if kernels(part.bodies.at(3))
        ]
        assert len(with_kernels) == 4, "each block in a part of its own"
        for step, index in enumerate(with_kernels[:3], 1):
            _, behind = parts.steps[index - 1]
            shifts = {t.after.layout.cuts[2].shift for t in behind if len(t.after.layout.cuts) == 4}
            assert step in shifts, "the block of the next step leaves ahead of this part"
        gaps = [b - a for a, b in itertools.pairwise(with_kernels)]
        assert gaps == apart, "gradients that have come are added up in parts between"


def test_a_backward_keeps_no_blocks_of_others() -> None:
    run = run_of("ring", "", ranks=3, length=12)
    assert run.joint is not None
    cutter = SectionCutter(run.joint, run.propagation, run.propagation.place.ranks, {})
    backward = cutter.sections((), Recompute.NOTHING).backward
    assert not any(cut.shift for version in backward.takes for cut in version.layout.cuts)


@pytest.mark.parametrize("kernel", [efficient, flash, cudnn])
@pytest.mark.parametrize("ranks", [2, 3])
def test_kernels_of_gpus(kernel: Any, ranks: int) -> None:
    steps = 2 * (ranks - 1)
    assert on_gpus(kernel, 64, ranks, ring=True) == ["reshard"] * 2 * steps
    if kernel is efficient:
        assert on_gpus(kernel, 64, ranks, masked=True, ring=True) == ["reshard"] * 2 * steps


def masked(x: Tensor, bias: Tensor) -> Tensor:
    q = k = v = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.parametrize(
    ("form", "heads", "mask", "reason"),
    [
        ("heads", (4, 1), "causal", "1 heads of keys are not 3 equal parts"),
        ("heads", (6, 3), "window", "the mask has rows, of which each rank would need all"),
    ],
)
def test_a_form_that_cannot_be_is_refused(
    form: str, heads: tuple[int, int], mask: str, reason: str
) -> None:
    with pytest.raises(cg.LayoutError, match=f"attention by {form}, and {reason}") as caught:
        run_of(form, "", heads, mask=mask)
    assert "leave out attention= in the plan" in str(caught.value.remedy)


def sizes(length: int, heads: int = 32, groups: int = 8, ranks: int = 2) -> Sizes:
    """Those of a layer of Llama, causal, in 16 bits."""
    own = length // ranks * 128 * 2
    return Sizes(ranks, own * heads, own * groups, own * groups, own * heads, own * length * heads)


def test_the_choice_follows_bytes_and_products() -> None:
    assert best(sizes(2048), {})[0] == "gather"
    assert best(sizes(2048, groups=32), {})[0] == "heads"
    form, why = best(sizes(131072), {"heads": "the mask has rows"})
    assert form == "ring"
    assert "ring receives 268.4 MB, keeps 0 bytes" in why
    assert "gather receives 268.4 MB, keeps 268.4 MB" in why
    assert "no heads: the mask has rows" in why
    of_ring = estimates(sizes(131072))["ring"]
    assert of_ring.waits < estimates(sizes(131072))["gather"].waits
