"""Measure the cost of waiting for the norm of gradients, on paper and on CPU ranks that sleep.

    python -m cg.launch -n 4 benchmarks/clipping.py [--json FILE]

A step has several updates, each after a clipping that changes nothing. One program waits for the
norm before each update, the other does not (`compile_optimistic`). The runs are synthetic: stages
sleep instead of computing. Paper takes the nominal times alone: calls of the clipping and messages
take no time there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sleeping import ROWS, WIDTH, Sleeper, Times
from torch import Tensor

import cg

UPDATES, MICROBATCHES = 4, 8
TIMES = Times(6.0, 6.0, 6.0)


@cg.actor
class Updated(Sleeper):
    """A stage that is trained."""

    def __init__(self, times: Times, first: bool) -> None:
        super().__init__(times, first)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1e-9)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Row:
    """One schedule. Makespans are in milliseconds, bubbles shares of them.

    Attributes:
        awaited: whether the program waits for the norm.
        paper, paper_bubble: with the nominal times.
        measured, measured_bubble: medians over executions.
    """

    schedule: str
    awaited: bool
    paper: float
    paper_bubble: float
    measured: float
    measured_bubble: float


def make_step(stages: Sequence[Any]) -> cg.Step:
    """A step with `UPDATES` updates."""

    @cg.trace
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        found = []
        for bx, by in zip(x.chunk(UPDATES), y.chunk(UPDATES), strict=True):
            losses = []
            for h, my in cg.microbatches((bx, by), MICROBATCHES):
                for stage in stages:
                    h = stage.forward(h)
                losses.append(stages[-1].loss(h, my))
            loss = cg.mean(losses)
            cg.backward(loss)
            cg.clip_grad_norm(stages, 1e9)
            for stage in stages:
                stage.update()
            found.append(loss)
        return found

    return step


def rows(name: str, executions: int) -> list[Row]:
    """With and without waiting; collective."""
    p = cg.world_size()
    stages: list[Any] = [Updated.on(rank)(TIMES, rank == 0) for rank in range(p)]
    x = torch.ones(UPDATES * MICROBATCHES * ROWS, WIDTH)
    lowered = make_step(stages).lower(x, x)
    both = lowered.compile_optimistic(schedule=cg.schedules.by_name(name))
    found = []
    for awaited, program in ((True, both.plain), (False, both.bold)):
        nominal = program.simulate(cg.Costs(TIMES.tf, TIMES.tb, TIMES.tw))
        runs = program.record(x, x, executions=executions + 1)[1:]
        found.append(
            Row(
                name,
                awaited,
                nominal.makespan,
                nominal.bubble_ratio,
                median(run.makespan for run in runs),
                median(run.bubble_ratio for run in runs),
            )
        )
    both.close()
    return found


def main() -> None:
    """Measure on all ranks; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--executions", type=int, default=5, help="of each program")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    options = parser.parse_args()
    found = [row for name in ("1f1b", "zb-h1", "zb-h2") for row in rows(name, options.executions)]
    if cg.rank() > 0:
        return
    names = ("schedule", "waits", "makespan on paper", "bubble on paper", "makespan", "bubble")
    print(f"| {' | '.join(names)} |")
    print("|" + " --- |" * len(names))
    for row in found:
        print(
            f"| `{row.schedule}` | {'yes' if row.awaited else 'no'} | {row.paper:.0f} ms "
            f"| {row.paper_bubble:.1%} | {row.measured:.0f} ms | {row.measured_bubble:.1%} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))


if __name__ == "__main__":
    main()
