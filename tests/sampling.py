"""What a default run takes of searches and grids, and `--slow` as a whole.

Of the examples that tests name it draws a twelfth; `--slow` draws three times what they name, and
`--times N` N times (N above 3). Of a test marked `grid` it takes some cases, as `covering` says. A
search that would take one test minutes is cut into shards, each a test that draws others, so that
`--numprocesses` shares them out. Ten thousand trainings of random chains of layers on meshes, on
all cores:

    OMP_NUM_THREADS=1 pytest tests/tracer/groups/test_random_training.py --times 34 -n auto
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hypothesis import Phase, seed, settings

T = TypeVar("T", bound=Callable[..., object])

NAMED = 100
"""`max_examples` of a profile that draws what tests name; default runs draw a twelfth of it."""


def scale() -> int:
    """How many times as large as by default the grids of this run are: three with --slow."""
    profile = settings.default
    assert profile is not None
    return max(1, profile.max_examples // NAMED)


def scaled(count: int) -> int:
    """How many examples this run draws for the number that a test names."""
    profile = settings.default
    assert profile is not None
    return max(1, count * profile.max_examples // NAMED)


def examples(count: int, *, shrinks: bool = False) -> settings:
    """Run so many examples, in proportion to the profile.

    They are the same ones in every run, but for the profile `thorough`, and for `--times`.

    Args:
        count: examples of a profile of 100: a default run has a twelfth.
        shrinks: whether a failing one is made smaller; always where they are others.
    """
    profile = settings.default
    assert profile is not None
    is_thorough = profile.max_examples > settings.get_profile("slow").max_examples
    return settings(
        profile,
        max_examples=scaled(count),
        derandomize=not is_thorough,
        phases=[p for p in Phase if p is not Phase.shrink or shrinks or is_thorough],
    )


def shards(count: int) -> range:
    """The numbers of a search's shards, in proportion to the profile."""
    return range(scaled(count))


def of_shard(number: int, count: int) -> Callable[[T], T]:
    """Run so many examples: the same ones in every run, and others in each shard."""
    profile = settings.default
    assert profile is not None
    phases = [phase for phase in Phase if phase is not Phase.shrink]
    chosen = settings(profile, max_examples=count, database=None, phases=phases)

    def decorate(test: T) -> T:
        return seed(number)(chosen(test))

    return decorate


def covering(cases: Sequence[Mapping[str, object]], times: int) -> list[int]:
    """The numbers of cases in which each value of each parameter occurs so often, if in so many.

    The next one is always the first of those with most values that are still wanted.

    Args:
        cases: values by the names of parameters, whose `id` tells them apart.
        times: how often each value is wanted.
    """
    keyed = [[(name, id(value)) for name, value in case.items()] for case in cases]
    there = Counter(key for keys in keyed for key in keys)
    wanted = {key: min(times, count) for key, count in there.items()}
    holders: dict[tuple[str, int], list[int]] = {}
    for number, keys in enumerate(keyed):
        for key in keys:
            holders.setdefault(key, []).append(number)
    values = [sum(wanted[key] > 0 for key in keys) for keys in keyed]  # still wanted, by case
    left, chosen = list(range(len(cases))), []
    while any(wanted.values()):
        best = max(left, key=values.__getitem__)
        left.remove(best)
        chosen.append(best)
        for key in keyed[best]:
            if wanted[key] == 1:
                for number in holders[key]:
                    values[number] -= 1
            wanted[key] = max(0, wanted[key] - 1)
    return sorted(chosen)
