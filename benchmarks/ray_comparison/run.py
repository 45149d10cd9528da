"""Compare cg with Ray Core, Ray Compiled Graphs and raw mpi4py on this machine.

    make bench-ray
    python benchmarks/ray_comparison/run.py [--repeats 3] [--seconds 1] [--loops 0] [--record]

The arms run one after the other, each in processes of its own, and all of them again for each
repeat (ABAB…). "cg" is the compiled wheel, "cg bound" the same with ranks that keep to cores, and
"cg source" this checkout as it is. Times are of moments in which the machine was quiet, of all
arms alike (quiet.py); the medians of all times are beside them. With --loops 3 so many processes
that never wait run beside all arms. With --record the figures go to
benchmarks/results/ray_comparison.json and the plot to docs/images/.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from importlib.util import find_spec
from pathlib import Path

from plot import draw
from quiet import Probe

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent))  # for what all benchmarks share

from provenance import provenance  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "ray_comparison.json"
PICTURE = ROOT / "docs" / "images" / "ray_comparison.svg"

BOUND = ["--mpi-arg=-bind-to", "--mpi-arg=core"]
"""Ranks keep to cores, in turn, though there are more of them than cores."""

# Each command writes its cells to a file of its own; FILE stands for it.
ARMS: dict[str, list[list[str]]] = {
    "ray core": [["ray_arm.py", "core"]],
    "ray compiled": [["ray_arm.py", "compiled"]],
    "cg": [["-m", "cg.launch", "-n", "4", "cg_arm.py"]],
    "cg source": [["-m", "cg.launch", "-n", "4", "cg_arm.py"]],
    "cg bound": [["-m", "cg.launch", "-n", "4", *BOUND, "cg_arm.py"]],
    "mpi4py": [
        ["-m", "cg.launch", "-n", "2", "mpi_arm.py"],
        ["-m", "cg.launch", "-n", "4", "mpi_arm.py"],
    ],
}
TIMEOUT = 180.0
PATIENCE = 120.0
"""Seconds that a program may take, and by how many more for each second of a cell: where the
machine is never quiet, ten cells take eight times as long."""
GRACE = 15.0
CALIBRATION = 5.0
"""Seconds in which the machine is expected to be at its best once."""

Cells = dict[str, dict[str, float]]


def run(arm: str, words: list[str], options: list[str], timeout: float) -> Cells:
    """Run one program of an arm to its end; the cells that it has measured.

    Args:
        timeout: seconds that it may take.

    Raises:
        RuntimeError: it has failed, or has not ended in time and was stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cells.json"
        program = [str(HERE / word) if word.endswith(".py") else word for word in words]
        command = [sys.executable, *program, "--json", str(file), *options]
        paths = {"PYTHONPATH": str(ROOT / ".dev")} if arm == "cg source" else {}
        process = subprocess.Popen(
            command, cwd=ROOT, start_new_session=True, env={**os.environ, **paths}
        )
        try:
            code = process.wait(timeout)
        except BaseException:
            stop(process)
            raise
        if code:
            raise RuntimeError(f"{' '.join(command)} has ended by {code}")
        cells: Cells = json.loads(file.read_text())
        return cells


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a program and what it has started: by asking it, else by force."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that use all the time that a core gives them."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def check_wheel() -> None:
    """Return if the cg of this environment is the compiled wheel.

    Raises:
        SystemExit: it is not.
    """
    found = find_spec("cg.backends.driven.instance")
    if found is None or found.origin is None or found.origin.endswith(".py"):
        raise SystemExit("the compiled wheel of cg is not installed here: run make bench-ray")


def medians(repeats: list[dict[str, Cells]]) -> dict[str, Cells]:
    """For each arm and cell, the median of each figure over the repeats."""
    summary: dict[str, Cells] = {}
    for arm in repeats[0]:
        cells = summary[arm] = {}
        for cell, figures in repeats[0][arm].items():
            cells[cell] = {
                name: statistics.median(repeat[arm][cell][name] for repeat in repeats)
                for name in figures
            }
    return summary


def ratios(summary: dict[str, Cells]) -> dict[str, dict[str, float]]:
    """For each cell, by how much cg is faster than each other arm."""
    found: dict[str, dict[str, float]] = {}
    for cell, mine in summary.get("cg", {}).items():
        for arm, cells in summary.items():
            if arm == "cg" or cell not in cells:
                continue
            theirs = cells[cell]
            if "p50_us" in mine:
                ratio = theirs["p50_us"] / mine["p50_us"]
                all_ratio = theirs["all_p50_us"] / mine["all_p50_us"]
                found.setdefault(f"{cell}, all times", {})[arm] = round(all_ratio, 2)
            elif "per_second" in mine:
                ratio = mine["per_second"] / theirs["per_second"]
            else:
                continue
            found.setdefault(cell, {})[arm] = round(ratio, 2)
    return found


def table(summary: dict[str, Cells]) -> str:
    """All cells, a line each."""
    arms = list(summary)
    cells = list(dict.fromkeys(cell for arm in arms for cell in summary[arm]))
    faster = ratios(summary)
    head = "".join(f"{arm:>22}" for arm in arms)
    lines = [f"{'p50 / p90 in µs, or 1/s':34}{head}   compiled : cg, at all times"]
    for cell in cells:
        line = f"{cell:34}"
        for arm in arms:
            figures = summary[arm].get(cell)
            if figures is None:
                shown = "-"
            elif "p50_us" in figures:
                shown = f"{figures['p50_us']:.1f} / {figures['p90_us']:.1f}"
            elif "per_second" in figures:
                shown = f"{figures['per_second']:.0f}"
            else:
                shown = f"{figures['idle_share']:.2%}, {figures['wake_us']:.0f} µs"
            line += f"{shown:>22}"
        for name, width in ((cell, 15), (f"{cell}, all times", 13)):
            ratio = faster.get(name, {}).get("ray compiled")
            line += f"{ratio:>{width}.1f}x" if ratio is not None else ""
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each cell")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--loops", type=int, default=0, help="processes that never wait, beside")
    parser.add_argument("--record", action="store_true", help="write the figures and the plot")
    args = parser.parse_args()
    check_wheel()
    with busy_loops(args.loops):
        compare(args)


def compare(args: argparse.Namespace) -> None:
    """Measure all arms in turns, and print the figures."""
    before = provenance()
    best = Probe().best(CALIBRATION)
    options = ["--seconds", str(args.seconds), "--only", args.only]
    options += ["--best", *(f"{figure:.1f}" for figure in astuple(best))]
    repeats: list[dict[str, Cells]] = []
    for number in range(args.repeats):
        print(f"== repeat {number + 1} of {args.repeats}", flush=True)
        repeats.append({})
        for arm in args.arms:
            cells: Cells = {}
            for words in ARMS[arm]:
                cells.update(run(arm, words, options, TIMEOUT + PATIENCE * args.seconds))
            repeats[-1][arm] = cells
    summary = medians(repeats)
    print(table(summary))
    if args.record:
        result = {
            **before,
            "command": "make bench-ray ARGS=" + repr(" ".join(sys.argv[1:])),
            "commands": {
                arm: [
                    " ".join(["python", *words, "--json", "FILE", *options]) for words in programs
                ]
                for arm, programs in ARMS.items()
                if arm in args.arms
            },
            "figures": {
                "medians": summary,
                "times_faster": ratios(summary),
                "repeats": repeats,
            },
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        PICTURE.parent.mkdir(exist_ok=True)
        draw(summary, PICTURE)


if __name__ == "__main__":
    main()
