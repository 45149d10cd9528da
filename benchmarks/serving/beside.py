"""Loads on servers that run side by side, in turns: tokens a second, and the times of requests.

    python -m benchmarks.one_gpu.folder DIR
    python benchmarks/serving/beside.py --json beside.json --loads nano nano inf 16 4 1 \\
        --server "cg=python -m examples.serve --model DIR --port 8101 --memory 0.45" \\
        --server "vLLM=python -m vllm.entrypoints.openai.api_server --model DIR --port 8102 \\
            --gpu-memory-utilization 0.4 --dtype float16"

A server is named, and started by the words behind its name, which say `--port`. All of them start
at one time. Each load is sent to the first one, then to the second, and so on. `nano` is
nano-vllm's: 256 requests at once, and `whole` the same without streams. A number is a rate of
requests a second, for as long as `--seconds` says; `inf` sends 256 of these at once. Prompts of
rates have 233 tokens on average, and answers 218. `--until cg=REGEX` waits first until a line of a
server's log matches, or for `--patience` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from load import Arrival, make_trace, run, summarize
from nano import REAL
from processes import PATIENCE, ROOT, Running, served

sys.path.insert(0, str(ROOT / "benchmarks"))

from provenance import provenance

WHOLE = "whole"
"""The load whose answers come at once."""
AT_ONCE = 256
"""Requests of the load `inf`."""


def trace_of(load: str, seed: int, seconds: float, vocabulary: int) -> list[Arrival]:
    """The requests of a load; prompts of another seed are others.

    Raises:
        ValueError: it is neither `nano` nor `whole` nor a rate.
    """
    if load in ("nano", WHOLE):
        ids = [tuple((i + seed) % vocabulary for i in prompt) for prompt, _ in REAL.draw()]
        outputs = [output for _, output in REAL.draw()]
        return [Arrival(0.0, *pair) for pair in zip(ids, outputs, strict=True)]
    rate = float(load)
    count = AT_ONCE if math.isinf(rate) else max(1, round(rate * seconds))
    return make_trace(count, seed, rate, vocabulary=vocabulary)


def await_answers(server: Running, vocabulary: int) -> float:
    """Ask for a little until a server answers; the seconds since its start.

    Raises:
        RuntimeError: it does not for `PATIENCE`.
    """
    trace = make_trace(4, 0, lengths="fixed", means=(12, 12), vocabulary=vocabulary)
    began = time.monotonic()
    while errors := [row.error for row in run(server.url, trace) if row.error]:
        if time.monotonic() > began + PATIENCE:
            raise RuntimeError(f"the server at {server.url} does not answer: {errors[0]}")
        time.sleep(0.5)
    return server.ready + time.monotonic() - began


def await_line(log: Path, pattern: str, seconds: float) -> bool:
    """True if a line of a log matches before so many seconds have passed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if re.search(pattern, log.read_text(errors="replace"), re.MULTILINE):
            return True
        time.sleep(0.5)
    return False


def line(row: Mapping[str, Any]) -> str:
    ms = row["ms"]
    times = ", ".join(
        f"{name} {ms[name]['p50']:.1f} and {ms[name]['p99']:.1f} ms"
        for name in ("ttft", "itl")
        if name in ms
    )
    rate = f"{row['output_tokens_per_second']:8.0f} tokens/s"
    failed = f", {row['failed']} failed" if row["failed"] else ""
    return f"{row['at']:6.1f} s  {row['load']:5} {row['server']:8} {rate}, {times}{failed}"


def measured(args: argparse.Namespace, logs: Path, record: dict[str, Any]) -> None:
    """Send the loads; each row is in the record, and in its file, as soon as it is there."""
    servers = dict(text.split("=", 1) for text in args.server)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:

        def start(name: str) -> Running:
            return stack.enter_context(served(servers[name], logs / f"{name}.log"))

        with ThreadPoolExecutor(len(servers)) as pool:
            running = dict(zip(servers, pool.map(start, servers), strict=True))
            asked = partial(await_answers, vocabulary=args.vocabulary)
            record["ready_s"] = dict(zip(running, pool.map(asked, running.values()), strict=True))
        print(f"ready after (s): {record['ready_s']}", flush=True)
        for text in args.until:
            name, pattern = text.split("=", 1)
            came = await_line(logs / f"{name}.log", pattern, args.patience)
            record.setdefault("until", []).append({"line": text, "came": came})
            print(f"{text}: {'came' if came else 'did not come'}", flush=True)
        for turn, load in enumerate(args.loads):
            trace = trace_of(load, turn, args.seconds, args.vocabulary)
            for name, server in running.items():
                at = time.monotonic() - began
                streams = load != WHOLE
                rows = run(server.url, trace, streams=streams, processes=args.processes)
                summary = {"at": at, "server": name, "load": load, **summarize(rows, trace)}
                record["rows"].append(summary)
                print(line(summary), flush=True)
                write(args.json, record)


def write(path: Path | None, record: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each load and server, the median of tokens a second by that of the last server."""
    rates: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        own = rates.setdefault(row["load"], {})
        own.setdefault(row["server"], []).append(row["output_tokens_per_second"])
    medians = {
        load: {name: statistics.median(samples) for name, samples in own.items()}
        for load, own in rates.items()
    }
    return {
        load: {name: rate / (list(own.values())[-1] or math.nan) for name, rate in own.items()}
        for load, own in medians.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--server", action="append", required=True, metavar="NAME=COMMAND")
    add("--loads", nargs="+", default=["nano", "inf", "16", "4", "1"])
    add("--seconds", type=float, default=30.0, help="for which requests of a rate arrive")
    add("--until", action="append", default=[], metavar="NAME=REGEX")
    add("--patience", type=float, default=400.0, help="seconds for such a line")
    add("--vocabulary", type=int, default=10_000, help="ids of prompts are below it")
    add("--processes", type=int, default=8, help="that send")
    add("--logs", type=Path, help="a folder for the logs of servers")
    add("--json", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {**provenance(), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        measured(args, logs, record)
    record["ratios"] = ratios(record["rows"])
    for load, own in record["ratios"].items():
        print(f"{load}: {', '.join(f'{name} {ratio:.2f}' for name, ratio in own.items())}")
    write(args.json, record)


if __name__ == "__main__":
    main()
