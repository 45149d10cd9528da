"""Serve a folder on the ranks of a job; rank 0 runs random requests and compares their tokens.

mpiexec -n 2 python -m tests.examples.serve_job FOLDER [COUNT [TP [CP]]]
mpiexec -n 2 python -m tests.mpi.device_job tests.examples.serve_job FOLDER [COUNT [TP [CP]]]

Stages that are cut over ranks take one group of requests, so that less is traced; on hosts these
are greedy. Others begin with two variants, and make more between requests, on hosts with a compiler
that leaves graphs as they are, so that each rank has a thread that compiles.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import cg
from cg.backends.devices.programs.instance import DeviceOnlyInstance
from cg.backends.fusion import fuse
from cg.launch.world import world as worlds
from examples.serve.engine import CgEngine, start
from examples.serve.requests import Sampling

from .serve_driver import Driver, Habits, differences, random_requests
from .serve_models import FEW, GREEDY, load_qwen2, logits_of


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40
    tp, cp = (int(sys.argv[at]) if len(sys.argv) > at else 1 for at in (3, 4))
    has_device = worlds.world().device is not None
    is_shared = tp * cp > 1
    options = replace(GREEDY, tp=tp, cp=cp, draws=has_device) if is_shared else FEW
    fuse.FUSERS["graph"] = lambda: as_is
    if not (is_shared or has_device):
        options = replace(options, fuse="graph")
    engine = start(folder, replace(options, late=not is_shared))
    if engine is None:
        print(f"rank {cg.rank()} has served", flush=True)
        return
    requests = random_requests(count, 5, engine.limits, share=0.25)
    if not engine.options.draws:
        requests = [replace(each, sampling=Sampling()) for each in requests]
    driver = Driver(engine, Habits(seed=5, preempting=0.03, cancelling=0.01))
    for number in range(4):  # between them, variants are compiled that they have asked for
        driver.run(requests[number::4])
        improve(engine)
    if has_device:
        say_how_devices_run(engine)
    engine.close()
    wrong, near = differences(logits_of(load_qwen2(folder)), requests)
    tokens = sum(len(each.out) for each in requests)
    print(
        f"{len(requests)} requests, {tokens} tokens: {wrong} differences, {near} near ties, "
        f"{driver.hits} shared blocks, {driver.preempted} preemptions",
        flush=True,
    )


def as_is(module: torch.fx.GraphModule, examples: Any) -> Any:
    """A compiler that leaves graphs as they are."""
    return lambda values: module(*values)


def improve(engine: CgEngine) -> None:
    """Make all variants that are due."""
    is_ready = threading.Event()
    engine.when_ready(is_ready.set)
    while not engine.graphs.is_ready or engine.due(idle=True):
        if engine.graphs.is_ready:
            is_ready.clear()
            engine.improve()
        else:
            is_ready.wait()


def say_how_devices_run(engine: CgEngine) -> None:
    """Print how many programs of this rank are one graph with messages and state, and replayed.

    Which context runs an execution depends on time, so one of each variant's is enough.
    """
    variants = [
        instances
        for graph in engine.graphs.graphs()
        for instances in zip(
            *(context.instances for context in graph._open_graph.graph.contexts[0]), strict=True
        )
    ]
    whole = [v for v in variants if all(isinstance(each, DeviceOnlyInstance) for each in v)]
    replayed = [v for v in whole if any(s.replays for each in v for s in each.segments)]
    print(f"{len(whole)} of {len(variants)} whole, {len(replayed)} replayed", flush=True)


if __name__ == "__main__":
    main()
