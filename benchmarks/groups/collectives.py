"""Collectives of a captured step, against the same calls of the library in one graph by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu.by_hand import Hand

import cg
from cg.backends.nccl.codes import CODES, REDUCTIONS
from cg.ir.attributes import ReduceOp
from cg.ir.ops.module import Channel
from cg.ir.types import DType

from .bench import Bench, Run

SIZES = {"8 B": (2, 128), "40 MB": (10_000_000, 32)}
"""Elements of float32 of the larger of operand and result, and how many collectives a step has.

Each is of what becomes of the result of the one before. There are so many that what a step costs
besides, as its start and what it gives to the caller, counts for little.
"""

KINDS = ("all_reduce", "all_gather", "reduce_scatter")

CALLS: dict[str, Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]] = {
    "all_reduce": cg.all_reduce,
    "all_gather": cg.all_gather,
    "reduce_scatter": cg.reduce_scatter,
}


def between(kind: str, ranks: int, x: torch.Tensor) -> torch.Tensor:
    """The next operand of a chain, of the result of the last collective: one kernel."""
    if kind == "all_gather":
        return x[: len(x) // ranks] * 0.5
    if kind == "reduce_scatter":
        return torch.cat([x] * ranks)
    return x * 0.5


@cg.actor
class Chain:
    """Makes operands."""

    def next(self, kind: str, ranks: int, x: torch.Tensor) -> torch.Tensor:
        return between(kind, ranks, x)


class HandChain(Hand):
    """The chain by calls of NCCL, all on one stream, as one graph."""

    def __init__(self, kind: str, x: torch.Tensor, length: int) -> None:
        self.ranks = cg.world_size()
        super().__init__([Channel(0, tuple(range(self.ranks)), collective=True)])
        self.kind, self.x, self.made, self.length = kind, x, x, length
        self.capture(self.work)

    def work(self) -> None:
        value = self.x
        for _ in range(self.length):
            value = self._one(between(self.kind, self.ranks, value))
        self.made = value

    def _one(self, x: torch.Tensor) -> torch.Tensor:
        library, comm = self.pool.library, self.lines[0].comm
        stream = torch.cuda.current_stream().cuda_stream
        if self.kind == "all_gather":
            made = torch.empty(len(x) * self.ranks, device=x.device)
            library.all_gather(x.data_ptr(), made.data_ptr(), x.nbytes, comm, stream)
            return made
        part = len(x) // (self.ranks if self.kind == "reduce_scatter" else 1)
        made = torch.empty(part, device=x.device)
        call = getattr(library, self.kind)
        numbers = CODES[DType.F32], REDUCTIONS[ReduceOp.SUM]
        call(x.data_ptr(), made.data_ptr(), part, *numbers, comm, stream)
        return made


def gloo_chain(kind: str, x: torch.Tensor, length: int) -> Run:
    """The chain by torch.distributed, for trials on hosts."""
    ranks = cg.world_size()

    def go() -> torch.Tensor:
        value = x
        for _ in range(length):
            operand = between(kind, ranks, value)
            if kind == "all_reduce":
                dist.all_reduce(operand)
                value = operand
            elif kind == "all_gather":
                value = torch.empty(len(operand) * ranks)
                dist.all_gather_into_tensor(value, operand)
            else:
                value = torch.empty(len(operand) // ranks)
                dist.reduce_scatter_tensor(value, operand)
        return value

    return go


def compiled_chain(kind: str, x: torch.Tensor, length: int) -> tuple[Any, Run]:
    """The chain as a step of cg."""
    ranks = cg.world_size()
    actors = [Chain.on(rank)() for rank in range(ranks)]  # type: ignore[attr-defined]

    @cg.trace
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        values = [x] * ranks
        for _ in range(length):
            made = [a.next(kind, ranks, v) for a, v in zip(actors, values, strict=True)]
            values = CALLS[kind](made)
        # The caller gets a number of each rank, so that no large result is sent to it.
        return [a.next("all_reduce", 1, v[:1]) for a, v in zip(actors, values, strict=True)]

    compiled = step.lower(x).compile()
    return compiled, partial(compiled, x)


def collectives(bench: Bench) -> None:
    """Chains of each kind and size; times are of a whole step."""
    ranks = cg.world_size()
    for kind in KINDS:
        for label, (numel, length) in SIZES.items():
            count = numel // (100 if bench.is_small and numel > 100 else 1)
            count = max(ranks, count // ranks * ranks)
            starts = count // ranks if kind == "reduce_scatter" else count
            x = torch.full((starts,), 2.0, device=bench.device)
            compiled, run = compiled_chain(kind, x, length)
            hand = HandChain(kind, x, length) if bench.is_gpu else None
            other = gloo_chain(kind, x, length) if hand is None else hand.replay
            bench.compare(
                "collectives",
                f"{length} x {kind}, {label}",
                {"cg": run, "NCCL by hand": other},
                inner=5,
                is_ahead=True,
            )
            compiled.close()
            if hand is not None:
                hand.close()
