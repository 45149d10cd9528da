"""Run the benchmarks that need no GPU, and record the figures with the machine and the versions.

    python benchmarks/run.py [names…] [--record]

Each benchmark is a program of its own in this folder and says how to run it alone. With --record
the figures go to benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import provenance

HERE = Path(__file__).resolve().parent

# What to run for each name; FILE stands for the file that the figures go to.
BENCHMARKS = {
    "executor_overhead": ["executor_overhead.py", "--json", "FILE"],
    "round_trip": ["-m", "cg.launch", "-n", "2", "round_trip.py", "--json", "FILE"],
    "all_reduce": ["-m", "cg.launch", "-n", "2", "all_reduce.py", "--json", "FILE"],
    "groups_cpu": ["-m", "cg.launch", "-n", "2", "groups_cpu.py", "--json", "FILE"],
    "cpu_transport": ["-m", "cg.launch", "-n", "2", "cpu_transport.py", "--json", "FILE"],
    "idle": ["-m", "cg.launch", "-n", "4", "idle.py", "--json", "FILE"],
    "compile_time": ["compile_time.py", "--json", "FILE"],
    "compile_schedules": [
        *["compile_time.py", "--schedule", "all", "--sizes", "8x64", "64x256"],
        *["--json", "FILE"],
    ],
    "compile_groups": ["compile_groups.py", "--json", "FILE"],
    "recurrent": ["recurrent.py", "--repeats", "1", "--json", "FILE"],
    "schedules": ["-m", "cg.launch", "-n", "4", "schedules.py", "--json", "FILE"],
    "simulator": ["simulator.py", "--json", "FILE"],
    "slow_link": ["-m", "cg.launch", "-n", "2", "serving/slow_link.py", "--json", "FILE"],
}
TIMEOUT = 1800.0


def run(name: str) -> dict[str, Any]:
    """Run one benchmark; it prints its table, and what it has written comes back."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = [
            str(HERE / word) if word.endswith(".py") else word.replace("FILE", str(file))
            for word in BENCHMARKS[name]
        ]
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, *words], check=True, timeout=TIMEOUT)
        figures = json.loads(file.read_text())
    shown = [word.replace("FILE", f"{name}.json") for word in BENCHMARKS[name]]
    return {
        **provenance(),
        "command": " ".join(["python", *shown]),
        "figures": figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="all by default")
    parser.add_argument("--record", action="store_true", help="write to benchmarks/results/")
    args = parser.parse_args()
    for name in args.names or BENCHMARKS:
        result = run(name)
        if args.record:
            (HERE / "results").mkdir(exist_ok=True)
            text = json.dumps(result, indent=1, sort_keys=True) + "\n"
            (HERE / "results" / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
