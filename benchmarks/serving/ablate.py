"""What each switch of the server is worth: base, and base with one switch, in random order.

    python benchmarks/serving/ablate.py --out runs/ablation --minutes 12 --record
    python benchmarks/serving/ablate.py --arms -prefix +shm_ring --mode offline --out …
    python benchmarks/serving/ablate.py --scales 0.4 0.8 1.6 inf --blocks 5 --out …
    python benchmarks/serving/ablate.py --profile-only --out …

Switches of the front are measured on a server whose engine costs nothing, which starts in a second
and shows them larger than they are beside a model; all others on a tiny Qwen2 on two ranks.

Each run has a server of its own. In each block all arms run once, in random order, with the base at
both ends and in the middle. A figure is the median over blocks of the ratio to the base runs of the
same block, with a bootstrap interval; an interval that spans 1 is called no effect. There is no
table if the base drifts by more than 3 %, if arms drew different numbers of tokens, or if a request
failed. An arm whose counter did not move is refused.

With --minutes there are as many blocks, up to --blocks, as there is time for; the switches of the
engine get three quarters of it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from load import Arrival, make_trace, run, summarize  # noqa: E402 - a script's own folder
from plots import draw  # noqa: E402
from processes import ROOT, get, serving  # noqa: E402
from provenance import provenance  # noqa: E402
from ratios import problems, ratios, table, unmoved  # noqa: E402

from examples.serve import features as switches  # noqa: E402 - the path is that of processes.py


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
    share=0.25,
    requests=64,
    means=(16.0, 100.0),
    longest=256,
)
ENGINE = Plan(
    "engine",
    f"{sys.executable} -m examples.serve -n 2 --model tiny-qwen2 --blocks 512 --context 256 "
    "--batch 4 --chunk 32 --requests 4096 --port 0",
    (
        *("-thr_cap", "-affinity", "-cmd_budget", "-fill_tgt", "-async_sched", "-groups"),
        *("-carry", "-variants", "-prefix", "-chunk", "-warm", "-gc_freeze", "-overlap"),
        *("-capture", "+clamp", "+inproc", "+kv256", "+debug_bounds"),
    ),
    share=0.75,
    requests=96,
    means=(24.0, 24.0),
    longest=192,
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


def measure(given: argparse.Namespace, plan: Plan, arm: str, log: Path) -> dict[str, Any]:
    """One run of an arm: a fresh server, a warm-up of all shapes, and the traces."""
    result: dict[str, Any] = {"arm": arm, "load_before": os.getloadavg(), "traces": {}}
    began = time.monotonic()
    with serving((given.server or plan.server).split(), arm, log) as server:
        result["seconds_to_ready"] = time.monotonic() - began
        planned = traces(given, plan)
        warm = next(iter(planned.values()))
        run(server.url, [Arrival(0.0, each.prompt, each.output) for each in warm[: len(warm) // 4]])
        for name, trace in planned.items():
            before = server.cpu_of_all()
            rows = run(server.url, trace, streams=given.mode == "online")
            spent = server.cpu_of_all() - before
            summary = summarize(rows, trace)
            result["traces"][name] = {
                "summary": summary,
                "cpu_ms_per_token": spent / max(1, summary["output_tokens"]) * 1e3,
                "rows": [asdict(row) for row in rows],
            }
        time.sleep(1.2)  # the engine's counts come once a second
        result["counters"] = counters(server.url)
    result["load_after"] = os.getloadavg()
    return result


def order(arms: Sequence[str], block: int, seed: int) -> list[str]:
    """The runs of a block: arms in random order, the base at both ends and in the middle."""
    mixed = list(arms)
    random.Random(f"{seed} {block}").shuffle(mixed)
    half = len(mixed) // 2
    return ["", *mixed[:half], "", *mixed[half:], ""]


def ablate(given: argparse.Namespace, plan: Plan) -> list[dict[str, Any]]:
    """As many blocks as are asked for, or as there is time for; at least one."""
    runs: list[dict[str, Any]] = []
    arms = [arm for arm in plan.arms if arm in given.arms]
    end = time.monotonic() + given.minutes * 60 * plan.share
    longest = 0.0
    for block in range(given.blocks if arms else 0):
        began = time.monotonic()
        if block and began + longest > end:
            break
        for arm in order(arms, block, given.seed):
            print(f"{plan.name}, block {block}: {arm or 'base'}", flush=True)
            log = given.out / f"server-{plan.name}-{len(runs):03d}.log"
            runs.append({"block": block, **measure(given, plan, arm, log)})
        longest = max(longest, time.monotonic() - began)
    return runs


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
    add("--blocks", type=int, default=5, help="at most")
    add("--minutes", type=float, default=math.inf, help="for all blocks together, about")
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
    measured = {plan.name: ablate(given, plan) for plan in (FRONT, ENGINE)}
    origin = provenance()
    manifest = {
        **origin,
        "argv": sys.argv,
        "features": [asdict(switches.parse(arm)) for arm in ["", *given.arms]],
        "python": platform.python_version(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "seed": given.seed,
        "wall_s": time.monotonic() - began,
        "runs": measured,
    }
    (given.out / "manifest.json").write_text(json.dumps(manifest) + "\n")
    result: dict[str, Any] = {}
    for name, runs in measured.items():
        if runs:
            result[name] = {
                "blocks": runs[-1]["block"] + 1,
                "ratios": ratios(runs),
                "unmoved": unmoved(runs),
                "problems": problems(runs),
            }
    (given.out / "ratios.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, each in result.items():
        print(f"== {name}, {each['blocks']} blocks")
        if each["problems"]:
            print("no table:\n  " + "\n  ".join(each["problems"]))
        else:
            print(table(each["ratios"], each["unmoved"]))
            draw(each["ratios"], given.out / name)
    if given.record:
        figures = {**result, "wall_s": manifest["wall_s"]}
        text = json.dumps({**origin, "figures": figures}, indent=1, sort_keys=True) + "\n"
        (ROOT / "benchmarks" / "results" / "serving_ablation.json").write_text(text)
    return int(any(each["problems"] or each["unmoved"] for each in result.values()))


if __name__ == "__main__":
    sys.exit(main())
