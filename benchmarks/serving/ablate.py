"""Measure each switch of the server: a server with it in turns with one without.

    python benchmarks/serving/ablate.py --out runs/ablation --minutes 12 --record
    python benchmarks/serving/ablate.py --arms -prefix +shm_ring --mode offline --out …
    python benchmarks/serving/ablate.py --scales 0.4 0.8 1.6 inf --rounds 5 --out …
    python benchmarks/serving/ablate.py --load nano --processes 4 --together 4 --out …
    python benchmarks/serving/ablate.py --profile-only --out …

Switches of the front are measured on a server whose engine costs nothing, which shows them larger
than they are beside a model; all others on a tiny Qwen2 on two ranks.

Each arm has two fresh servers, and waits for its turn in random order. Both are warmed, and take a
trace in turns: base, arm, base, arm, …, base; who has no turn is idle. A figure is the median of
the ratios of the arm's runs to the two runs of the base around each, with a bootstrap interval; an
interval that spans 1 is called no effect. An arm is refused if its base drifts by more than 3 %, if
runs drew different numbers of tokens, if a request failed, or if the counter of the switch did not
move.

While the base drifts, an arm has more rounds than others, up to --most. That looks at the base
alone, and all rounds count, so no ratio is chosen by it. With --minutes every arm has its part of
the time, most of which its servers take to start, and as many rounds as fit into the rest, at least
three.

With --together 4 the servers of four arms and one of the base start at one time, and when all are
ready the arms have their turns in random order, with a run of the base before and behind each. With
--load nano all is measured by the load of nano-vllm's benchmark on a server of one rank.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import platform
import secrets
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import nano  # noqa: E402 - a script's own folder
from load import Arrival, make_trace, run, summarize  # noqa: E402
from plots import draw  # noqa: E402
from processes import READY, ROOT, Running, Wanted, get, serving, together  # noqa: E402
from provenance import provenance  # noqa: E402
from ratios import (  # noqa: E402
    Comparison,
    Run,
    arms_in_order,
    drifts,
    judge,
    table,
    without_problems,
)

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
        load: what takes the place of the trace.
    """

    name: str
    server: str
    arms: tuple[str, ...]
    share: float
    requests: int = 0
    means: tuple[float, float] = (0.0, 0.0)
    longest: int = 0
    prefix: int = 0
    load: nano.Nano | None = None


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
    "--batch 2 --chunk 32 --requests 4096 --port 0 --ahead",  # few variants, to start soon
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

SEVERAL = ("-thr_cap", "-affinity", "-groups")
"""What changes something only where ranks are several."""
NANO = Plan(
    "nano",
    "",  # depends on the folder
    tuple(arm for arm in (*FRONT.arms, *ENGINE.arms) if arm not in SEVERAL),
    share=1.0,
    load=nano.REAL,
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
    if plan.load:
        drawn = plan.load.draw()[: number or None]
        return {f"{given.mode} nano": [Arrival(0.0, prompt, output) for prompt, output in drawn]}
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


def measure(given: argparse.Namespace, plan: Plan, server: Running, part: float = 1.0) -> Run:
    """One run: the traces, each with its summary and rows, and the CPU time of all processes.

    Args:
        part: of each trace, to warm a server.
    """
    found = {}
    for name, whole in traces(given, plan).items():
        trace = whole if part == 1.0 else whole[: max(8, int(len(whole) * part))]
        before = server.cpu_of_all()
        rows = run(
            server.url,
            trace,
            streams=given.mode == "online",
            processes=given.processes,
            deadline=given.deadline,
            # Its prompts have no prefixes in common, and are not to have those of the last run.
            salt=secrets.token_hex(8) if plan.load else "",
        )
        spent = server.cpu_of_all() - before
        summary = summarize(rows, trace)
        kept = [asdict(row) for row in rows]
        if plan.load:  # whose gaps are a hundred thousand
            for row in kept:
                del row["gaps"]
        found[name] = {
            "summary": summary,
            "cpu_ms_per_token": spent / max(1, summary["output_tokens"]) * 1e3,
            "rows": kept,
        }
    return found


def compare(
    given: argparse.Namespace, plan: Plan, arms: list[str], seconds: float
) -> list[Comparison]:
    """Let fresh servers, one of each arm and one of the base, take the traces in turns.

    Args:
        seconds: for everything, about.

    Raises:
        RuntimeError: a server is not ready in time, or a client has failed.
    """
    end = time.monotonic() + seconds
    command = (given.server or plan.server).split()
    logs = [
        given.out / f"server-{arms[0]}-base.log",
        *(given.out / f"server-{arm}.log" for arm in arms),
    ]
    wanted = [Wanted(command, arm, log) for arm, log in zip(("", *arms), logs, strict=True)]
    found = {arm: Comparison(arm) for arm in arms}
    rng = np.random.default_rng(given.seed)
    with together(wanted, given.ready) as (base, *others):
        servers = dict(zip(arms, others, strict=True))
        for server in (base, *others):
            measure(given, plan, server, part=0.5)
        last = measure(given, plan, base)
        rounds, round_ = 0, 0.0
        while rounds < given.rounds or (rounds < given.most and any(map(drifts, found.values()))):
            began = time.monotonic()
            if rounds >= FEWEST and began + round_ > end:
                break
            for arm in rng.permutation(arms):
                each = found[str(arm)]
                if len(arms) > 1 or not rounds:
                    each.bases.append(last)
                each.arms.append(measure(given, plan, servers[str(arm)]))
                last = measure(given, plan, base)
                each.bases.append(last)
            rounds, round_ = rounds + 1, time.monotonic() - began
        time.sleep(1.2)  # the engine's counts come once a second
        for arm, each in found.items():
            each.counters = counters(servers[arm].url)
            each.ready = (base.ready, servers[arm].ready)
    return list(found.values())


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
    add("--rounds", type=int, default=5, help="of each arm")
    add("--most", type=int, default=15, help="rounds of an arm whose base drifts, at most")
    add("--minutes", type=float, default=math.inf, help="for all arms together, about")
    add("--requests", type=int, default=0, help="of a trace; by default those of the plan")
    add("--scales", type=float, nargs="+", default=[math.inf], help="of gaps; inf: all at once")
    add("--rate", type=float, default=16.0, help="requests a second at scale 1")
    add("--seed", type=int, default=0)
    add("--server", default=None, help="another command of the server, without --features")
    add("--processes", type=int, default=1, help="that send the requests")
    add("--deadline", type=float, default=600.0, help="seconds for a trace by several processes")
    add("--together", type=int, default=1, metavar="N", help="arms whose servers start at one time")
    add("--ready", type=float, default=READY, help="seconds for servers to be ready")
    add(
        "--load",
        choices=("chat", "nano"),
        default="chat",
        help="nano: that of nano-vllm's benchmark",
    )
    add(
        "--model",
        type=Path,
        help="a folder for --load nano; by default of random weights, in --out",
    )
    add("--fuse", action="store_true", help="with --load nano, TorchInductor compiles the model")
    add("--small", action="store_true", help="with --load nano, tiny sizes for a trial on hosts")
    add("--record", action="store_true", help="write the ratios to benchmarks/results/")
    add("--profile-only", action="store_true")
    raw = sys.argv[1:]
    arms: list[str] | None = None
    if "--arms" in raw:  # argparse would take -name for an option
        start = raw.index("--arms") + 1
        stop = next((i for i in range(start, len(raw)) if raw[i].startswith("--")), len(raw))
        arms, raw = raw[start:stop], raw[: start - 1] + raw[stop:]
    given = parser.parse_args(raw)
    whole = NANO.arms if given.load == "nano" else (*FRONT.arms, *ENGINE.arms)
    given.arms = list(whole) if arms is None else arms
    if arms is None and importlib.util.find_spec("uvloop") is None:
        print("+uvloop is left out: pip install uvloop")
        given.arms.remove("+uvloop")
    for arm in given.arms:
        switches.parse(arm)
        if arm not in whole:
            parser.error(f"{arm} is not measured by this load")
    return given


def plans(given: argparse.Namespace) -> tuple[Plan, ...]:
    """Those that are asked for; writes the folder of nano's model if there is none."""
    if given.load != "nano":
        return FRONT, ENGINE
    load = nano.SMALL if given.small else nano.REAL
    if given.server:
        return (replace(NANO, load=load),)
    model = (given.model or given.out / "model").resolve()
    dtype = "float32" if given.small else "float16"
    if not (model / "config.json").exists():
        line = [sys.executable, "-m", "benchmarks.one_gpu.folder", str(model), "--dtype", dtype]
        line += ["--context", str(load.context), *(["--small"] if given.small else [])]
        subprocess.run(line, cwd=ROOT, check=True)
    command = nano.server(model, load, dtype, "inductor" if given.fuse else None)
    return (replace(NANO, load=load, server=" ".join(command)),)


def main() -> int:
    given = parse()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.profile_only:
        profile(given)
        return 0
    began = time.monotonic()
    compared: dict[str, list[Comparison]] = {}
    failed: dict[str, str] = {}
    for plan in plans(given):
        arms = arms_in_order([arm for arm in plan.arms if arm in given.arms], given.seed)
        end = time.monotonic() + given.minutes * 60 * plan.share
        compared[plan.name] = []
        for first in range(0, len(arms), given.together):
            group = arms[first : first + given.together]
            print(f"{plan.name}: {' '.join(group)}", flush=True)
            seconds = (end - time.monotonic()) * len(group) / (len(arms) - first)
            try:
                compared[plan.name] += compare(given, plan, group, seconds)
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                failed |= dict.fromkeys(group, str(error))
            write(given, compared, failed, time.monotonic() - began)
    judged = write(given, compared, failed, time.monotonic() - began, is_whole=True)
    for name, found in judged.items():
        print(f"== {name}\n{table(found)}")
        draw(without_problems(found), given.out / name)
    refused = any(each["problems"] for found in judged.values() for each in found.values())
    return int(refused or bool(failed))


def write(
    given: argparse.Namespace,
    compared: dict[str, list[Comparison]],
    failed: dict[str, str],
    wall: float,
    is_whole: bool = False,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Write what is known so far, and give what is said of each arm, by plan.

    Args:
        failed: arms that could not be measured, and why.
        wall: seconds that it has taken.
        is_whole: whether nothing more comes, so that it can be recorded.
    """
    origin = provenance()
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
        "failed": failed,
        "comparisons": {name: [asdict(each) for each in found] for name, found in compared.items()},
    }
    (given.out / "manifest.json").write_text(json.dumps(manifest) + "\n")
    judged = {
        name: {each.arm: {**judge(each), "rounds": len(each.arms)} for each in found}
        for name, found in compared.items()
    }
    (given.out / "ratios.json").write_text(json.dumps(judged, indent=1) + "\n")
    if given.record and is_whole:
        text = json.dumps(
            {**origin, "figures": {**judged, "wall_s": wall}}, indent=1, sort_keys=True
        )
        name = "serving_ablation_nano" if given.load == "nano" else "serving_ablation"
        (ROOT / "benchmarks" / "results" / f"{name}.json").write_text(text + "\n")
    return judged


if __name__ == "__main__":
    sys.exit(main())
