"""The processor time of a server until it is ready: without a cache, with an empty and a full one.

    python benchmarks/serving/second_start.py --rounds 3 -- --model DIR -n 2 --ahead

The time is that of the front, the launcher and the ranks, imports included; weights are read, and
variants compiled and run on padding. Beside it stands how many files a start has added to the
cache: none, if every trace is one of before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from processes import serving

ARMS = ("no cache", "empty cache", "full cache")


def start(words: list[str], cache: str, log: Path) -> tuple[float, int]:
    """Start a server; returns its seconds of processor, and the files that it has added."""
    os.environ["CG_CACHE"] = cache
    before = files(cache)
    command = [sys.executable, "-m", "examples.serve", "--port", "0", *words]
    with serving(command, "", log) as server:
        seconds = server.cpu_of_all()
    return seconds, files(cache) - before


def files(cache: str) -> int:
    return sum(1 for _ in Path(cache).glob("*/*.entry")) if cache else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("words", nargs="+", help="options of examples.serve, behind --")
    args = parser.parse_args()
    rows: dict[str, list[tuple[float, int]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for arm in ARMS:
                cache = "" if arm == "no cache" else str(Path(folder, f"cache-{number}"))
                rows[arm].append(start(args.words, cache, Path(folder, "log")))
    for arm, starts in rows.items():
        seconds, added = zip(*starts, strict=True)
        listed = " ".join(f"{second:.1f}" for second in seconds)
        print(f"{arm:12} {statistics.median(seconds):.1f} s ({listed}), files added {added}")


if __name__ == "__main__":
    main()
