"""Times the steps of an arm, alike on both sides, and writes what was measured."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .exposed import profiled

GIB = 1 << 30

Step = Callable[[int], float | None]
"""Does the step of a number, and gives its loss, if it is known on this rank."""


@dataclass(frozen=True)
class Meter:
    """What one rank measures.

    Attributes:
        args: options of the arm.
        gather: gives the values of all ranks, by rank.
    """

    args: argparse.Namespace
    rank: int
    gather: Callable[[Any], Sequence[Any]]

    def run(self, step: Step, details: Callable[[], dict[str, Any]] = dict) -> None:
        """Time the steps, then profile some more; rank 0 writes the result; collective.

        Args:
            details: gives what to write besides, after the last step.
        """
        args = self.args
        seconds: list[float] = []
        losses: list[float | None] = []
        until_first = 0.0
        for number in range(args.steps):
            began = time.perf_counter()
            losses.append(step(number))
            synchronize()
            seconds.append(time.perf_counter() - began)
            until_first = until_first or time.time() - args.began
        behind = range(args.steps, args.steps + args.profiled)
        communication = profiled(lambda: losses.extend(map(step, behind)), args.profiled)
        mine = {
            "step_ms": [round(each * 1e3, 3) for each in seconds],
            "losses": losses,
            "until_first_step_s": round(until_first, 2),
            "communication": communication,
            **memory(),
        }
        everyone = self.gather(mine)
        if self.rank == 0:
            result = {**merged(everyone), **software(), **details()}
            self.args.result.write_text(json.dumps(result))


def merged(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The measurements of all ranks as one row; a step takes as long as on its slowest rank."""
    known = [
        [loss for loss in losses if loss is not None]
        for losses in zip(*(rank["losses"] for rank in ranks), strict=True)
    ]
    return {
        "step_ms": [max(times) for times in zip(*(r["step_ms"] for r in ranks), strict=True)],
        "losses": [sum(losses) / len(losses) for losses in known],
        "until_first_step_s": max(rank["until_first_step_s"] for rank in ranks),
        "ranks": [{key: rank[key] for key in ("step_ms", "communication")} for rank in ranks],
        "peak_gib": [rank["peak_gib"] for rank in ranks],
        "reserved_gib": [rank["reserved_gib"] for rank in ranks],
    }


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory() -> dict[str, float | None]:
    """GiB at most on this rank's GPU: in tensors, and taken by torch's allocator."""
    if not torch.cuda.is_available():
        return {"peak_gib": None, "reserved_gib": None}
    return {
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
    }


def software() -> dict[str, Any]:
    """What ran the arm."""
    if not torch.cuda.is_available():
        return {"torch": torch.__version__, "device": "cpu", "nccl": None}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "nccl": nccl}
