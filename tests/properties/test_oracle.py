"""Random steps mean what their Python means, however they are compiled and run.

Each example is compiled through the public names and run twice in the virtual world: as a user
does, and with ranks that take turns at random and freed memory that is poisoned. Values, gradients,
buffers and the order of effects on each actor equal those of the plain Python, run eagerly. After
every pass the module is valid and its text reads back as an equal one.

The examples are the same in every run, and are not shrunk; `--slow` draws three times as many.
`pytest tests/properties --hypothesis-profile=thorough` draws others, sixty times as many, and takes
its time to shrink.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import event, given

import cg

from ..sampling import examples
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


@examples(32)
@given(recipe=recipes(ANYTHING, BASIC))
def test_any_step(recipe: Recipe, pool: Pool) -> None:
    event(check(recipe, pool))


@examples(24)
@given(recipe=recipes(PIPELINES, tuple(cg.schedules.names())))
def test_pipelines_under_every_schedule(recipe: Recipe, pool: Pool) -> None:
    event(f"{recipe.schedule}: {check(recipe, pool)}")


@examples(14)
@given(recipe=recipes(EFFECTS, BASIC))
def test_effects_keep_their_order(recipe: Recipe, pool: Pool) -> None:
    event(check(recipe, pool))


@examples(10)
@given(recipe=recipes(COLLECTIVES, BASIC))
def test_collectives(recipe: Recipe, pool: Pool) -> None:
    event(check(recipe, pool))


@examples(4)
@given(recipe=recipes(ANYTHING, BASIC))
def test_with_actors_of_their_own(recipe: Recipe) -> None:
    """Without anything shared between examples, as users make actors and trace steps."""
    event(check(recipe))
