"""Transfers between layouts, against plain messages of as many bytes as the busiest rank gets.

Both sides have a kernel between transfers, which reads and writes what a rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu.by_hand import Hand

import cg
from cg.ir.types import Mesh

from .bench import Bench, Run

CHAIN = 4
"""Round trips of a step, from the first layout to the second and back."""

SIDE = 4096


Phases = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Change:
    """A change of layout between two ranks, and back.

    Attributes:
        places: the meshes before and after.
        plans: the layouts.
        phases: of a round trip, one after the other: what share of the tensor's elements goes from
            rank 0 to rank 1, and what share the other way meanwhile.
    """

    places: tuple[Mesh, Mesh]
    plans: tuple[Any, Any]
    phases: Phases

    @property
    def held(self) -> list[list[float]]:
        """What share of the tensor's elements each of the two ranks holds, in each layout."""
        shares = []
        for rank in range(2):
            mine = []
            for place, plan in zip(self.places, self.plans, strict=True):
                cut = 1.0 if plan is cg.whole else 1.0 / len(place.ranks)
                mine.append(cut if rank in place.ranks else 0.0)
            shares.append(mine)
        return shares


def changes() -> Mapping[str, Change]:
    pair, first, second = cg.mesh(dp=2), cg.mesh([0], dp=1), cg.mesh([1], dp=1)
    rows, columns = cg.cut(0, "dp"), cg.cut(1, "dp")
    halves = [(0.5, 0.0), (0.0, 0.5)]
    return {
        "rows to columns": Change((pair, pair), (rows, columns), [(0.25, 0.25)] * 2),
        "rows to copies": Change((pair, pair), (rows, cg.whole), [(0.5, 0.5)]),
        "one rank to rows": Change((first, pair), (cg.whole, rows), halves),
        "rows to the other rank": Change((pair, second), (rows, cg.whole), halves),
        "one rank to the other": Change(
            (first, second), (cg.whole, cg.whole), [(1.0, 0.0), (0.0, 1.0)]
        ),
    }


@cg.actor
class Scale:
    """Keeps numbers as they are, by one kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


def compiled_change(change: Change, x: torch.Tensor) -> tuple[Any, Run]:
    """The round trips as a step of cg."""
    there, back = (
        Scale.on(place, plan={"forward(x)": plan})()  # type: ignore[attr-defined]
        for place, plan in zip(change.places, change.plans, strict=True)
    )

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(CHAIN):
            x = back.forward(there.forward(x))
        return x.mean()

    compiled = step.lower(x).compile()
    return compiled, partial(compiled, x)


class HandCopies(Hand):
    """The same kernels, and the bytes as messages of one piece, captured as one graph.

    Nothing is put together of pieces here, nor taken apart: a message is of memory as it lies.
    """

    def __init__(self, change: Change, x: torch.Tensor) -> None:
        super().__init__()
        self.parts = parts_of(change.phases, x)
        shares = change.held[cg.rank()]
        self.held = [torch.ones(int(s * x.numel()), device=x.device) for s in shares if s]
        self.capture(self.work)

    def work(self) -> None:
        compute = torch.cuda.current_stream()
        for number, parts in enumerate(self.parts * CHAIN):
            if number % len(self.parts) == 0:
                for mine in self.held:
                    torch.mul(mine, 1.0)
            # Both ways at once where a phase has both: a stream each.
            event = compute.record_event()
            for number, stream in enumerate(list(self.streams.values())[1:3]):
                part = parts[number]
                if part is None:
                    continue
                stream.wait_event(event)
                if number == self.rank:
                    self.send(number, part, stream)
                else:
                    self.recv(number, part, stream)
                compute.wait_event(stream.record_event())


def parts_of(phases: Phases, x: torch.Tensor) -> list[list[torch.Tensor | None]]:
    """For each phase the tensors that go from rank 0 and from rank 1; None where nothing does."""
    return [
        [torch.ones(int(s * x.numel()), device=x.device) if s else None for s in shares]
        for shares in phases
    ]


def gloo_copies(phases: Phases, x: torch.Tensor) -> Run:
    """The same by torch.distributed, for trials on hosts."""
    rank = dist.get_rank()
    every = parts_of(phases, x)

    def go() -> None:
        for parts in every * CHAIN:
            out, into = parts[rank], parts[1 - rank]
            sending = None if out is None else dist.isend(out, 1 - rank)
            if into is not None:
                dist.recv(into, 1 - rank)
            if sending is not None:
                sending.wait()

    return go


def resharding(bench: Bench) -> None:
    """Each change of layout, of a tensor of 64 MiB; on two ranks."""
    if cg.world_size() != 2:
        bench.report.say(f"  needs 2 ranks, and there are {cg.world_size()}")
        return
    side = 64 if bench.is_small else SIDE
    x = torch.ones(side, side, device=bench.device)
    for name, change in changes().items():
        compiled, run = compiled_change(change, x)
        assert float(run()) == 1.0, name  # type: ignore[arg-type]
        hand = HandCopies(change, x) if bench.is_gpu else None
        other = gloo_copies(change.phases, x) if hand is None else hand.replay
        bench.compare(
            "resharding",
            f"{CHAIN} x {name} and back",
            {"cg": run, "messages": other},
            inner=5,
            is_ahead=True,
        )
        compiled.close()
        if hand is not None:
            hand.close()
