"""Random models train as they do in plain PyTorch, wherever their stages are; see `models.py`.

A default run takes a few seeds, `--slow` some hundred, and `python -m tests.properties.models` any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from ..sampling import examples, shards
from .model_programs import Program, draw_program, program_of
from .models import Difference, check, compare_tensors, quiet

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return draw_program(lambda first, last: draw(st.integers(first, last)))


@pytest.mark.parametrize("seed", shards(64))
def test_a_seed_trains_as_in_plain_torch(seed: int, record_property: Any) -> None:
    record_property("result", check(program_of(seed)))


@examples(16, shrinks=True)
@given(program=programs())
def test_what_is_drawn_trains_as_in_plain_torch(program: Program) -> None:
    event(check(program))


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (None, torch.zeros(2)),
        (torch.zeros(2), None),
        (torch.zeros(2), torch.zeros(1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.tensor([1000.0, 1.0]), torch.tensor([1000.0, 2.0])),
        (torch.tensor(1.0), torch.tensor(float("nan"))),
    ],
)
def test_differences_are_seen(expected: Any, actual: Any) -> None:
    with pytest.raises(Difference, match="a value"):
        compare_tensors("a value", expected, actual, 5e-4)
    compare_tensors("a value", expected, expected, 0.0)
