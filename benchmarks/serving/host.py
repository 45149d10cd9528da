"""Microseconds of the host for a decode step of the serving example, without a model.

    python benchmarks/serving/host.py                    # at 8, 32 and 256 rows
    python benchmarks/serving/host.py --other CHECKOUT   # in turns with another checkout's example

The scheduler and the engine's own work of a step run as they are: blocks, tables, tensors of
inputs, tokens taken, events. Graphs are stubs whose results are there at once. Each round is a
process of its own, medians are over rounds, and a ratio is this checkout's time by the other's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parents[2]
ROWS = (8, 32, 256)
STEPS = 200
PROMPT = 100


class Stub:
    """A graph, and the future of each of its executions: token 5 for each row."""

    def __init__(self, tokens: Any) -> None:
        self._tokens = tokens

    def execute(self, *_: object) -> Stub:
        return self

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        return self._tokens


def microseconds(rows: int) -> float:
    """Of one step, over steps of a full group with requests that never end."""
    import torch

    from examples.serve import engine as engines
    from examples.serve import scheduler as schedulers
    from examples.serve.settings import Options
    from examples.serve.variants import all_sizes

    torch.set_num_threads(1)
    context, size = 1024, 64
    blocks = 1 + rows * context // size
    limits = engines.Limits(1, rows, PROMPT, blocks, size, context, 1 << 15, ())
    options = Options(groups=1, batches=(rows,), chunks=(PROMPT,), widths=(), draws=False)
    stub = Stub(torch.full((rows,), 5))
    graphs: Any = SimpleNamespace(compiled=dict.fromkeys(all_sizes(limits, options), (stub,)))
    engine = engines.CgEngine(limits, options, graphs)
    scheduler = schedulers.Scheduler(limits)
    for number in range(rows):
        prompt = tuple(range(number, number + PROMPT))
        scheduler.add(schedulers.Request(number, prompt, context - PROMPT))
    under_way: deque[Any] = deque()
    began, first, done = 0.0, 0, 0
    while done < STEPS:
        if not began and scheduler.stats.chunks == rows:
            began, first = time.process_time(), scheduler.stats.decodes
        for ticket in scheduler.schedule():
            under_way.append((ticket, engine.submit(ticket.work)))
        ticket, result = under_way.popleft()
        scheduler.complete(ticket, result.result())
        scheduler.take_events()
        done = scheduler.stats.decodes - first if began else 0
    return (time.process_time() - began) / STEPS * 1e6


def one_round(checkout: Path) -> dict[str, float]:
    """The microseconds of a checkout's example, by rows."""
    line = [sys.executable, str(Path(__file__).resolve()), "--of", str(checkout)]
    ended = subprocess.run(line, capture_output=True, text=True, check=True, cwd=checkout)
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--other", type=Path, help="another checkout, whose example takes turns")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of is not None:
        sys.path.insert(0, str(args.of.resolve()))
        print(json.dumps({str(rows): microseconds(rows) for rows in ROWS}))
        return
    checkouts = [HERE, *([args.other.resolve()] if args.other else [])]
    rounds = [[one_round(checkout) for checkout in checkouts] for _ in range(args.rounds)]
    for rows in map(str, ROWS):
        times = [statistics.median(each[i][rows] for each in rounds) for i in range(len(checkouts))]
        line = f"B = {rows:>3}: {times[0]:7.0f} us"
        if args.other:
            ratio = statistics.median(each[0][rows] / each[1][rows] for each in rounds)
            line += f", the other {times[1]:7.0f} us, ratio {ratio:.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
