"""Random steps mean what their Python means, however they are compiled and run.

Each example is compiled through the public names and run twice in the virtual world: as a user
does, and with ranks that take turns at random and freed memory that is poisoned. Values, gradients,
buffers and the order of effects on each actor equal those of the plain Python, run eagerly. After
every pass the module is valid and its text reads back as an equal one.

The examples are the same in every run, and are not shrunk. `pytest tests/properties
--hypothesis-profile=thorough` draws others, twenty times as many, and takes its time to shrink.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, event, given, settings

import cg

from .actors import KINDS
from .oracle import BASIC, Pool, check
from .recipes import ALL, GROUPS, PIPELINE, READS, VALUES, WRITES, Flavour, Recipe, draw_recipe

ANYTHING = Flavour(ALL)
PIPELINES = Flavour(PIPELINE, microbatches=(1, 2, 4), blocks=1)
EFFECTS = Flavour(
    (*WRITES, *WRITES, *READS, *VALUES), microbatches=(0, 0, 0, 2), lines=10, trained=False
)
COLLECTIVES = Flavour((*GROUPS, "linear", "add", "loss"), worlds=(2, 3, 4, 6), lines=4)


@st.composite
def recipes(draw: Callable[[Any], Any], flavour: Flavour, schedules: tuple[str, ...]) -> Recipe:
    """Random recipes of a flavour."""
    return draw_recipe(lambda a, b: draw(st.integers(a, b)), flavour, schedules, KINDS)


def examples(count: int) -> settings:
    """Run so many examples, always the same; or, in another profile, in proportion to its own."""
    profile = settings.default
    assert profile is not None
    times = profile.max_examples // 100
    return settings(
        profile,
        max_examples=count * max(1, times),
        derandomize=times <= 1,
        phases=[phase for phase in Phase if phase is not Phase.shrink or times > 1],
    )


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool.make()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    """Tensors this small are faster without a pool of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@examples(210)
@given(recipe=recipes(ANYTHING, BASIC))
def test_any_step(recipe: Recipe, pool: Pool) -> None:
    event(check(recipe, pool))


@examples(140)
@given(recipe=recipes(PIPELINES, tuple(cg.schedules.names())))
def test_pipelines_under_every_schedule(recipe: Recipe, pool: Pool) -> None:
    event(f"{recipe.schedule}: {check(recipe, pool)}")


@examples(80)
@given(recipe=recipes(EFFECTS, BASIC))
def test_effects_keep_their_order(recipe: Recipe, pool: Pool) -> None:
    event(check(recipe, pool))


@examples(60)
@given(recipe=recipes(COLLECTIVES, BASIC))
def test_collectives(recipe: Recipe, pool: Pool) -> None:
    event(check(recipe, pool))


@examples(20)
@given(recipe=recipes(ANYTHING, BASIC))
def test_with_actors_of_their_own(recipe: Recipe) -> None:
    """Without anything shared between examples, as users make actors and trace steps."""
    event(check(recipe))
