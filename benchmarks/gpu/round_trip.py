"""A tensor goes from rank 0 to rank 1 and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import cg

from .by_hand import HandRoundTrip
from .report import Report
from .timing import alternately, on_device, per_call, reasons


@cg.actor
class Echo(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


SIZES = (("8 B", 2), ("40 MB", 10_000_000))


def raw(report: Report) -> None:
    """The same by hand alone, to see what settings of NCCL change."""
    for label, numel in SIZES:
        trip = HandRoundTrip(numel)
        report.note("raw", f"{label} by hand, device", on_device(trip.replay, inner=5), "µs")
        trip.close()


def round_trip(report: Report) -> None:
    """A tensor goes from rank 0 to rank 1 and back."""
    first, second = Echo.on(0)(), Echo.on(1)()

    def body(x: torch.Tensor) -> torch.Tensor:
        return first.forward(second.forward(first.forward(x)))

    for label, numel in SIZES:
        x = torch.arange(numel, dtype=torch.float32, device="cuda")
        step = cg.trace(outputs=cg.on(0))(body)
        raw = HandRoundTrip(numel)
        compiled = {
            name: step.lower(x).compile(passes=switches)
            for name, switches in (("captured", ""), ("eager", "-capture"))
        }
        for each in compiled.values():
            for _ in range(4):
                out = each(x)
            if out is not None:
                assert torch.equal(out, x), "a round trip gives another value"
        runs: dict[str, Callable[[], object]] = {"by hand": raw.replay}
        runs |= {f"cg {name}": partial(each, x) for name, each in compiled.items()}
        for what, measure in (("device", partial(on_device, inner=5)), ("call and wait", per_call)):
            found = alternately(runs, measure)
            for name, value in found.items():
                ratio = value / found["by hand"]
                how = what.replace("call", "launch") if name == "by hand" else what
                report.note("round_trip", f"{label} {name}, {how}", value, "µs", ratio=ratio)
        for each in compiled.values():
            report.say("   ", reasons(each))
            each.close()
        raw.close()
