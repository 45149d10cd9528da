"""Time cg on one GPU against torch by hand: decoding, a stage's training step, serving.

    python benchmarks/one_gpu.py [--sections decode,stage,serving,server] [--json FILE]

Started by plain python, as any program on one device. `CG_DEVICE=cpu … --device cpu` tries
everything out on hosts, small. Sections, by files of `benchmarks/one_gpu/`: decode (a step of
Qwen2.5-0.5B's shapes in float16), stage (forward and backward of four layers of Llama-7B), serving
(`offline.py`, the requests of nano-vllm's benchmark), server (`online.py`, the same as streams of a
server in processes of its own). Arms take turns in one process and rows are printed as they come;
times are medians. A ratio is cg's time by the other's, so less than 1 is faster. A section leaves
out what it has no time for, and says so.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "serving"))

from one_gpu.bench import OneGpu
from one_gpu.decode import decode
from one_gpu.offline import offline
from one_gpu.online import online
from one_gpu.stage import stage

import cg
from cg.launch.world import world as worlds

PATIENCE = 200.0
"""Seconds after which the process says where it is."""

SECTIONS: dict[str, Callable[[OneGpu], None]] = {
    "decode": decode,
    "stage": stage,
    "serving": offline,
    "server": online,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, help="where the figures go")
    add("--sections", default=",".join(SECTIONS), help="with commas between them")
    add("--rounds", type=int, default=7, help="turns of each arm")
    add("--seconds", type=float, default=150.0, help="that a section may take")
    add("--only", nargs="*", default=[], metavar="WORD", help="arms whose names have one of these")
    add("--device", default="auto", choices=("auto", "cpu"), help="cpu: a trial")
    add("--no-compile", action="store_true", help="TorchInductor compiles nothing")
    args = parser.parse_args()
    unknown = set(args.sections.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    world: Any = worlds.world()
    if cg.world_size() != 1:
        sys.exit("this is for one rank: python benchmarks/one_gpu.py")
    if (world.device is None) != (args.device == "cpu"):
        sys.exit("this needs a GPU; or start with CG_DEVICE=cpu, and --device cpu")
    faulthandler.dump_traceback_later(PATIENCE, repeat=True)
    is_small = args.device == "cpu"
    device = torch.device("cpu") if is_small else world.device.torch_device
    compiles = not (is_small or args.no_compile)
    bench = OneGpu(
        device, is_small, compiles, args.rounds, limit=args.seconds, only=tuple(args.only)
    )
    failed = []
    for name in args.sections.split(","):
        bench.report.say(f"== {name}")
        bench.begin()
        try:
            SECTIONS[name](bench)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            failed.append(name)
        finally:
            if args.json is not None:
                bench.report.write(args.json)
    bench.report.table()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
