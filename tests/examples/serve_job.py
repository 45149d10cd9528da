"""Serve a folder on the ranks of a job; rank 0 runs random requests and compares their tokens.

mpiexec -n 2 python -m tests.examples.serve_job FOLDER [COUNT]
"""

from __future__ import annotations

import sys
from pathlib import Path

import cg
from examples.serve.engine import start

from .serve_driver import Driver, Habits, differences, random_requests
from .serve_models import FEW, load_qwen2, logits_of


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40
    engine = start(folder, FEW)
    if engine is None:
        print(f"rank {cg.rank()} has served", flush=True)
        return
    requests = random_requests(count, 5, engine.limits)
    driver = Driver(engine, Habits(seed=5, preempting=0.03, cancelling=0.01))
    driver.run(requests)
    engine.close()
    wrong, near = differences(logits_of(load_qwen2(folder)), requests)
    tokens = sum(len(each.out) for each in requests)
    print(
        f"{len(requests)} requests, {tokens} tokens: {wrong} differences, {near} near ties, "
        f"{driver.hits} shared blocks, {driver.preempted} preemptions",
        flush=True,
    )


if __name__ == "__main__":
    main()
