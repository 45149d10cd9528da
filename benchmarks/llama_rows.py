"""Rows of figures for `llama.py`: timing of steps, what failed, and a table of all."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from llama_model import Cut, Part, Shape, Weights, forget_gradients
from provenance import provenance

import cg

PEAK = 989e12
"""FLOP/s of an H200 in dense bfloat16, by its data sheet."""

GIB = 2**30

PAIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
    "auto (loop)": "ScheduleInterleavedZeroBubble",
}
"""Schedules that both sides have; a search stands in for the interleaved zero bubble."""


@dataclass
class Bench:
    """The values that all sections share.

    Attributes:
        costs: measured, for each cut, for whole and split backwards, and by microbatches.
        torch_is_sound: whether torch.distributed may still be used: not after a failure.
    """

    options: argparse.Namespace
    shape: Shape
    device: torch.device
    rows: list[dict[str, Any]] = field(default_factory=list)
    costs: dict[tuple[Cut, bool, int], cg.Costs] = field(default_factory=dict)
    weights: Weights | None = None
    torch_is_sound: bool = True
    _origin: dict[str, Any] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.device.type != "cpu"

    def note(self, section: str, what: str, value: float, unit: str, **more: Any) -> None:
        """Record a figure; the same call on all ranks, rank 0 prints and writes."""
        row = {"section": section, "what": what, "value": round(value, 4), "unit": unit, **more}
        self.rows.append(row)
        if cg.rank() == 0:
            print(f"  {section:9} {what:44} {row['value']:>12} {unit}", flush=True)
            self.write()

    def write(self) -> None:
        """All rows so far, and their origin: a run that is cut short has left something."""
        if self.options.json is not None and cg.rank() == 0:
            self._origin = self._origin or {**provenance(), "ranks": cg.world_size()}
            found = {**self._origin, "rows": self.rows}
            self.options.json.write_text(json.dumps(found, indent=1) + "\n")

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.accelerator.synchronize()

    def free(self) -> None:
        """Give back what nobody uses any more."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> list[float]:
        """GiB of tensors at most since `free`, by rank; none without GPUs."""
        mine = torch.cuda.max_memory_allocated() / GIB if self.is_gpu else 0.0
        return [round(each, 2) for each in cg.allgather(mine)]

    @contextmanager
    def guarded(self, section: str, what: str, is_torch: bool = False) -> Iterator[None]:
        """Report what fails, on all ranks alike, and go on; a hang ends the job with tracebacks.

        What fails on one rank only may leave another waiting: then the deadline ends the job.
        """
        trouble = None
        faulthandler.dump_traceback_later(self.options.patience, exit=True)
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            trouble = f"{type(error).__name__}: {error}"[:400]
        troubles = [each for each in cg.allgather(trouble) if each is not None]
        faulthandler.cancel_dump_traceback_later()
        if troubles:
            self.torch_is_sound = self.torch_is_sound and not is_torch
            self.note(section, f"{what} FAILED", -1, "", error=troubles[0])
        self.free()

    def timed(self, run: Callable[[], object], modules: Sequence[Part]) -> float:
        """Milliseconds of a step on all ranks, the median."""
        times = []
        for number in range(self.options.warm + self.options.repeats):
            forget_gradients(modules)
            self.synchronize()
            cg.barrier()
            began = time.perf_counter()
            run()
            self.synchronize()
            cg.barrier()
            if number >= self.options.warm:
                times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(cg.allgather(times)[0])

    def speed(self, milliseconds: float, microbatches: int) -> dict[str, float]:
        """Tokens a second and GPU, and the share of its peak that is used."""
        tokens = microbatches * self.shape.sequence
        each = tokens / (milliseconds / 1e3) / cg.world_size()
        return {
            "step_ms": round(milliseconds, 3),
            "tokens_per_second_per_gpu": round(each, 1),
            "mfu": round(each * self.shape.flops / PEAK, 4),
        }


def table(rows: Sequence[dict[str, Any]], sections: Sequence[str]) -> str:
    """The schedules side by side, by number of microbatches, and the best of each side."""
    lines = []
    runs = [row for row in rows if "side" in row and row["section"] in sections]
    for m in sorted({row["microbatches"] for row in runs}):
        of_m = [row for row in runs if row["microbatches"] == m]
        right = {row["schedule"]: row for row in of_m if row["side"] == "torch"}
        lines.append(f"m = {m}:")
        for row in of_m:
            pair = right.get(PAIRS.get(row["schedule"], "")) if row["side"] == "cg" else None
            ratio = f"{row['value'] / pair['value']:.3f}x {pair['schedule']}" if pair else ""
            bubble = f"bubble {row['bubble']:.1%}" if "bubble" in row else ""
            lines.append(
                f"  {row['side']:5} {row['schedule']:30} {row['value']:>9.0f} tokens/s/GPU, MFU "
                f"{row['mfu']:.1%}, {max(row['peak_gib']):.1f} GiB {bubble:14} {ratio}"
            )
        best = {
            side: max((row["value"] for row in of_m if row["side"] == side), default=0.0)
            for side in ("cg", "torch")
        }
        if all(best.values()):
            lines.append(f"  best of cg / best of torch: {best['cg'] / best['torch']:.3f}")
    return "\n".join(lines)
