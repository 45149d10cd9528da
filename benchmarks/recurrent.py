"""Measure what it takes to lower a step of recurrent layers, for growing numbers of time steps.

Run it on an otherwise idle core: `python benchmarks/recurrent.py [--json FILE]`. Seconds are those
of the processor, for `lower` alone, forward and backward: the median of `--repeats`, behind one
step that is not counted, with what torch imports at first. Cells stand in a Python loop.

    python benchmarks/recurrent.py --cases "LSTM, 2 layers" --steps 1 35
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("CG_RANKS", "1")
os.environ.setdefault("CG_CACHE", "")  # each trace is made

import torch
from torch import Tensor, nn

import cg

WIDTH, ROWS = 64, 8
STEPS = (1, 35, 140, 512)


class Layers(nn.Module):
    """Two recurrent layers."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.layers = kind(WIDTH, WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]  # type: ignore[no-any-return]


class CellLoop(nn.Module):
    """A cell in a Python loop over time."""

    def __init__(self, kind: Callable[..., nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, hidden = None, []
        for at_step in x:
            state = self.cell(at_step, state)
            hidden.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(hidden)


CASES: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    "LSTM, 2 layers": (lambda: Layers(nn.LSTM), 512),
    "GRU, 2 layers": (lambda: Layers(nn.GRU), 512),
    "LSTM cell": (lambda: CellLoop(nn.LSTMCell), 35),
    "GRU cell": (lambda: CellLoop(nn.GRUCell), 35),
}
"""What makes the layers of a case, and the most steps that it is measured with."""


@dataclass(frozen=True)
class LowerTime:
    """One case with so many time steps: the seconds that `lower` takes."""

    case: str
    steps: int
    seconds: float


@cg.actor
class Model(nn.Module):
    """Layers, and a loss."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.inner = CASES[case][0]()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()  # type: ignore[no-any-return]


def measure(case: str, steps: int, repeats: int) -> LowerTime:
    """The median of the seconds of `lower`."""
    model = Model.on(0)(case)

    @cg.trace
    def step(x: Tensor) -> None:
        cg.backward(model.forward(x))

    step.lower(torch.randn(1, ROWS, WIDTH))
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        step.lower(torch.randn(steps, ROWS, WIDTH))
        seconds.append(time.process_time() - start)
    return LowerTime(case, steps, statistics.median(seconds))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--steps", nargs="+", type=int, default=STEPS, help="numbers of time steps")
    parser.add_argument("--repeats", type=int, default=3, help="take the median of so many")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(case, steps, args.repeats)
        for case in args.cases
        for steps in args.steps
        if steps <= CASES[case][1]
    ]
    for row in rows:
        print(f"{row.case:<16} {row.steps:>4} steps {row.seconds:>7.2f} s")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
