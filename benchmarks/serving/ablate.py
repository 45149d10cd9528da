"""Measure each switch of the server: base, and base with one switch, in random order.

    python benchmarks/serving/ablate.py --out runs/ablation --blocks 5
    python benchmarks/serving/ablate.py --arms -prefix +shm_ring --mode offline --out …
    python benchmarks/serving/ablate.py --profile-only --out …

Each run has a server of its own. In each block all arms run once, in random order, with the base at
both ends and in the middle. A figure is the median over blocks of the ratio to the base runs of the
same block, with a bootstrap interval; an interval that spans 1 is called no effect. There is no
table if the base drifts by more than 3 %, if arms drew different numbers of tokens, if a request
failed, or if the counter of a switch did not move.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks"), str(Path(__file__).parent)]

from load import Arrival, make_trace, run, summarize  # noqa: E402 - a script's own folder
from plots import draw  # noqa: E402
from provenance import provenance  # noqa: E402
from serve import features as switches  # noqa: E402

DRIFT = 0.03
"""How far base runs may differ from one another, as a share."""
SERVER = (
    f"{sys.executable} -m examples.serve -n 2 --model tiny-qwen2 --blocks 1024 --context 512 "
    "--requests 4096 --port 0"
)
SCALES = (0.4, 0.8, 1.6)
READY = 600.0
"""Seconds for a server to be ready."""


@contextlib.contextmanager
def serving(command: Sequence[str], features: str, log: Path) -> Iterator[str]:
    """A server with these switches; gives its address, and ends it."""
    line = [*command, *([f"--features={features}"] if features else [])]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    with log.open("w") as file:
        process = subprocess.Popen(line, cwd=ROOT, stdout=file, stderr=file, env=environment)
    try:
        end = time.monotonic() + READY
        url = ""
        while not (url and _get(f"{url}/ready") is not None):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server is not ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
            found = log.read_text().partition(" at http://")[2]
            url = f"http://{found.split('/')[0]}" if "/" in found else ""
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return None


def counters(url: str) -> dict[str, float]:
    """How often each switch has changed something, as the server counts it."""
    found = {}
    for line in (_get(f"{url}/metrics") or "").splitlines():
        if line.startswith("cg:feature_changes_total{"):
            name, _, value = line.partition("} ")
            found[name.partition('"')[2].rstrip('"')] = float(value)
    return found


def plans(given: argparse.Namespace) -> dict[str, list[Arrival]]:
    """The traces: one that is sent at once, or one for each scale."""
    lengths: dict[str, Any] = {"means": tuple(given.means), "longest": given.longest}
    lengths["vocabulary"] = given.vocabulary
    if given.mode == "offline":
        return {"offline": make_trace(given.requests, given.seed, lengths="fixed", **lengths)}
    found = {
        f"online x{scale:g}": make_trace(given.requests, given.seed, given.rate, scale, **lengths)
        for scale in SCALES
    }
    return {**found, "online inf": make_trace(given.requests, given.seed, **lengths)}


def measure(given: argparse.Namespace, arm: str, number: int, out: Path) -> dict[str, Any]:
    """One run of an arm: a fresh server, a warm-up of all shapes, and the traces."""
    result: dict[str, Any] = {"arm": arm, "load_before": os.getloadavg(), "traces": {}}
    with serving(given.server.split(), arm, out / f"server-{number:03d}.log") as url:
        traces = plans(given)
        warm = next(iter(traces.values()))[: max(16, given.requests // 4)]
        run(url, [Arrival(0.0, each.prompt, each.output) for each in warm])
        for name, trace in traces.items():
            rows = run(url, trace, streams=given.mode == "online")
            result["traces"][name] = {
                "summary": summarize(rows, trace),
                "rows": [asdict(row) for row in rows],
            }
        time.sleep(1.2)  # the engine's counts come once a second
        result["counters"] = counters(url)
    result["load_after"] = os.getloadavg()
    return result


def order(arms: Sequence[str], blocks: int, seed: int) -> list[tuple[int, str]]:
    """Blocks of all arms in random order; the base begins, ends, and stands in the middle."""
    rng = random.Random(seed)
    found = []
    for block in range(blocks):
        mixed = list(arms)
        rng.shuffle(mixed)
        half = len(mixed) // 2
        found += [(block, arm) for arm in ["", *mixed[:half], "", *mixed[half:], ""]]
    return found


def figures(run_: dict[str, Any]) -> dict[str, float]:
    """The figures of a run that are compared."""
    found = {}
    for trace, each in run_["traces"].items():
        summary = each["summary"]
        found[f"{trace}: output_tokens_per_second"] = summary["output_tokens_per_second"]
        for name in ("ttft", "itl", "e2e"):
            for percentile in ("p50", "p99"):
                if name in summary["ms"]:
                    found[f"{trace}: {name} {percentile}"] = summary["ms"][name][percentile]
    return found


def ratios(runs: Sequence[dict[str, Any]], seed: int = 0) -> dict[str, dict[str, Any]]:
    """For each arm and figure the median of the paired ratios to the base, with an interval.

    The interval is the percentile bootstrap's of the median, 95 %, of 10,000 samples.
    """
    rng = np.random.default_rng(seed)
    table: dict[str, dict[str, Any]] = {}
    for arm in sorted({each["arm"] for each in runs} - {""}):
        table[arm] = {}
        shared = set.intersection(*(set(figures(each)) for each in runs))
        for name in sorted(shared):
            pairs = []
            for block in sorted({each["block"] for each in runs}):
                here = [each for each in runs if each["block"] == block]
                base = np.median([figures(each)[name] for each in here if each["arm"] == ""])
                pairs += [figures(each)[name] / base for each in here if each["arm"] == arm]
            samples = np.median(rng.choice(pairs, (10_000, len(pairs))), axis=1)
            low, high = np.percentile(samples, (2.5, 97.5))
            table[arm][name] = {
                "ratio": float(np.median(pairs)),
                "low": float(low),
                "high": float(high),
                "effect": bool(low > 1 or high < 1) and len(pairs) > 1,
                "pairs": pairs,
            }
    return table


def problems(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Why there is no table; empty if there is one."""
    found = []
    base = [each for each in runs if each["arm"] == ""]
    for name in figures(runs[0]):
        if name.endswith("output_tokens_per_second"):
            values = [figures(each)[name] for each in base]
            drift = max(values) / min(values) - 1
            if drift > DRIFT:
                found.append(f"base drifts by {drift:.1%} in {name}: the machine is not quiet")
    for trace in runs[0]["traces"]:
        totals = {each["traces"][trace]["summary"]["output_tokens"] for each in runs}
        if len(totals) > 1:
            found.append(f"runs drew different numbers of tokens in {trace}: {sorted(totals)}")
    for each in runs:
        failed = sum(part["summary"]["failed"] for part in each["traces"].values())
        if failed:
            found.append(f"{failed} requests failed with {each['arm'] or 'base'}")
        for token in switches.tokens(switches.parse(each["arm"])):
            if not each["counters"].get(token[1:]):
                found.append(f"{token} switched nothing: its counter stands at 0")
    return list(dict.fromkeys(found))


def table(ratios_: dict[str, dict[str, Any]]) -> str:
    """As text: the labels have spaces for underscores."""
    lines = []
    for arm, row in ratios_.items():
        lines.append(arm.replace("_", " "))
        for name, each in row.items():
            verdict = f"{each['ratio'] - 1:+.1%}" if each["effect"] else "no effect"
            interval = f"{each['ratio']:.3f} [{each['low']:.3f}, {each['high']:.3f}]"
            lines.append(f"  {name:<44} {interval}  {verdict}")
    return "\n".join(lines)


def profile(given: argparse.Namespace, out: Path) -> None:
    """16 requests of 32 tokens, with every rank and the front recorded; no times of it are used."""
    folder = out / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    trace = make_trace(16, given.seed, lengths="fixed", means=(32, 32), vocabulary=given.vocabulary)
    for number, arm in enumerate(["", *given.arms]):
        own = folder / f"arm-{number:02d}"
        own.mkdir(exist_ok=True)
        python, *rest = given.server.split()
        command = [python, "-m", "cProfile", "-o", str(own / "front.pstats"), *rest]
        with serving([*command, "--profile", str(own)], arm, own / "server.log") as url:
            run(url, trace)
        for file in sorted(own.iterdir()):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            rank = "front" if file.suffix == ".pstats" else "all ranks"
            entries.append(
                {"arm": arm or "base", "rank": rank, "file": str(file), "sha256": digest}
            )
    (out / "profile_manifest.json").write_text(json.dumps(entries, indent=1) + "\n")


def all_arms() -> list[str]:
    """Every switch, away from its default."""
    base = switches.Features()
    return [f"{'-' if on else '+'}{name}" for name, on in asdict(base).items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a folder for logs, figures and plots")
    add("--arms", nargs="*", help="switches; all by default. Write --arms=-name for a single one")
    add("--mode", choices=("offline", "online"), default="online")
    add("--blocks", type=int, default=5)
    add("--requests", type=int, default=128)
    add("--rate", type=float, default=16.0)
    add("--means", type=float, nargs=2, default=(32.0, 32.0), help="tokens in and out")
    add("--longest", type=int, default=256)
    add("--vocabulary", type=int, default=256)
    add("--seed", type=int, default=0)
    add("--server", default=SERVER, help="the command of the server, without --features")
    add("--profile-only", action="store_true")
    raw = sys.argv[1:]
    arms: list[str] | None = None
    if "--arms" in raw:  # argparse would take -name for an option
        start = raw.index("--arms") + 1
        stop = next((i for i in range(start, len(raw)) if raw[i].startswith("--")), len(raw))
        arms, raw = raw[start:stop], raw[: start - 1] + raw[stop:]
    given = parser.parse_args(raw)
    given.arms = all_arms() if arms is None else arms
    for arm in given.arms:
        switches.parse(arm)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.profile_only:
        profile(given, given.out)
        return 0
    runs, began = [], time.monotonic()
    for number, (block, arm) in enumerate(order(given.arms, given.blocks, given.seed)):
        print(f"block {block}: {arm or 'base'}", flush=True)
        runs.append({"block": block, **measure(given, arm, number, given.out)})
    manifest = {
        **provenance(),
        "argv": sys.argv,
        "features": [asdict(switches.parse(arm)) for arm in ["", *given.arms]],
        "python": platform.python_version(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "seed": given.seed,
        "wall_s": time.monotonic() - began,
        "runs": runs,
    }
    (given.out / "manifest.json").write_text(json.dumps(manifest) + "\n")
    wrong = problems(runs)
    found = ratios(runs)
    result = {"ratios": found, "problems": wrong}
    (given.out / "ratios.json").write_text(json.dumps(result, indent=1) + "\n")
    if wrong:
        print("no table:\n  " + "\n  ".join(wrong))
        return 1
    print(table(found))
    draw(found, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
