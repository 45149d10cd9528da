"""CPU of the server's processes: of the front for each chunk of a stream, and of all while idle.

    python benchmarks/serving/costs.py               # an engine that costs nothing
    python benchmarks/serving/costs.py --server "python -m examples.serve -n 2 --port 0"

CPU time and not wall time, so that a busy machine changes little. A chunk is one event of a stream;
events of one turn that share a write count each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from ablate import ROOT, serving
from load import Arrival, run
from serve.front.job import family

FAKE = f"{sys.executable} {ROOT}/tests/examples/serve/fake_server.py"
TICK = 1 / os.sysconf("SC_CLK_TCK")


def cpu(pid: int) -> float:
    """Seconds of a process, in user mode and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK


def listener(url: str) -> int:
    """The process of the front: the child of this one that serves at the address."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    (found,) = (int(pid) for pid in children)
    return found


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The costs of one server."""
    trace = [Arrival(0.0, (i, i + 1, i + 2), given.tokens) for i in range(given.streams)]
    with serving(given.server.split(), given.features, folder / "log") as url:
        front = listener(url)
        run(url, trace[:4])
        before = cpu(front)
        rows = run(url, trace)
        spent = cpu(front) - before
        chunks = sum(len(row.gaps) + 1 for row in rows)
        everyone = [pid for pid, _ in family(front)]
        time.sleep(2.0)
        idle = sum(map(cpu, everyone))
        time.sleep(given.idle)
        idle = sum(map(cpu, everyone)) - idle
    return {
        "front_us_per_chunk": spent / chunks * 1e6,
        "chunks": chunks,
        "tokens": sum(row.output for row in rows),
        "idle_share_of_a_core": idle / given.idle,
    }


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
