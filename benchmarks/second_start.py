"""The time to the first step of a job, in turns: without a cache, with an empty and a full one.

    python benchmarks/second_start.py --rounds 3 examples/train_gpt.py --steps 1 --sample 0

Times are in seconds, from the beginning of the first trace on, without imports: by the clock to
the end of the first execution, of the slowest rank; and of processor, of all ranks, to there and
to where the step is bound. Between these two ranks compute.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARMS = ("no cache", "empty cache", "full cache")


def measured(script: str, arguments: list[str]) -> None:
    """Run a script on this rank, and print the times to its first execution."""
    import cg
    from cg.launch.api import compiled, step_function

    lower, call = step_function.Step.lower, compiled.Compiled.__call__
    bind = compiled.Compiled.__init__
    bound: list[float] = []
    began: list[tuple[float, float]] = []
    took: list[list[float]] = []

    def timed_lower(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        began.append((time.perf_counter(), time.process_time()))
        return lower(self, *args, **kwargs)

    def timed_bind(self: Any, /, *args: Any, **kwargs: Any) -> None:
        bind(self, *args, **kwargs)
        bound.append(time.process_time() - began[0][1])

    def timed_call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = call(self, *args, **kwargs)
        if not took:
            wall, processor = began[0]
            seconds = time.perf_counter() - wall
            took.append([seconds, time.process_time() - processor, bound[0]])
        return result

    step_function.Step.lower = timed_lower  # type: ignore[method-assign]
    compiled.Compiled.__call__ = timed_call  # type: ignore[method-assign]
    compiled.Compiled.__init__ = timed_bind  # type: ignore[method-assign]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    times = cg.allgather(took[0])
    if cg.rank() == 0:
        walls, processors, bounds = zip(*times, strict=True)
        figures = [max(walls), sum(processors), sum(bounds)]
        print(f"\nMEASURED {json.dumps(figures)}", flush=True)


def run(ranks: int, command: list[str], cache: str, out: Path) -> list[float]:
    """The times of one job."""
    shutil.rmtree(out, ignore_errors=True)
    launch = [sys.executable, "-m", "cg.launch", "-n", str(ranks), __file__, "--rank", *command]
    done = subprocess.run(
        [*launch, "--out", str(out)],
        env={**os.environ, "CG_CACHE": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    if done.returncode or not lines:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    times: list[float] = json.loads(lines[0].removeprefix("MEASURED "))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a script that takes --out")
    args = parser.parse_args()
    samples: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        for number in range(args.rounds):
            cache = str(Path(folder, f"cache-{number}"))
            for arm in ARMS:
                used = "" if arm == "no cache" else cache
                samples[arm].append(run(args.n, args.command, used, out))
    for arm, times in samples.items():
        columns = zip(("clock", "processor", "until bound"), zip(*times, strict=True), strict=True)
        texts = (f"{name} {_shown(column)}" for name, column in columns)
        print(f"{arm:12} {', '.join(texts)}")


def _shown(seconds: Sequence[float]) -> str:
    """The median, and all in brackets."""
    listed = " ".join(f"{second:.2f}" for second in seconds)
    return f"{statistics.median(seconds):.2f} s ({listed})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        measured(sys.argv[2], sys.argv[3:])
    else:
        main()
