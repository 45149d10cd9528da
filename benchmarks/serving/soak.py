"""Load a server for long, with clients of all kinds, and see that nothing grows.

    python benchmarks/serving/soak.py --minutes 10
    python benchmarks/serving/soak.py --minutes 60 --server "python -m examples.serve -n 2 --port 0"

Rounds of a seeded trace, at rates that change; a tenth of the clients leave in the middle, and a
hundredth sends garbage. Each round ends with the same greedy requests, whose text must be that of
the first round. At the end the resident memory of the front may not have grown by more than
--growth MiB an hour since the first quarter, nor files at all, and the p99 of the last quarter is
compared with that of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from ablate import SERVER, _get, serving
from costs import listener
from load import make_trace, run, summarize

GARBAGE = (
    b"\x16\x03\x01" * 20,
    b"POST /v1/completions HTTP/1.1\r\n",
    b"{",
    b"GET / HTTP/9\r\n\r\n",
)
RATES = (5.0, 20.0, 60.0, 10.0)
PROBES = ("The", "A pipeline", "0123456789")


def resident(pid: int) -> float:
    """MiB of a process."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(row for row in rows if row.startswith("VmRSS")).split()[1]) / 1024


def files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def spoil(url: str, rng: random.Random) -> None:
    """Send garbage, and go."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), 10) as sock:
        sock.sendall(rng.choice(GARBAGE))


def probe(url: str) -> list[str]:
    """The text of the same greedy requests."""
    found = []
    for prompt in PROBES:
        body = json.dumps({"prompt": prompt, "max_tokens": 24, "temperature": 0}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            found.append(json.load(answer)["choices"][0]["text"])
    return found


def is_empty(url: str) -> bool:
    """True if no block is held."""
    rows = (_get(f"{url}/metrics") or "").splitlines()
    return any(row == "cg:kv_cache_usage_perc 0.0" for row in rows)


def soak(given: argparse.Namespace, url: str) -> dict[str, Any]:
    """All rounds; what was seen."""
    rng = random.Random(given.seed)
    front = listener(url)
    wanted = probe(url)
    rounds: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * given.minutes
    while time.monotonic() < end or len(rounds) < 4:
        rate = RATES[len(rounds) % len(RATES)]
        trace = make_trace(
            int(rate * 10),
            given.seed + len(rounds),
            rate,
            means=(24, 24),
            longest=given.longest,
            vocabulary=250,
        )
        rows = run(url, trace, cancels=0.1, seed=len(rounds))
        for _ in range(max(1, len(trace) // 100)):
            spoil(url, rng)
        summary = summarize(rows, trace)
        assert not summary["failed"], [row.error for row in rows if row.error][:3]
        assert probe(url) == wanted, "the text of the same requests has changed"
        waited = time.monotonic()
        while not is_empty(url):
            assert time.monotonic() < waited + 60, "blocks are held, and nobody is there"
            time.sleep(0.5)
        rounds.append(
            {
                "at": time.monotonic(),
                "rate": rate,
                "memory": resident(front),
                "files": files(front),
                "itl_p99": summary["ms"].get("itl", {"p99": 0.0})["p99"],
                "tokens": summary["output_tokens"],
            }
        )
        print(json.dumps({"round": len(rounds), **rounds[-1]}), flush=True)
    return verdict(rounds, given.growth)


def verdict(rounds: list[dict[str, Any]], growth: float) -> dict[str, Any]:
    """Slopes behind the first quarter, where caches fill."""
    later = rounds[len(rounds) // 4 :]
    hours = [(each["at"] - rounds[0]["at"]) / 3600 for each in later]
    slope = float(np.polyfit(hours, [each["memory"] for each in later], 1)[0])
    quarter = max(1, len(rounds) // 4)
    first = float(np.median([each["itl_p99"] for each in rounds[:quarter]]))
    last = float(np.median([each["itl_p99"] for each in rounds[-quarter:]]))
    most = max(each["files"] for each in rounds[:quarter])
    grown = later[-1]["memory"] - later[0]["memory"]
    return {
        "rounds": len(rounds),
        "tokens": sum(each["tokens"] for each in rounds),
        "memory_mib_per_hour": slope,
        "memory_grown_mib": grown,
        "files": [rounds[0]["files"], rounds[-1]["files"]],
        "itl_p99_ms": [first, last],
        "is_flat": (slope <= growth or grown < 4.0) and rounds[-1]["files"] <= most,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=10.0)
    add("--growth", type=float, default=16.0, help="MiB an hour that the front may grow by")
    add("--longest", type=int, default=128)
    add("--seed", type=int, default=0)
    add("--server", default=SERVER)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(given.server.split(), "", Path(folder) / "log") as url,
    ):
        found = soak(given, url)
    print(json.dumps(found, indent=1))
    return 0 if found["is_flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
