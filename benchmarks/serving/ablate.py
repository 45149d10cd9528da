"""Measure each switch of the server: a server with it in turns with one without.

    python benchmarks/serving/ablate.py --out runs/ablation --minutes 12 --record
    python benchmarks/serving/ablate.py --arms -prefix +shm_ring --mode offline --out …
    python benchmarks/serving/ablate.py --scales 0.4 0.8 1.6 inf --rounds 5 --out …
    python benchmarks/serving/ablate.py --profile-only --out …

Switches of the front are measured on a server whose engine costs nothing, which shows them larger
than they are beside a model; all others on a tiny Qwen2 on two ranks.

Each arm has two fresh servers, and waits for its turn in random order. Both are warmed, and take a
trace in turns: base, arm, base, arm, …, base; who has no turn is idle. A figure is the median of
the ratios of the arm's runs to the two runs of the base around each, with a bootstrap interval; an
interval that spans 1 is called no effect. An arm is refused if its base drifts by more than 3 %, if
runs drew different numbers of tokens, if a request failed, or if the counter of the switch did not
move.

With --minutes every arm has its part of the time, most of which its servers take to start, and as
many rounds as fit into the rest, at least three.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import platform
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from load import Arrival, make_trace, run, summarize  # noqa: E402 - a script's own folder
from plots import draw  # noqa: E402
from processes import ROOT, Running, get, serving  # noqa: E402
from provenance import provenance  # noqa: E402
from ratios import Comparison, Run, arms_in_order, judge, table, without_problems  # noqa: E402

from examples.serve import features as switches  # noqa: E402 - the path is that of processes.py

VOCABULARY = 250
"""Of prompts: the engine that costs nothing takes higher first ids for requests for trouble."""
FEWEST = 3
"""Rounds of an arm, whatever time they take."""


@dataclass(frozen=True)
class Plan:
    """Switches, and the server and the trace that show what they are worth.

    Attributes:
        server: its command, without `--features`.
        arms: switches, each away from its default.
        share: of the time.
        requests, means, longest, prefix: of the trace, in tokens.
    """

    name: str
    server: str
    arms: tuple[str, ...]
    share: float
    requests: int
    means: tuple[float, float]
    longest: int
    prefix: int = 0


FRONT = Plan(
    "front",
    f"{sys.executable} {ROOT}/tests/examples/serve/fake_server.py "
    '{"delay":0.001,"limits":{"slots":32,"groups":2,"blocks":4097}}',
    (
        *("-flat_evts", "-batch_send", "-fast_cnt", "-async_stream", "-fast_sse"),
        *("+queue_ipc", "+shm_ring", "+uvloop", "+stream_interval", "+stream_tok"),
    ),
    share=0.2,
    requests=64,
    means=(16.0, 100.0),
    longest=256,
)
ENGINE = Plan(
    "engine",
    f"{sys.executable} -m examples.serve -n 2 --model tiny-qwen2 --blocks 256 --context 128 "
    "--batch 2 --chunk 32 --requests 4096 --port 0",  # few variants, to start soon
    (
        *("-thr_cap", "-affinity", "-cmd_budget", "-fill_tgt", "-async_sched", "-groups"),
        *("-carry", "-variants", "-prefix", "-chunk", "-warm", "-gc_freeze", "-overlap"),
        *("-capture", "+clamp", "+inproc", "+kv256", "+debug_bounds"),
    ),
    share=0.8,
    requests=48,
    means=(16.0, 24.0),
    longest=96,
    prefix=32,
)


def counters(url: str) -> dict[str, float]:
    """How often each switch has changed something, as the server counts it."""
    found = {}
    for line in (get(f"{url}/metrics") or "").splitlines():
        if line.startswith("cg:feature_changes_total{"):
            name, _, value = line.partition("} ")
            found[name.partition('"')[2].rstrip('"')] = float(value)
    return found


def traces(given: argparse.Namespace, plan: Plan) -> dict[str, list[Arrival]]:
    """The traces: one that is sent at once, or one for each scale."""
    more: dict[str, Any] = {"means": plan.means, "longest": plan.longest, "prefix": plan.prefix}
    more["vocabulary"] = VOCABULARY
    number = given.requests or plan.requests
    if given.mode == "offline":
        return {"offline": make_trace(number, given.seed, lengths="fixed", **more)}
    return {
        "online inf" if math.isinf(scale) else f"online x{scale:g}": make_trace(
            number,
            given.seed,
            *((math.inf,) if math.isinf(scale) else (given.rate, scale)),
            **more,
        )
        for scale in given.scales
    }


def measure(server: Running, planned: dict[str, list[Arrival]], streams: bool) -> Run:
    """One run: the traces, each with its summary and rows, and the CPU time of all processes."""
    found = {}
    for name, trace in planned.items():
        before = server.cpu_of_all()
        rows = run(server.url, trace, streams=streams)
        spent = server.cpu_of_all() - before
        summary = summarize(rows, trace)
        found[name] = {
            "summary": summary,
            "cpu_ms_per_token": spent / max(1, summary["output_tokens"]) * 1e3,
            "rows": [asdict(row) for row in rows],
        }
    return found


def compare(given: argparse.Namespace, plan: Plan, arm: str, seconds: float) -> Comparison:
    """Let two fresh servers take the traces in turns, for about so many seconds with all."""
    end = time.monotonic() + seconds
    command = (given.server or plan.server).split()
    planned = traces(given, plan)
    warm = {name: trace[: max(8, len(trace) // 2)] for name, trace in planned.items()}
    found = Comparison(arm)
    with ExitStack() as stack:
        servers, ready = [], []
        for features in ("", arm):
            began = time.monotonic()
            log = given.out / f"server-{arm}{'' if features else '-base'}.log"
            servers.append(stack.enter_context(serving(command, features, log)))
            ready.append(time.monotonic() - began)
        base, other = servers
        found.ready = (ready[0], ready[1])
        streams = given.mode == "online"
        for server in servers:
            measure(server, warm, streams)
        found.bases.append(measure(base, planned, streams))
        round_ = 0.0
        while len(found.arms) < given.rounds:
            began = time.monotonic()
            if len(found.arms) >= FEWEST and began + round_ > end:
                break
            found.arms.append(measure(other, planned, streams))
            found.bases.append(measure(base, planned, streams))
            round_ = time.monotonic() - began
        time.sleep(1.2)  # the engine's counts come once a second
        found.counters = counters(other.url)
    return found


def profile(given: argparse.Namespace) -> None:
    """16 requests of 32 tokens, with every rank and the front recorded; no times of it are used."""
    folder = given.out / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    trace = make_trace(16, given.seed, lengths="fixed", means=(32, 32))
    for number, arm in enumerate(["", *(arm for arm in ENGINE.arms if arm in given.arms)]):
        own = folder / f"arm-{number:02d}"
        own.mkdir(exist_ok=True)
        python, *rest = (given.server or ENGINE.server).split()
        command = [python, "-m", "cProfile", "-o", str(own / "front.pstats"), *rest]
        with serving([*command, "--profile", str(own)], arm, own / "server.log") as server:
            run(server.url, trace)
        for file in sorted(own.iterdir()):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            rank = "front" if file.suffix == ".pstats" else "all ranks"
            entries.append(
                {"arm": arm or "base", "rank": rank, "file": str(file), "sha256": digest}
            )
    (given.out / "profile_manifest.json").write_text(json.dumps(entries, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a folder for logs, figures and plots")
    add("--arms", nargs="*", help="switches; all by default. Write --arms=-name for a single one")
    add("--mode", choices=("offline", "online"), default="online")
    add("--rounds", type=int, default=5, help="of each arm, at most")
    add("--minutes", type=float, default=math.inf, help="for all arms together, about")
    add("--requests", type=int, default=0, help="of a trace; by default those of the plan")
    add("--scales", type=float, nargs="+", default=[math.inf], help="of gaps; inf: all at once")
    add("--rate", type=float, default=16.0, help="requests a second at scale 1")
    add("--seed", type=int, default=0)
    add("--server", default=None, help="another command of the server, without --features")
    add("--record", action="store_true", help="write the ratios to benchmarks/results/")
    add("--profile-only", action="store_true")
    raw = sys.argv[1:]
    arms: list[str] | None = None
    if "--arms" in raw:  # argparse would take -name for an option
        start = raw.index("--arms") + 1
        stop = next((i for i in range(start, len(raw)) if raw[i].startswith("--")), len(raw))
        arms, raw = raw[start:stop], raw[: start - 1] + raw[stop:]
    given = parser.parse_args(raw)
    given.arms = [*FRONT.arms, *ENGINE.arms] if arms is None else arms
    if arms is None and importlib.util.find_spec("uvloop") is None:
        print("+uvloop is left out: pip install uvloop")
        given.arms.remove("+uvloop")
    for arm in given.arms:
        switches.parse(arm)
    return given


def main() -> int:
    given = parse()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.profile_only:
        profile(given)
        return 0
    began = time.monotonic()
    compared: dict[str, list[Comparison]] = {}
    for plan in (FRONT, ENGINE):
        arms = arms_in_order([arm for arm in plan.arms if arm in given.arms], given.seed)
        end = time.monotonic() + given.minutes * 60 * plan.share
        compared[plan.name] = []
        for number, arm in enumerate(arms):
            print(f"{plan.name}: {arm}", flush=True)
            seconds = (end - time.monotonic()) / (len(arms) - number)
            compared[plan.name].append(compare(given, plan, arm, seconds))
    origin = provenance()
    wall = time.monotonic() - began
    manifest = {
        **origin,
        "argv": sys.argv,
        "features": [
            {name: getattr(switches.parse(arm), name) for name in switches.DEFAULTS}
            for arm in ["", *given.arms]
        ],
        "python": platform.python_version(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "seed": given.seed,
        "wall_s": wall,
        "comparisons": {name: [asdict(each) for each in found] for name, found in compared.items()},
    }
    (given.out / "manifest.json").write_text(json.dumps(manifest) + "\n")
    judged = {
        name: {each.arm: {**judge(each), "rounds": len(each.arms)} for each in found}
        for name, found in compared.items()
    }
    (given.out / "ratios.json").write_text(json.dumps(judged, indent=1) + "\n")
    for name, found in judged.items():
        print(f"== {name}\n{table(found)}")
        draw(without_problems(found), given.out / name)
    if given.record:
        text = json.dumps(
            {**origin, "figures": {**judged, "wall_s": wall}}, indent=1, sort_keys=True
        )
        (ROOT / "benchmarks" / "results" / "serving_ablation.json").write_text(text + "\n")
    return int(any(each["problems"] for found in judged.values() for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
