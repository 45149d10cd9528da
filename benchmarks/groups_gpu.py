"""Time groups of ranks on GPUs, against NCCL by hand, DTensor, DDP and FSDP2; a table comes last.

    python -m cg.launch -n 2 benchmarks/groups_gpu.py [--sections collectives,…] [--json FILE]

Each rank needs a GPU; `CG_DEVICE=cpu … --device cpu` tries everything out on hosts, small and
against gloo. Sections, by files of `benchmarks/groups/`: collectives, resharding (2 ranks), block
(a tensor parallel layer of Llama-7B's shape), replicas (data parallel and fully sharded), serving
(2 ranks). Arms take turns in the same processes. Times are medians, of the slowest rank; a ratio is
cg's time by the other's, so less than 1 is faster. Collectives and resharding are timed on the
device, with the host ahead. torch compiles both sides, but with `--no-compile`.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import llama_peer as peer
import torch
from groups.bench import Bench
from groups.block import block
from groups.collectives import collectives
from groups.replicas import replicas
from groups.resharding import resharding
from groups.serving import serving

import cg
from cg.launch.world import world as worlds

PATIENCE = 200.0
"""Seconds after which each rank says where it is, and after which what hangs is an error."""

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "collectives": collectives,
    "resharding": resharding,
    "block": block,
    "replicas": replicas,
    "serving": serving,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="with commas between them")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each arm")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu"), help="cpu: a trial")
    parser.add_argument("--no-compile", action="store_true", help="torch compiles nothing")
    args = parser.parse_args()
    unknown = set(args.sections.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    world: Any = worlds.world()
    if cg.world_size() < 2 or world.is_virtual:
        sys.exit("start this on 2 ranks or more: python -m cg.launch -n 2 benchmarks/groups_gpu.py")
    if (world.device is None) != (args.device == "cpu"):
        sys.exit("each rank needs a GPU; or start with CG_DEVICE=cpu, and --device cpu")
    faulthandler.dump_traceback_later(PATIENCE, repeat=True)
    is_small = args.device == "cpu"
    device = torch.device("cpu") if is_small else world.device.torch_device
    torch.set_num_threads(1 if is_small else torch.get_num_threads())
    bench = Bench(device, is_small, not (is_small or args.no_compile), args.rounds)
    peer.join(device, len(set(world.nodes)), PATIENCE)
    for name in args.sections.split(","):
        bench.report.say(f"== {name}")
        try:
            SECTIONS[name](bench)
        except Exception:
            # Other ranks may be elsewhere, so nothing after this can be relied on.
            traceback.print_exc()
            sys.stderr.flush()
            raise
        finally:
            if args.json is not None:
                bench.report.write(args.json)
    bench.report.table()
    peer.leave()


if __name__ == "__main__":
    main()
