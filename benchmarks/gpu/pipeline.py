"""Two stages, eight microbatches: forward and backward of two matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import cg
from cg.ir.attributes import Stream

from .by_hand import Hand
from .report import Report
from .timing import alternately, on_device, per_call, reasons

MICROBATCHES = 8

SWITCHES = {"captured": "", "eager": "-capture", "captured, -overlap": "-overlap"}


@cg.actor
class Linear(torch.nn.Module):
    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.eye(size, dtype=dtype) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w).sum()


def pipeline(report: Report) -> None:
    """Forward and backward of two matrices."""
    for size, dtype, tf32 in (
        (64, torch.float32, False),
        (1024, torch.float32, False),
        (1024, torch.float32, True),
        (1024, torch.bfloat16, False),
    ):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        kind = " TF32" if tf32 else " bf16" if dtype is torch.bfloat16 else ""
        try:
            _measure(report, size, dtype, f"{size}²{kind}")
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def _measure(report: Report, size: int, dtype: torch.dtype, label: str) -> None:
    a, b = Linear.on(0)(size, dtype), Linear.on(1)(size, dtype)
    x = torch.ones(MICROBATCHES * size, size, dtype=dtype, device="cuda")

    @cg.trace
    def step(x: torch.Tensor, a: Any = a, b: Any = b) -> None:
        losses = [b.loss(a.forward(part)) for part in cg.microbatches(x, MICROBATCHES)]
        cg.backward(cg.mean(losses))

    raw = HandPipeline(size, dtype)
    compiled = {name: step.lower(x).compile(passes=switches) for name, switches in SWITCHES.items()}
    runs: dict[str, Callable[[], object]] = {"by hand, one graph": raw.replay}
    runs["by hand, eager"] = raw.work
    runs |= {f"cg {name}": partial(each, x) for name, each in compiled.items()}
    for what, measure in (("device", on_device), ("call and wait", per_call)):
        found = alternately(runs, measure, rounds=3)
        for name, value in found.items():
            ratio = value / found["by hand, one graph"]
            report.note("pipeline", f"{label} {name}, {what}", value, "µs", ratio=ratio)
    for each in compiled.values():
        report.say("   ", reasons(each))
        each.close()
    raw.close()


class HandPipeline(Hand):
    """1F1B by hand."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        new = lambda: torch.ones(size, size, dtype=dtype, device="cuda")  # noqa: E731
        self.w, self.grad = new(), torch.zeros(size, size, dtype=dtype, device="cuda")
        self.x = [new() for _ in range(MICROBATCHES)]
        self.h = [new() for _ in range(MICROBATCHES)]
        self.g = [new() for _ in range(MICROBATCHES)]
        self.ones = new()
        # A kernel must not be loaded while a receive waits.
        with torch.cuda.stream(self.streams[Stream.COMPUTE]):
            for _ in range(2):
                torch.mm(self.ones, self.ones.t(), out=self.x[0]).sum()
                torch.mm(self.ones, self.ones, out=self.x[0])
                self.grad.addmm_(self.ones.t(), self.ones)
        torch.cuda.synchronize()
        cg.barrier()
        self.capture(self.work)

    def after(self, one: Any, other: Any) -> None:
        event = torch.cuda.Event()
        event.record(one)
        other.wait_event(event)

    def work(self) -> None:
        compute = torch.cuda.current_stream()
        send, recv = self.streams[Stream.SEND], self.streams[Stream.RECV]
        self.after(compute, send)
        self.after(compute, recv)
        if self.rank == 0:
            arrived = []
            for g in self.g:
                self.recv(1, g, recv)
                event = torch.cuda.Event()
                event.record(recv)
                arrived.append(event)
            for i in range(MICROBATCHES):
                self.forward(i, compute, send)
                if i >= 1:
                    self.backward(i - 1, compute, arrived)
            self.backward(MICROBATCHES - 1, compute, arrived)
        elif self.rank == 1:
            arrived = []
            for h in self.h:
                self.recv(0, h, recv)
                event = torch.cuda.Event()
                event.record(recv)
                arrived.append(event)
            for i in range(MICROBATCHES):
                compute.wait_event(arrived[i])
                torch.mm(self.h[i], self.w, out=self.x[i])
                self.x[i].sum()
                self.grad.addmm_(self.h[i].t(), self.ones)
                torch.mm(self.ones, self.w.t(), out=self.g[i])
                self.after(compute, send)
                self.send(1, self.g[i], send)
        self.after(send, compute)
        self.after(recv, compute)

    def forward(self, i: int, compute: Any, send: Any) -> None:
        torch.mm(self.x[i], self.w, out=self.h[i])
        self.after(compute, send)
        self.send(0, self.h[i], send)

    def backward(self, i: int, compute: Any, arrived: Sequence[Any]) -> None:
        compute.wait_event(arrived[i])
        self.grad.addmm_(self.x[i].t(), self.g[i])
