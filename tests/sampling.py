"""Counts of examples of long searches: few in a default run, three times as many with --slow.

`--times N` draws N times as many (N above 3), and others for each `--hypothesis-seed`. Ten thousand
chains of layers on meshes, in eight processes:

    for seed in 1 2 3 4 5 6 7 8; do
        pytest tests/tracer/groups/test_random_training.py --times 64 --hypothesis-seed $seed &
    done; wait
"""

from __future__ import annotations

from hypothesis import Phase, settings

DEFAULT = 100
"""`max_examples` of the profile of default runs."""


def scale() -> int:
    """How many times as many examples as a default run draws are drawn in this run."""
    profile = settings.default
    assert profile is not None
    return max(1, profile.max_examples // DEFAULT)


def examples(count: int, *, shrinks: bool = False) -> settings:
    """Run so many examples, or in proportion to the profile.

    They are the same ones in every run, but for the profile `thorough`, and for `--times`.

    Args:
        count: examples of a default run.
        shrinks: whether a failing one is made smaller; always where they are others.
    """
    profile = settings.default
    assert profile is not None
    is_thorough = profile.max_examples > settings.get_profile("slow").max_examples
    return settings(
        profile,
        max_examples=count * scale(),
        derandomize=not is_thorough,
        phases=[p for p in Phase if p is not Phase.shrink or shrinks or is_thorough],
    )
