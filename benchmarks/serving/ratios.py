"""Runs of an arm and of the base in turns, to ratios with intervals; or the reasons for none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DRIFT = 0.03
"""By how much the base may change from the first half of a comparison to the second."""
SAMPLES = 10_000

Run = dict[str, Any]
"""What was measured with one trace, or several: by trace its summary, and CPU per token."""


@dataclass
class Comparison:
    """A server with one switch beside one without: base, arm, base, arm, base, and so on.

    Where other arms have turns in between, each run of the arm has two runs of the base to itself.

    Attributes:
        arm: the switch.
        bases, arms: their runs; there is one base more, or there are twice as many.
        counters: of the switches, as the server of the arm counts them.
        ready: seconds until the servers were ready, of the base and of the arm.
    """

    arm: str
    bases: list[Run] = field(default_factory=list)
    arms: list[Run] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    ready: tuple[float, float] = (1.0, 1.0)

    @property
    def around(self) -> list[tuple[int, int]]:
        """For each run of the arm the places of the base's runs before and behind it."""
        step = 1 if len(self.bases) == len(self.arms) + 1 else 2
        return [(place * step, place * step + 1) for place in range(len(self.arms))]


def figures(run: Run) -> dict[str, float]:
    """The figures of a run that are compared."""
    found = {}
    for trace, each in run.items():
        summary = each["summary"]
        found[f"{trace}: output_tokens_per_second"] = summary["output_tokens_per_second"]
        found[f"{trace}: cpu_ms_per_token"] = each["cpu_ms_per_token"]
        for name in ("ttft", "itl", "e2e"):
            for percentile in ("p50", "p99"):
                if name in summary["ms"]:
                    found[f"{trace}: {name} {percentile}"] = summary["ms"][name][percentile]
    return found


def ratios(comparison: Comparison, seed: int = 0) -> dict[str, dict[str, Any]]:
    """For each figure the median ratio of the arm to the two runs of the base around it.

    The interval is the percentile bootstrap's of the median, 95 %. A figure that some run lacks, as
    one in which all requests failed does, has no ratio.
    """
    rng = np.random.default_rng(seed)
    bases, arms = ([figures(run) for run in runs] for runs in (comparison.bases, comparison.arms))
    found = {}
    for name in bases[0]:
        if not all(each.get(name, 0.0) > 0 for each in (*bases, *arms)):
            continue
        pairs = [
            each[name] * 2 / (bases[before][name] + bases[behind][name])
            for each, (before, behind) in zip(arms, comparison.around, strict=True)
        ]
        samples = np.median(rng.choice(pairs, (SAMPLES, len(pairs))), axis=1)
        low, high = np.percentile(samples, (2.5, 97.5))
        found[name] = {
            "ratio": float(np.median(pairs)),
            "low": float(low),
            "high": float(high),
            "effect": bool(low > 1 or high < 1) and len(pairs) > 1,
            "pairs": pairs,
        }
    return found


def problems(comparison: Comparison) -> list[str]:
    """Why a comparison says nothing; empty if it does."""
    found = []
    for token in comparison.arm.replace(",", " ").split():
        if not comparison.counters.get(token[1:]):
            found.append(f"{token} switched nothing: its counter stands at 0")
    found += drifts(comparison)
    runs = [*comparison.bases, *comparison.arms]
    for trace in runs[0]:
        totals = {run[trace]["summary"]["output_tokens"] for run in runs}
        if len(totals) > 1:
            found.append(f"runs drew different numbers of tokens in {trace}: {sorted(totals)}")
        failed = sum(run[trace]["summary"]["failed"] for run in runs)
        if failed:
            found.append(f"{failed} requests failed in {trace}")
    return found


def drifts(comparison: Comparison) -> list[str]:
    """What is said of each trace in which the base was faster in one half of its runs."""
    found = []
    for trace in comparison.bases[0]:
        speeds = [run[trace]["summary"]["output_tokens_per_second"] for run in comparison.bases]
        half = len(speeds) // 2
        early, late = float(np.median(speeds[:half])), float(np.median(speeds[-half:]))
        drift = max(early, late) / max(min(early, late), 1e-9) - 1
        if drift > DRIFT:
            found.append(f"the base drifts by {drift:.1%} in {trace}: the machine is not quiet")
    return found


def judge(comparison: Comparison) -> dict[str, Any]:
    """Everything that is said of an arm."""
    base, arm = comparison.ready
    return {
        "ratios": ratios(comparison),
        "ready": arm / base,
        "problems": problems(comparison),
    }


def table(judged: dict[str, dict[str, Any]]) -> str:
    """As text: the labels have spaces for underscores."""
    lines = []
    for arm, each in judged.items():
        lines.append(arm.replace("_", " "))
        lines += [f"  refused: {why}" for why in each["problems"]]
        for name, row in each["ratios"].items() if not each["problems"] else ():
            interval = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
            lines.append(f"  {name:<44} {interval}  {verdict(row)}")
    return "\n".join(lines)


def verdict(row: dict[str, Any]) -> str:
    """What a ratio with its interval says."""
    return f"{row['ratio'] - 1:+.1%}" if row["effect"] else "no effect"


def without_problems(judged: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The ratios of the arms that are not refused."""
    return {arm: each["ratios"] for arm, each in judged.items() if not each["problems"]}


def arms_in_order(arms: Sequence[str], seed: int) -> list[str]:
    """Arms in random order."""
    return [str(arm) for arm in np.random.default_rng(seed).permutation(list(arms))]
