"""CPU of the server's processes: of the front for each chunk of a stream, and of all while idle.

Also the time to the first token, warm and after idling.

    python benchmarks/serving/costs.py               # an engine that costs nothing
    python benchmarks/serving/costs.py --server "python -m examples.serve -n 2 --port 0"

CPU time and not wall time, so that a busy machine changes little. A chunk is one event of a stream;
events of one turn that share a write count each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from load import Arrival, run
from processes import ROOT, serving

FAKE = f"{sys.executable} {ROOT}/tests/examples/serve/fake_server.py"


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The costs of one server."""
    trace = [Arrival(0.0, (i, i + 1, i + 2), given.tokens) for i in range(given.streams)]
    with serving(given.server.split(), given.features, folder / "log") as server:
        run(server.url, trace[:4])
        before = server.cpu()
        rows = run(server.url, trace)
        spent = server.cpu() - before
        chunks = sum(len(row.gaps) + 1 for row in rows)
        warm = [first_token(server.url, trace) for _ in range(5)]
        time.sleep(2.0)
        idle = server.cpu_of_all()
        time.sleep(given.idle)
        idle = server.cpu_of_all() - idle
        after = first_token(server.url, trace)
    return {
        "ttft_ms": {"warm": statistics.median(warm), "after_idling": after},
        "front_us_per_chunk": spent / chunks * 1e6,
        "chunks": chunks,
        "tokens": sum(row.output for row in rows),
        "idle_share_of_a_core": idle / given.idle,
    }


def first_token(url: str, trace: Sequence[Arrival]) -> float:
    """Milliseconds to the first token of one request."""
    (row,) = run(url, trace[:1])
    assert row.first is not None, row.error
    return (row.first - row.began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--streams", type=int, default=32)
    add("--tokens", type=int, default=400)
    add("--idle", type=float, default=20.0, help="seconds")
    add("--features", default="")
    add("--turns", type=int, default=3)
    add("--server", default=None, help="by default one whose engine costs nothing")
    given = parser.parse_args()
    if given.server is None:
        limits = {"slots": given.streams, "groups": 1, "blocks": 4097}
        options = json.dumps({"delay": 0.002, "limits": limits}).replace(" ", "")
        given.server = f"{FAKE} {options}"
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.turns):
            print(json.dumps(measure(given, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
