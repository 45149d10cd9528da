"""Measure what it takes to lower steps of many equal layers, and of many equal actors.

Run it on an otherwise idle core: `python benchmarks/trace_once.py`. Seconds are those of the
processor, for `lower` alone, in a process of its own each time: `first` is the first step that a
process lowers, with what torch imports then (torch._dynamo, at the first mode for fake tensors),
`imported` the same in a process that has imported that before, and `next` the median of the steps
that follow.

    python benchmarks/trace_once.py --base ../base

takes turns with another checkout, and gives the ratio of medians.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASES = {"32 layers in 4 stages": (4, 8), "16 actors in a row": (16, 1)}
"""Number of actors, one a rank, and of layers of each."""
HERE = Path(__file__).resolve().parent


def measure(case: str, repeats: int, imported: bool) -> list[float]:
    """The seconds of each `lower`, in this process."""
    actors, layers = CASES[case]
    os.environ["CG_RANKS"] = str(actors)
    import torch
    from llama_model import SMALL, Layer
    from torch import Tensor, nn

    import cg

    if imported:
        importlib.import_module("torch._dynamo")
    torch.set_num_threads(1)
    size = SMALL.width // SMALL.heads

    @cg.actor
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(SMALL) for _ in range(layers))
            angles = torch.rand(SMALL.sequence, size)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, self.cos, self.sin)
            return x

        def loss(self, x: Tensor) -> Tensor:
            return x.square().mean()

    stages = [Stage.on(rank)() for rank in range(actors)]

    @cg.trace
    def step(batch: Tensor) -> None:
        for x in batch.chunk(4):
            for stage in stages:
                x = stage.forward(x)
            cg.backward(stages[-1].loss(x))

    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        step.lower(torch.randn(8, SMALL.sequence, SMALL.width))
        seconds.append(time.process_time() - start)
    return seconds


def in_process(case: str, checkout: Path, repeats: int, imported: bool = False) -> list[float]:
    """The same in a process of its own, with the package of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cg").symlink_to(checkout)
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "CG_CACHE": ""}
        command = [sys.executable, __file__, "--measure", case, "--repeats", str(repeats)]
        command += ["--imported"] if imported else []
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    result: list[float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, help="another checkout, to take turns with")
    parser.add_argument("--turns", type=int, default=3, help="processes of each")
    parser.add_argument("--repeats", type=int, default=4, help="times that each process lowers")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--imported", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args.repeats, args.imported)))
        return
    checkouts = {"here": HERE.parent} | ({"base": args.base.resolve()} if args.base else {})
    rows = []
    columns = ("first", "imported", "next")
    print(f"{'':<24}{'':<8}" + "".join(f"{column:>10}" for column in columns))
    for case in CASES:
        times: dict[str, list[list[float]]] = {name: [] for name in checkouts}
        imported: dict[str, list[float]] = {name: [] for name in checkouts}
        for _ in range(args.turns):
            for name, checkout in checkouts.items():
                times[name].append(in_process(case, checkout, args.repeats))
                imported[name] += in_process(case, checkout, 1, imported=True)
        for name, runs in times.items():
            medians = (
                statistics.median(run[0] for run in runs),
                statistics.median(imported[name]),
                statistics.median(second for run in runs for second in run[1:]),
            )
            named = dict(zip(columns, medians, strict=True))
            rows.append({"case": case, "checkout": name, **named})
            print(f"{case:<24}{name:<8}" + "".join(f"{median:>10.2f}" for median in medians))
        if args.base:
            here, base = rows[-2:]
            ratios = [float(str(base[key])) / float(str(here[key])) for key in columns]
            print(f"{case:<24}{'ratio':<8}" + "".join(f"{ratio:>10.2f}" for ratio in ratios))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
