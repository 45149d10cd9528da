"""Measure the host's time in a step that is captured whole."""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import cg
from cg.ir.attributes import Stream
from cg.launch.world import world as worlds

from .report import Report
from .round_trip import Echo
from .timing import median

STEPS = 1000


class Stopwatch:
    """Adds up the time that is spent in a method of an object, while it is in use."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        self._owner = owner
        self._name = name
        self._method: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self._run)

    def _run(self, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._method(*arguments, **options)
        finally:
            self.seconds += time.perf_counter() - began

    def stop(self) -> None:
        """Put the method back."""
        delattr(self._owner, self._name)


def host(report: Report) -> None:
    """A step as a whole, by parts, and by functions."""
    first, second = Echo.on(0)(), Echo.on(1)()

    @cg.trace(outputs=cg.on(0))
    def step(x: torch.Tensor) -> torch.Tensor:
        return first.forward(second.forward(first.forward(x)))

    x = torch.ones(2, device="cuda")
    compiled = step.lower(x).compile()

    def run() -> None:
        for _ in range(STEPS):
            compiled(x)

    run()
    torch.cuda.synchronize()
    cg.barrier()
    began = time.perf_counter()
    run()
    each = (time.perf_counter() - began) / STEPS * 1e6
    report.note("host", "a step, nobody waiting for the device", each, "µs")
    parts(report, compiled, run)
    calls(report)
    torch.cuda.synchronize()
    cg.barrier()
    watch = cProfile.Profile()
    watch.enable()
    run()
    watch.disable()
    torch.cuda.synchronize()
    if cg.rank() == 0:
        pstats.Stats(watch, stream=sys.stdout).sort_stats("tottime").print_stats(30)
    compiled.close()


def parts(report: Report, compiled: Any, run: Callable[[], None]) -> None:
    """The times of the parts of a step; those of `run` are in it."""
    runtime = compiled._runtimes[0]
    trace = compiled.variants[0].trace
    watched = {
        "begin, among all ranks": Stopwatch(runtime._control, "begin"),
        "commit, among all ranks": Stopwatch(runtime._control, "commit"),
        "run": Stopwatch(runtime._executable, "run"),
        "run: wait for other streams' marks": Stopwatch(runtime._executable._flow, "join"),
        "run: outputs kept for the caller": Stopwatch(runtime._executable._device, "keep"),
    }
    torch.cuda.synchronize()
    cg.barrier()
    run()
    for what, watch in watched.items():
        watch.stop()
        report.note("host", what, watch.seconds / STEPS * 1e6, "µs")
    x = torch.ones(2, device="cuda")
    arguments = median(lambda: trace.inputs.flatten((x,), {}), 100, STEPS)
    report.note("host", "check of the arguments", arguments, "µs")
    report.note("host", "check of the actors", median(trace.check_guards, 100, STEPS), "µs")


def calls(report: Report) -> None:
    """The times of single calls of torch and of the device."""
    world: Any = worlds.world()
    device = world.device
    compute, side = device.stream(Stream.COMPUTE), device.stream(Stream.SEND)
    event, tensor = device.event(), torch.ones(2, device="cuda")

    def session() -> None:
        with device.session():
            pass

    singles: dict[str, Callable[[], object]] = {
        "session": session,
        "event.record": lambda: event.record(compute),
        "stream.wait_event": lambda: side.wait_event(event),
        "current_stream": lambda: torch.cuda.current_stream(device.torch_device),
        "set_stream": lambda: torch.cuda.set_stream(torch.cuda.current_stream()),
        "record_stream": lambda: tensor.record_stream(side),
        "data_ptr": tensor.data_ptr,
        "empty tensor": lambda: torch.empty(2, device="cuda"),
    }
    for what, call in singles.items():
        report.note("host", f"{what} alone", median(call, 100, STEPS), "µs")
    torch.cuda.synchronize()
