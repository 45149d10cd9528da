"""Rings of attention in compiled steps: what travels beside what, and what is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cg
from cg.ir.attributes import Stream
from cg.ir.ops import AllGather, Call, Recv, Send, Wait
from cg.ir.ops.module import Module, Program
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.placement.fabrics import Fabrics

from ...worlds import virtual_world

WIDTH, HEADS, LENGTH = 16, 4, 13

_world = virtual_world(4, threads=1)


@cg.actor
class Layer(nn.Module):
    """Causal attention, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.packed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.packed(x).chunk(3, -1)
        )
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.mse_loss(x + self.out(h.transpose(1, 2).flatten(2)), y)

    def gradients(self) -> tuple[Tensor, Tensor]:
        assert self.packed.weight.grad is not None
        assert self.out.bias.grad is not None
        return self.packed.weight.grad.clone(), self.out.bias.grad.clone()


@cg.actor
class OneKeyHead(Layer):
    """Causal attention whose heads of queries share a single head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.packed, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * size)
        self.double()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        q = self.packed(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (part.unsqueeze(1) for part in self.keys(x).chunk(2, -1))
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return functional.mse_loss(x + self.out(h.transpose(1, 2).flatten(2)), y)


def batch(rows: int = 2) -> Tensor:
    """The input and the target, stacked."""
    shape = (2, rows, LENGTH, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()


def step_of(ranks: int, is_again: bool) -> Any:
    """A step of two microbatches, whose forwards may be computed again."""
    shardings = {"loss(x)|loss(y)": cg.cut(1, "cp", order="zigzag")}
    layer = Layer.on(cg.mesh(cp=ranks), plan=cg.plan(shardings, attention="ring"))()  # type: ignore[attr-defined]
    loss_of = cg.remat(layer.loss) if is_again else layer.loss

    @cg.trace
    def step(x: Tensor, y: Tensor) -> Any:
        losses = [loss_of(*parts) for parts in cg.microbatches((x, y), 2)]
        cg.backward(cg.mean(losses))
        return cg.mean(losses), layer.gradients()

    return step


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("is_again", [False, True])
def test_gradients(ranks: int, is_again: bool) -> None:
    x, y = batch()
    loss, found = step_of(ranks, is_again)(x, y)
    plain = Layer()
    expected = plain.loss(x, y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(found, plain.gradients(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def step_of_copies() -> Any:
    """A step over heads that `tp` cuts: its ranks have copies of the one head of keys."""
    cuts = {"loss(x)|loss(y)": cg.cut(1, "cp"), "packed.*": cg.cut(0, "tp")}
    plan = cg.plan(cuts | {"out.weight": cg.cut(1, "tp")}, attention="ring")
    layer = OneKeyHead.on(cg.mesh(cp=2, tp=2), plan=plan)()  # type: ignore[attr-defined]

    @cg.trace
    def step(x: Tensor, y: Tensor) -> Any:
        losses = [layer.loss(*parts) for parts in cg.microbatches((x, y), 2)]
        cg.backward(cg.mean(losses))
        return cg.mean(losses)

    return layer, step


def test_blocks_of_which_ranks_need_copies() -> None:
    """Each rank receives a share of a block, and gathers the others of its own copy."""
    x, y = batch(4)
    layer, step = step_of_copies()
    loss, plain = step(x, y), OneKeyHead()
    expected = plain.loss(x, y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
    assert plain.keys.weight.grad is not None
    for piece in layer.instances.values():
        torch.testing.assert_close(
            piece.keys.weight.grad, plain.keys.weight.grad, rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize(
    "fabrics", [Fabrics("nccl+nccl+nccl+nccl"), Fabrics("hccl+hccl+hccl+hccl", "", "hccl")]
)
def test_programs_of_devices_that_gather_copies_end(fabrics: Fabrics) -> None:
    module = step_of_copies()[1].lower(*batch(4)).trace.module
    PassManager(default_pipeline(fabrics=fabrics)).run(module)
    gathers = [op for op in module.programs[0].ops if isinstance(op, AllGather)]
    assert gathers
    assert {op.stream for op in gathers} == {Stream.COLLECTIVE}


def scheduled(ranks: int, fabrics: Fabrics | None = None) -> tuple[Module, tuple[str, ...]]:
    """The programs of a step, and what passes have to say."""
    module = step_of(ranks, False).lower(*batch()).trace.module
    reports = PassManager(default_pipeline(fabrics=fabrics)).run(module)
    return module, tuple(remark for report in reports for remark in report.remarks)


def beside(program: Program) -> Iterator[int]:
    """For each message of a ring, the calls between its send and the wait for what comes with it.

    A rank sends to the next one as often as it receives from the one before.
    """
    ops = program.ops
    sends = [i for i, op in enumerate(ops) if isinstance(op, Send)]
    futures = {op.result: n for n, op in enumerate(op for op in ops if isinstance(op, Recv))}
    waits = {
        futures[op.operands[0]]: index
        for index, op in enumerate(ops)
        if isinstance(op, Wait) and op.operands[0] in futures
    }
    assert len(sends) == len(futures) == len(waits)
    for number, sent in enumerate(sends):
        yield sum(isinstance(op, Call) for op in ops[sent : waits[number]])


def test_blocks_travel_beside_calls() -> None:
    """But for gradients that come home: nothing is left to be computed beside them."""
    module, remarks = scheduled(4)
    for program in module.programs:
        counts = [*beside(program)]
        assert len(counts) == 2 * (3 + 3 + 3) * 2, "forward, backward, gradients; 2 microbatches"
        assert sum(not count for count in counts) <= 2 * 2, counts
    assert "attention in forward of stage 0: 2 calls, ring: asked for by the plan" in remarks


@pytest.mark.parametrize(
    "fabrics", [Fabrics("nccl+nccl+nccl"), Fabrics("hccl+hccl+hccl", "", "hccl")]
)
def test_programs_of_devices_end(fabrics: Fabrics) -> None:
    """Also where a transport does one message after the other: `check-deadlock` proves it."""
    module, _ = scheduled(3, fabrics)
    edges = [channel for channel in module.channels.values() if not channel.collective]
    assert len(edges) == 3
    assert not any(channel.is_by_host for channel in edges), "each rank sends to the next alone"
    receives = [op for program in module.programs for op in program.ops if isinstance(op, Recv)]
    beside = Stream.MESSAGE if fabrics.rendezvous else Stream.RECV
    assert {op.stream for op in receives} == {beside}, "blocks come beside what ranks compute"
