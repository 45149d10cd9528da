"""Bubbles and activations of schedules as formulas, without playing them."""

from __future__ import annotations

from sleeping import Times


def bubble(schedule: str, p: int, m: int, v: int, times: Times) -> float | None:
    """Milliseconds that a rank is idle between its first task and its last; None if unknown.

    Args:
        schedule: its name.
        p, m, v: ranks, microbatches, and stages of each rank.
        times: of a rank's stages together. Transfers take none.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, table 2, for 1F1B and
    its interleaved form, ZB-H1, ZB-H2 and, with equal times, ZB-V. DualPipe-V with equal times is
    our own count.
    """
    tf, tb, tw = times.tf, times.tb, times.tw
    equal = tf == tb == tw
    if schedule in ("gpipe", "1f1b"):
        return (p - 1) * times.whole
    if schedule in ("interleaved", "looped-bfs") and m >= p:
        return (p - 1) * times.whole / v
    if schedule == "zb-h1" and m >= p and tw <= tf:
        return (p - 1) * (tf + tb - tw)
    if schedule == "zb-h2" and m >= 2 * p - 1 and tw <= min(tf, tb):
        return (p - 1) * (tf + tb - 2 * tw)
    if schedule == "zb-v" and m >= 2 * p - 1 and equal:
        return 0.0
    if schedule == "dualpipe-v" and m >= 2 * p and equal:
        return (p - 1) * tf / 2
    return None


def activations(schedule: str, p: int, m: int, v: int) -> float | None:
    """Of how many microbatches a rank holds the activations at most; None if unknown.

    Each of a rank's `v` stages counts 1/v, and an activation is held until its W.

    Source: as `bubble`; for the interleaved 1F1B Narayanan et al., arXiv 2104.04473, whose first
    rank runs 2 (p - 1) + (v - 1) p forwards ahead; for DualPipe-V its authors' PP + 1 stages.
    """
    if schedule in ("gpipe", "looped-bfs"):
        return float(m)
    if schedule in ("1f1b", "zb-h1", "zb-v"):
        return float(min(p, m))
    if schedule == "zb-h2":
        return float(min(2 * p - 1, m))
    if schedule == "interleaved" and m >= p and m % p == 0:
        return min((2 * (p - 1) + (v - 1) * p + 1) / v, m)
    if schedule == "dualpipe-v" and m >= 2 * p:
        return (2 * p + 1) / 2
    return None
