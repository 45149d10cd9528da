"""Check and time steps on GPUs, against the same work written by hand; a table comes last.

    python -m cg.launch -n 2 benchmarks/gpu.py [--json FILE] [--sections round_trip,pipeline,…]

Each rank needs a GPU. Sections, by files of `benchmarks/gpu/`: memory, raw, round_trip, driven,
pipeline, profile, host, equality (2 ranks or more), overlap (4 ranks). Times are medians. "hand" is
the same work by calls of NCCL and torch, captured into one CUDA graph on each rank; "device" is the
time between two events of the compute stream, put there while the device is still busy, so that the
host is ahead.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu.driven import driven
from gpu.equality import equality
from gpu.host import host
from gpu.launches import profile
from gpu.memory import memory
from gpu.overlap import overlap
from gpu.pipeline import pipeline
from gpu.report import Report
from gpu.round_trip import raw, round_trip

import cg
from cg.launch.world import world as worlds

PATIENCE = 25.0
"""Seconds after which each rank says where it is, and again."""

SECTIONS: dict[str, Callable[[Report], None]] = {
    "memory": memory,
    "raw": raw,
    "round_trip": round_trip,
    "driven": driven,
    "pipeline": pipeline,
    "profile": profile,
    "host": host,
    "equality": equality,
    "overlap": overlap,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="with commas between them")
    args = parser.parse_args()
    world: Any = worlds.world()
    faulthandler.dump_traceback_later(PATIENCE, repeat=True)
    if world.device is None or cg.world_size() < 2:
        sys.exit("start this on 2 ranks or more, each with a GPU: python -m cg.launch -n 2 …")
    report = Report()
    for name in args.sections.split(","):
        report.say(f"== {name}")
        try:
            SECTIONS[name](report)
        except Exception:
            # Other ranks may be elsewhere, so nothing after this can be relied on.
            traceback.print_exc()
            sys.stderr.flush()
            raise
        finally:
            if args.json is not None:
                report.write(args.json)
    report.table()


if __name__ == "__main__":
    main()
