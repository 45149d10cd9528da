"""Random executions of three graphs over the ranks of the world, with errors and dropped results.

    python -m cg.launch -n 4 benchmarks/soak.py --seconds 600

Every value is checked against plain Python. At the end it prints what was run, and by how much the
memory of each rank has grown per minute, over the second half of the time: all that is resident, of
that what is the rank's own, and of that what malloc has given out. The rest of what is resident is
shared by ranks, and grows whenever a message meets a place that is too small for it, until all of
them have room: as much as all executions in flight need if all are large, after a minute or two.
The rest of what is the rank's own is what malloc keeps of what was given back.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import cg

PAGE = os.sysconf("SC_PAGE_SIZE")
SIZES = [1, 10, 1000, 100_000]
"""Elements of 8 bytes of a payload."""
LARGE = 600_000
"""The same of one in ten: what several threads copy, into memory of its own."""


class Refused(Exception):
    """The exception that a worker raises when it is asked to."""

    def __init__(self, number: int, rank: int) -> None:
        super().__init__(f"execution {number} on rank {rank}")
        self.number = number


@cg.actor
class Worker:
    """Adds up what it gets; refuses some of it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.total = 0

    def add(self, job: dict[str, Any]) -> dict[str, Any]:
        """Adds the job's number to the total, unless the job is refused here."""
        if job["refused_by"] == self.rank:
            raise Refused(job["number"], self.rank)
        self.total += job["number"]
        return {**job, "totals": [*job["totals"], self.total]}

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] < 0:
            raise Refused(int(-x[0, 0].item()), self.rank)
        return x * 2

    def memory(self, nothing: object) -> Memory:
        return memory_now()


class Memory(NamedTuple):
    """Bytes of a process: resident ones, its own of them, those that malloc has given out."""

    rss: int
    own: int
    in_use: int


class MallInfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library; see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


MALLINFO = ctypes.CDLL(None).mallinfo2
MALLINFO.restype = MallInfo


def memory_now() -> Memory:
    """Of this process."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    malloc = MALLINFO()
    return Memory(resident * PAGE, (resident - shared) * PAGE, malloc.uordblks + malloc.hblkhd)


@dataclass
class Graphs:
    """The three graphs, and one that asks for memory."""

    chain: Any
    fan: Any
    tensors: Any
    memory: Any

    @property
    def all(self) -> list[Any]:
        return [self.chain, self.fan, self.tensors, self.memory]


def compile_graphs(workers: list[Any], inflight: int) -> Graphs:
    """All graphs are over the same workers."""
    here = {"inputs": cg.on(0), "outputs": cg.on(0)}

    @cg.trace(**here)
    def chain(job):
        for worker in workers:
            job = worker.add(job)
        return job

    @cg.trace(**here)
    def fan(job):
        return [worker.add(job) for worker in workers]

    @cg.trace(**here)
    def tensors(x):
        for worker in workers:
            x = worker.scale(x)
        return x

    @cg.trace(**here)
    def memory(nothing):
        return [worker.memory(nothing) for worker in workers]

    return Graphs(
        chain.lower(cg.object).compile(max_inflight=inflight),
        fan.lower(cg.object).compile(max_inflight=inflight),
        tensors.lower(torch.zeros(64, 64)).compile(max_inflight=inflight),
        memory.lower(cg.object).compile(max_inflight=1),
    )


@dataclass
class Model:
    """The result of plain Python; `totals` by worker."""

    totals: list[int]
    number: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def chain(self, number: int, refused_by: int) -> list[int] | None:
        found = []
        for index in range(len(self.totals)):
            if refused_by == index + 1:
                return None
            self.totals[index] += number
            found.append(self.totals[index])
        return found

    def fan(self, number: int, refused_by: int) -> list[int] | None:
        for index in range(len(self.totals)):
            if refused_by != index + 1:
                self.totals[index] += number
        return None if refused_by else list(self.totals)

    def note(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


Check = Callable[[], None]


def start(graphs: Graphs, model: Model, source: random.Random) -> Check:
    """Start a random execution; what to call to check it."""
    model.number += 1
    number, ranks = model.number, len(model.totals)
    refused_by = source.randint(1, ranks) if source.random() < 0.1 else 0
    which = source.choice(["chain", "fan", "tensors"])
    model.note(which)
    if which == "tensors":
        value = float(number % 1000 + 1)
        given = torch.full((64, 64), -value if refused_by else value)
        future = graphs.tensors.execute(given)
        expected: Any = None if refused_by else value * 2**ranks
        return lambda: check_tensor(future, expected, model)
    payload = np.full(LARGE if source.random() < 0.1 else source.choice(SIZES), number)
    job = {"number": number, "refused_by": refused_by, "totals": [], "payload": payload}
    graph = graphs.chain if which == "chain" else graphs.fan
    future = graph.execute(job)
    totals = getattr(model, which)(number, refused_by)
    return lambda: check_job(future, number, totals, model)


def check_tensor(future: cg.Future, expected: float | None, model: Model) -> None:
    if expected is None:
        refused(future, None, model)
        return
    got = future.result(timeout=60)
    assert bool((got == expected).all()), (got, expected)


def check_job(future: cg.Future, number: int, totals: list[int] | None, model: Model) -> None:
    if totals is None:
        refused(future, number, model)
        return
    got = future.result(timeout=60)
    jobs = got if isinstance(got, list) else [got]
    found = [total for job in jobs for total in job["totals"]]
    assert found == totals, (found, totals)
    assert all(bool((job["payload"] == number).all()) for job in jobs)


def refused(future: cg.Future, number: int | None, model: Model) -> None:
    model.note("errors")
    error = future.exception(timeout=60)
    assert isinstance(error, Refused), f"execution {number} should have failed"
    assert number in (None, error.number), (number, error)


Sample = tuple[float, list[Memory]]
"""When it was taken, in seconds, and the memory of each rank."""


def growth(samples: list[Sample]) -> dict[str, list[float]]:
    """Memory of each rank: MiB at the end, and growth in KiB per minute over the second half.

    Growth is the median of the slopes between any two samples (Theil and Sen). Now and then a
    sample finds a payload that is not freed yet, and a line through all would follow it.
    """
    late = samples[len(samples) // 2 :]
    first, second = np.triu_indices(len(late), 1)
    minutes = np.array([at / 60 for at, _ in late])
    figures: dict[str, list[float]] = {}
    for which, name in enumerate(Memory._fields):
        kib = np.array([[each[which] / 1024 for each in ranks] for _, ranks in late])
        slopes = (kib[second] - kib[first]) / (minutes[second] - minutes[first])[:, None]
        figures[f"{name}_mib"] = [round(float(last) / 1024, 1) for last in kib[-1]]
        figures[f"{name}_kib_per_minute"] = [round(float(m), 1) for m in np.median(slopes, axis=0)]
    return figures


def drive(graphs: Graphs, seconds: float, seed: int, ranks: int) -> dict[str, Any]:
    source, model = random.Random(seed), Model([0] * ranks)
    waiting: list[Check] = []
    samples: list[Sample] = []
    began = time.monotonic()
    due = 0.0
    while (at := time.monotonic() - began) < seconds:
        if at >= due:
            while waiting:  # what waits for its turn is memory, too, now more and now less
                waiting.pop()()
            sizes = graphs.memory.execute(None).result(timeout=60)
            samples.append((at, [memory_now(), *sizes]))
            due = at + max(seconds / 100, 0.2)
        waiting.append(start(graphs, model, source))
        while len(waiting) > source.randint(0, 40):
            check = waiting.pop(source.randrange(len(waiting)))
            if source.random() < 0.2:
                model.note("dropped")
            else:
                check()
    for check in waiting:
        check()
    return {
        "seconds": seconds,
        "executions": model.number,
        **model.counts,
        **growth(samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inflight", type=int, default=8, help="of each graph")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    if cg.world_size() < 2:
        raise SystemExit("this needs 2 ranks or more: python -m cg.launch -n 4 " + __file__)
    workers = [Worker.on(rank)(rank) for rank in range(1, cg.world_size())]
    graphs = compile_graphs(workers, args.inflight)
    if cg.rank() == 0 or cg.world_size() == 1:
        figures = drive(graphs, args.seconds, args.seed, len(workers))
        for graph in graphs.all:
            graph.close()
        print(json.dumps(figures, indent=2))
        if args.json:
            Path(args.json).write_text(json.dumps(figures))
    else:
        for graph in graphs.all:
            graph.serve()


if __name__ == "__main__":
    main()
