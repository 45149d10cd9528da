"""How long requests wait while a fresh server compiles variants behind.

    python benchmarks/serving/behind.py --seconds 120
    python benchmarks/serving/behind.py --server "python -m examples.serve --model DIR --port 0"

From the moment it is ready on, a client asks for a few tokens, waits for longer than the second
after which a server counts as idle, and asks again. It writes how many variants have become usable
meanwhile, and of all requests the time to the first token and the longest gap between two tokens.
The compiler's cache is an empty folder, unless `--cache` names one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))

from load import Arrival, Row, ask, body_of
from processes import serving

SERVER = (
    f"{sys.executable} -m examples.serve --model tiny-qwen2 --port 0 --fuse inductor "
    "--batch 4 --batches 1 --chunk 64 --chunks 32 --context 128"
)
COMPILED = " variants are compiled"
"""How the server's log says that another one is usable."""


async def load(url: str, seconds: float, output: int, seed: int) -> list[Row]:
    """Ask again and again; a row for each request."""
    pauses, rows = random.Random(seed), list[Row]()
    end = monotonic() + seconds
    async with aiohttp.ClientSession() as session:
        while monotonic() < end:
            arrival = Arrival(0.0, tuple(range(3, 15)), output)
            rows.append(await ask(session, url, arrival, body_of(arrival), True, False))
            await asyncio.sleep(pauses.uniform(1.0, 3.0))
    return rows


def line(name: str, values: Sequence[float]) -> str:
    ordered = sorted(values)
    p50, p90, longest = statistics.median(ordered), ordered[9 * len(ordered) // 10], ordered[-1]
    return f"{name:24} p50 {p50:7.3f} s, p90 {p90:7.3f}, longest {longest:7.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default=SERVER, help="the command of a server")
    parser.add_argument("--seconds", type=float, default=120.0, help="of load, once it is ready")
    parser.add_argument("--output", type=int, default=16, help="tokens of a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", help="of TorchInductor")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = given.cache or str(Path(folder, "inductor"))
        os.environ["CG_CACHE"] = ""
        with serving(given.server.split(), "", log) as server:
            rows = asyncio.run(load(server.url, given.seconds, given.output, given.seed))
            variants = log.read_text().count(COMPILED)
            print(f"ready after {server.ready:.1f} s; then {variants} variants were compiled")
    failed = [row.error for row in rows if row.error]
    firsts = [row.first - row.began for row in rows if row.first is not None]
    print(f"{len(rows)} requests, {len(failed)} failed{': ' if failed else ''}{failed[:1] or ''}")
    print(line("time to first token", firsts))
    print(line("longest gap of a request", [max(row.gaps, default=0.0) for row in rows]))


if __name__ == "__main__":
    main()
