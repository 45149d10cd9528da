"""Three senders and one receiver, which multiplies each matrix by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import cg

from .report import Report
from .timing import median, on_device

SIDE = 10_000


@cg.actor
class Worker:
    @cg.opaque(fake=lambda self, value: torch.empty(SIDE, SIDE, dtype=torch.float16))
    def send(self, value: int) -> torch.Tensor:
        return torch.ones(SIDE, SIDE, dtype=torch.float16, device="cuda") * value

    @cg.opaque
    def recv_and_matmul(self, x: torch.Tensor) -> tuple[float, Any, Any]:
        torch.matmul(x, x)
        return x[0][0].item(), tuple(x.shape), str(x.dtype)

    @cg.opaque
    def look(self, x: torch.Tensor) -> float:
        return x[0][0].item()


def overlap(report: Report) -> None:
    """The receiver multiplies each matrix by itself; `.item()` ends each method.

    The bound: the products one after the other by hand, each with its `.item()`, behind the first
    matrix, which nothing can hide. The other matrices may come meanwhile.
    """
    if cg.world_size() < 4:
        report.say(f"  needs 4 ranks, and there are {cg.world_size()}")
        return
    receiver = Worker.on(0)()
    senders = [Worker.on(rank)() for rank in (1, 2, 3)]

    @cg.trace(outputs=cg.on(0))
    def step(value: int) -> list[Any]:
        return [receiver.recv_and_matmul(sender.send(value)) for sender in senders]

    @cg.trace(outputs=cg.on(0))
    def first(value: int) -> float:
        return receiver.look(senders[0].send(value))

    x = torch.ones(SIDE, SIDE, dtype=torch.float16, device="cuda")

    def products() -> None:
        for _ in senders:
            receiver.local.recv_and_matmul(x)

    report.note("overlap", "one matmul", on_device(lambda: x @ x, inner=3) / 1e3, "ms")
    mine = median(products, 5, 20) / 1e3 if cg.rank() == 0 else 0.0
    by_hand = cg.allgather(mine)[0]
    report.note("overlap", "the products and their `.item()`, by hand", by_hand, "ms")
    alone = timed(first, lambda out, value: out == value)
    report.note("overlap", "a matrix made, sent and looked at", alone, "ms")
    bound = by_hand + alone
    report.note("overlap", "bound", bound, "ms")
    for switches in ("", "-overlap"):
        took = timed(step, lambda out, value: [o[0] for o in out] == [value] * 3, switches)
        what = f"cg {switches or 'default'}, a step"
        report.note("overlap", what, took, "ms", of_bound=round(took / bound, 3))


def timed(step: Any, is_right: Callable[[Any, float], bool], switches: str = "") -> float:
    """Median milliseconds of a step from a barrier to its return on rank 0."""
    times = []
    with step.lower(cg.object).compile(passes=switches) as compiled:
        for i in range(25):
            cg.barrier()
            began = time.perf_counter()
            out = compiled(i % 4)
            times.append(time.perf_counter() - began)
            assert out is None or is_right(out, float(i % 4)), out
    return float(cg.allgather(statistics.median(times[5:]) * 1e3)[0])
