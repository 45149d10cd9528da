"""Transfers between layouts, against plain messages of as many bytes as the busiest rank gets."""

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


@dataclass(frozen=True)
class Change:
    """A change of layout between two ranks, and back.

    Attributes:
        places: the meshes before and after.
        plans: the layouts.
        sent: of the tensor's elements, what share goes from rank 0 to rank 1 in a round trip, and
            what share the other way.
    """

    places: tuple[Mesh, Mesh]
    plans: tuple[Any, Any]
    sent: tuple[float, float]


def changes() -> Mapping[str, Change]:
    pair, first, second = cg.mesh(dp=2), cg.mesh([0], dp=1), cg.mesh([1], dp=1)
    rows, columns = cg.cut(0, "dp"), cg.cut(1, "dp")
    return {
        "rows to columns": Change((pair, pair), (rows, columns), (0.5, 0.5)),
        "rows to copies": Change((pair, pair), (rows, cg.whole), (0.5, 0.5)),
        "one rank to rows": Change((first, pair), (cg.whole, rows), (0.5, 0.5)),
        "rows to the other rank": Change((pair, second), (rows, cg.whole), (0.5, 0.5)),
        "one rank to the other": Change((first, second), (cg.whole, cg.whole), (1.0, 1.0)),
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
    """The bytes of the round trips as messages of one piece, captured as one graph."""

    def __init__(self, sent: Sequence[float], x: torch.Tensor) -> None:
        super().__init__()
        sizes = [max(1, int(share * x.numel())) for share in sent]
        self.out = torch.ones(sizes[self.rank], device=x.device)
        self.into = torch.ones(sizes[1 - self.rank], device=x.device)
        self.capture(self.work)

    def work(self) -> None:
        compute = torch.cuda.current_stream()
        for _ in range(CHAIN):
            # Both ways at once where a change has both: a stream each.
            event = compute.record_event()
            for number, stream in enumerate(list(self.streams.values())[1:3]):
                stream.wait_event(event)
                if number == self.rank:
                    self.send(number, self.out, stream)
                else:
                    self.recv(number, self.into, stream)
                compute.wait_event(stream.record_event())


def gloo_copies(sent: Sequence[float], x: torch.Tensor) -> Run:
    """The same by torch.distributed, for trials on hosts."""
    rank = dist.get_rank()
    sizes = [max(1, int(share * x.numel())) for share in sent]
    out, into = torch.ones(sizes[rank]), torch.ones(sizes[1 - rank])

    def go() -> None:
        for _ in range(CHAIN):
            sending = dist.isend(out, 1 - rank)
            dist.recv(into, 1 - rank)
            assert sending is not None
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
        hand = HandCopies(change.sent, x) if bench.is_gpu else None
        other = gloo_copies(change.sent, x) if hand is None else hand.replay
        bench.compare(
            "resharding", f"{CHAIN} x {name} and back", {"cg": run, "messages": other}, inner=5
        )
        compiled.close()
        if hand is not None:
            hand.close()
