"""Serve a folder on the ranks of a job; rank 0 runs random requests and compares their tokens.

mpiexec -n 2 python -m tests.examples.serve_job FOLDER [COUNT]
mpiexec -n 2 python -m tests.mpi.device_job tests.examples.serve_job FOLDER [COUNT]
"""

from __future__ import annotations

import sys
from pathlib import Path

import cg
from cg.backends.devices.programs.instance import DeviceOnlyInstance
from cg.launch.world import world as worlds
from examples.serve.engine import CgEngine, start

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
    if worlds.world().device is not None:
        say_how_devices_run(engine)
    engine.close()
    wrong, near = differences(logits_of(load_qwen2(folder)), requests)
    tokens = sum(len(each.out) for each in requests)
    print(
        f"{len(requests)} requests, {tokens} tokens: {wrong} differences, {near} near ties, "
        f"{driver.hits} shared blocks, {driver.preempted} preemptions",
        flush=True,
    )


def say_how_devices_run(engine: CgEngine) -> None:
    """Whether each rank's program is one graph, messages and state included, and is replayed."""
    instances = [
        instance
        for graph in (*engine.decode, engine.prefill)
        for context in graph._made.graph.contexts[0]
        for instance in context.instances
    ]
    whole = [each for each in instances if isinstance(each, DeviceOnlyInstance)]
    replayed = [each for each in whole if sum(s.replays for s in each.segments)]
    print(f"{len(whole)} of {len(instances)} whole, {len(replayed)} replayed", flush=True)


if __name__ == "__main__":
    main()
