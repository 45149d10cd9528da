"""The device, options, and the timing of arms in turns, which all sections share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from gpu.report import Report
from gpu.timing import alternately, on_device

import cg

Run = Callable[[], object]


@dataclass
class Bench:
    """One run of the sections.

    Attributes:
        device: of this rank.
        is_small: whether sizes are small, as for a trial on hosts.
        compiles: whether torch compiles both sides.
        rounds: turns of each arm.
        report: collects figures.
    """

    device: torch.device
    is_small: bool
    compiles: bool
    rounds: int
    report: Report = field(default_factory=Report)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def fuse(self) -> str | None:
        """How cg compiles methods, where torch compiles the other side."""
        return "inductor" if self.compiles else None

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def turns(
        self, arms: Mapping[str, Run], inner: int, warm: int = 6, before: Run | None = None
    ) -> dict[str, float]:
        """Median time of a call of each arm, in ms; the slowest rank counts.

        Args:
            inner: calls between two looks at the clock.
            warm: calls of each before; graphs are captured in the third.
            before: called ahead of the calls of an arm, while the clock stands.
        """
        prepare = before or (lambda: None)
        found: dict[str, list[float]] = {name: [] for name in arms}
        for run in arms.values():
            prepare()
            for _ in range(warm):
                run()
        for _ in range(self.rounds):
            for name, run in arms.items():
                prepare()
                self.synchronize()
                cg.barrier()
                began = time.perf_counter()
                for _ in range(inner):
                    run()
                self.synchronize()
                found[name].append((time.perf_counter() - began) / inner * 1e3)
        mine = {name: statistics.median(times) for name, times in found.items()}
        every = cg.allgather(mine)
        return {name: max(each[name] for each in every) for name in arms}

    def on_device(self, arms: Mapping[str, Run], inner: int) -> dict[str, float]:
        """The same on the device alone, with the host ahead; on hosts as `turns`."""
        if not self.is_gpu:
            return self.turns(arms, inner)
        mine = alternately(arms, partial(on_device, inner=inner), self.rounds)
        every = cg.allgather(mine)
        return {name: max(each[name] for each in every) / 1e3 for name in arms}

    def compare(
        self, section: str, what: str, arms: Mapping[str, Run], inner: int, is_ahead: bool = False
    ) -> None:
        """Time `cg` against the other arms, and note what share of their time it takes.

        Args:
            is_ahead: whether the device's time counts, and not the host's.
        """
        found = self.on_device(arms, inner) if is_ahead else self.turns(arms, inner)
        for name, value in found.items():
            self.report.note(section, f"{what}, {name}", value, "ms")
            if name != "cg":
                self.report.note(section, f"{what}, cg / {name}", found["cg"] / value, "x")


def close(mine: torch.Tensor, right: torch.Tensor, tolerance: float, what: str) -> None:
    """Both sides compute the same.

    Raises:
        AssertionError: they differ by more than a share of the largest element.
    """
    scale = float(right.detach().abs().max()) or 1.0
    worst = float((mine.detach().float() - right.detach().float()).abs().max()) / scale
    assert worst <= tolerance, f"{what}: differs by {worst:.1e} of the largest element"
