"""The time of a server until it is ready: without a cache, with an empty and a full one.

    python benchmarks/serving/second_start.py --rounds 3 -- --model DIR -n 2 --ahead
    python benchmarks/serving/second_start.py --rounds 3 -- --model DIR -n 2 --fuse inductor

Processor time is that of the front, the launcher and the ranks, imports included; weights are read,
and variants compiled and run on padding. A rank also says for how long it compiled and ran them.
Beside it stands how many files a start has added to the cache: none, if every trace is one of
before. TorchInductor's cache is empty where that of cg is, or there is none.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from processes import serving

ARMS = ("no cache", "empty cache", "full cache")


SETTLING = 4.0
"""Seconds that a server is left alone once it is ready, for it writes to its cache behind."""


def start(words: list[str], cache: str, kernels: str, log: Path) -> tuple[float, float, int]:
    """Start a server.

    Args:
        words: its options.
        cache, kernels: the folders of cg's cache and of TorchInductor's; no cache if empty.

    Returns:
        Its seconds of processor, those from the first variant to ready, and the files added.
    """
    os.environ["CG_CACHE"], os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache, kernels
    before = files(cache)
    command = [sys.executable, "-m", "examples.serve", "--port", "0", *words]
    with serving(command, "", log) as server:
        seconds = server.cpu_of_all()
        time.sleep(SETTLING)
    return seconds, compiling(log.read_text()), files(cache) - before


def compiling(text: str) -> float:
    """The seconds from the line of the first variant to that of the last step on padding."""
    moments = {
        name: datetime.fromisoformat(found[1].replace(",", "."))
        for name, pattern in (("begin", "compiling variant 1 of"), ("end", "the engine is ready"))
        if (found := re.search(rf"^(\S+ \S+) .*{pattern}", text, re.MULTILINE))
    }
    return (moments["end"] - moments["begin"]).total_seconds()


def files(cache: str) -> int:
    return sum(1 for _ in Path(cache).glob("*/*.entry")) if cache else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("words", nargs="+", help="options of examples.serve, behind --")
    args = parser.parse_args()
    rows: dict[str, list[tuple[float, float, int]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for arm in ARMS:
                cache = "" if arm == "no cache" else str(Path(folder, f"cache-{number}"))
                kernels = str(Path(folder, f"kernels-{number}{'-none' * (not cache)}"))
                rows[arm].append(start(args.words, cache, kernels, Path(folder, "log")))
                print(f"{arm}: {rows[arm][-1]}", flush=True)
    for arm, starts in rows.items():
        processor, seconds, added = zip(*starts, strict=True)
        columns = [
            f"{statistics.median(each):.1f} s ({' '.join(f'{s:.1f}' for s in each)})"
            for each in (processor, seconds)
        ]
        print(f"{arm:12} {columns[0]} of processor, {columns[1]} compiling, files added {added}")


if __name__ == "__main__":
    main()
