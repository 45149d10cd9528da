"""Runs of an ablation to ratios: paired with the base, with intervals, or the reasons for none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

DRIFT = 0.03
"""By how much base runs may change from the first half of a measurement to the second."""
SAMPLES = 10_000


def figures(run: dict[str, Any]) -> dict[str, float]:
    """The figures of a run that are compared."""
    found = {}
    if "seconds_to_ready" in run:
        found["seconds_to_ready"] = run["seconds_to_ready"]
    for trace, each in run["traces"].items():
        summary = each["summary"]
        found[f"{trace}: output_tokens_per_second"] = summary["output_tokens_per_second"]
        if "cpu_ms_per_token" in each:
            found[f"{trace}: cpu_ms_per_token"] = each["cpu_ms_per_token"]
        for name in ("ttft", "itl", "e2e"):
            for percentile in ("p50", "p99"):
                if name in summary["ms"]:
                    found[f"{trace}: {name} {percentile}"] = summary["ms"][name][percentile]
    return found


def ratios(runs: Sequence[dict[str, Any]], seed: int = 0) -> dict[str, dict[str, Any]]:
    """For each arm and figure the median of the paired ratios to the base, with an interval.

    The interval is the percentile bootstrap's of the median, 95 %. Arms that switched nothing have
    no ratios.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, dict[str, Any]] = {}
    idle = unmoved(runs)
    shared = set.intersection(*(set(figures(each)) for each in runs))
    for arm in sorted({each["arm"] for each in runs} - {"", *idle}):
        found[arm] = {}
        for name in sorted(shared):
            pairs = []
            for block in sorted({each["block"] for each in runs}):
                here = [each for each in runs if each["block"] == block]
                base = np.median([figures(each)[name] for each in here if each["arm"] == ""])
                pairs += [figures(each)[name] / base for each in here if each["arm"] == arm]
            samples = np.median(rng.choice(pairs, (SAMPLES, len(pairs))), axis=1)
            low, high = np.percentile(samples, (2.5, 97.5))
            found[arm][name] = {
                "ratio": float(np.median(pairs)),
                "low": float(low),
                "high": float(high),
                "effect": bool(low > 1 or high < 1) and len(pairs) > 1,
                "pairs": pairs,
            }
    return found


def unmoved(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Arms whose counter stood still in a run: they measured nothing."""
    found = set()
    for each in runs:
        names = (token[1:] for token in each["arm"].replace(",", " ").split())
        if not all(map(each["counters"].get, names)):
            found.add(each["arm"])
    return sorted(found)


def problems(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Why there is no table; empty if there is one."""
    found = []
    base = [figures(each) for each in runs if each["arm"] == ""]
    half = len(base) // 2
    for name in base[0]:
        if name.endswith("output_tokens_per_second"):
            values = [each[name] for each in base]
            early, late = np.median(values[:half]), np.median(values[-half:])
            drift = float(max(early / late, late / early)) - 1
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
    return list(dict.fromkeys(found))


def table(ratios_: dict[str, dict[str, Any]], unmoved_: Sequence[str] = ()) -> str:
    """As text: the labels have spaces for underscores."""
    lines = []
    for arm, row in ratios_.items():
        lines.append(arm.replace("_", " "))
        for name, each in row.items():
            interval = f"{each['ratio']:.3f} [{each['low']:.3f}, {each['high']:.3f}]"
            lines.append(f"  {name:<44} {interval}  {verdict(each)}")
    lines += [f"{arm.replace('_', ' ')}\n  switched nothing here: refused" for arm in unmoved_]
    return "\n".join(lines)


def verdict(each: dict[str, Any]) -> str:
    """What a ratio with its interval says."""
    return f"{each['ratio'] - 1:+.1%}" if each["effect"] else "no effect"
