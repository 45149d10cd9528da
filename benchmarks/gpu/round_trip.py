"""A tensor goes from rank 0 to rank 1 and back."""

from __future__ import annotations

from functools import partial

import torch

import cg

from .by_hand import HandRoundTrip
from .report import Report
from .timing import on_device, per_call, reasons


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
        hand = on_device(raw.replay, inner=5)
        hand_call = per_call(raw.replay)
        for switches in ("", "-capture"):
            compiled = step.lower(x).compile(passes=switches)
            for _ in range(4):
                out = compiled(x)
            if out is not None:
                assert torch.equal(out, x), "a round trip gives another value"
            name = "captured" if not switches else "eager"
            device = on_device(partial(compiled, x), inner=5)
            call = per_call(partial(compiled, x))
            report.note(
                "round_trip", f"{label} cg {name}, device", device, "µs", ratio=device / hand
            )
            report.note(
                "round_trip", f"{label} cg {name}, call and wait", call, "µs", ratio=call / hand
            )
            report.say("   ", reasons(compiled))
            compiled.close()
        report.note("round_trip", f"{label} by hand, device", hand, "µs")
        report.note("round_trip", f"{label} by hand, launch and wait", hand_call, "µs")
        raw.close()
