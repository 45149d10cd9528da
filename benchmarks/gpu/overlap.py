"""Three senders and one receiver, which multiplies each matrix by itself."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import cg

from .report import Report
from .timing import on_device

SIDE = 10_000


@cg.actor
class Worker:
    @cg.opaque(fake=lambda self, value: torch.empty(SIDE, SIDE, dtype=torch.float16))
    def send(self, value: int) -> torch.Tensor:
        return torch.ones(SIDE, SIDE, dtype=torch.float16, device="cuda") * value

    def recv_and_matmul(self, x: torch.Tensor) -> tuple[float, Any, Any]:
        torch.matmul(x, x)
        return x[0][0].item(), tuple(x.shape), str(x.dtype)


Worker.recv_and_matmul = cg.opaque(Worker.recv_and_matmul)


def overlap(report: Report) -> None:
    """The receiver multiplies each matrix by itself; `.item()` ends each method."""
    if cg.world_size() < 4:
        return
    receiver = Worker.on(0)()
    senders = [Worker.on(rank)() for rank in (1, 2, 3)]

    @cg.trace(outputs=cg.on(0))
    def step(value: int) -> list[Any]:
        return [receiver.recv_and_matmul(sender.send(value)) for sender in senders]

    x = torch.ones(SIDE, SIDE, dtype=torch.float16, device="cuda")
    matmul = on_device(lambda: torch.matmul(x, x), inner=3) / 1e3
    report.note("overlap", "one matmul", matmul, "ms")
    for switches in ("", "-overlap"):
        compiled = step.lower(cg.object).compile(passes=switches)
        times = []
        for i in range(25):
            cg.barrier()
            began = time.perf_counter()
            out = compiled(i % 4)
            times.append(time.perf_counter() - began)
            if out is not None:
                assert [o[0] for o in out] == [float(i % 4)] * 3, out
        name = switches or "default"
        report.note("overlap", f"cg {name}, a step", statistics.median(times[5:]) * 1e3, "ms")
        compiled.close()
