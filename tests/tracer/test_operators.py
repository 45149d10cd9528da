"""What torch's operators give in traced methods is what eager PyTorch gives, or a clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ..sampling import scale
from . import cut_operators
from .operators import Outcome, name_of, operators, outcome_of

torch.set_num_threads(1)

HERE = Path(__file__).parent
KNOWN: dict[str, Any] = {
    file: json.loads((HERE / f"{file}.json").read_text(encoding="utf-8"))
    for file in ("operators", "cut_operators")
}
"""What has come of each operator on one rank, and on a mesh."""
SEVERAL = 40
"""A default run tries each of so many operators."""


@pytest.fixture(scope="module")
def of_torch() -> dict[str, Any]:
    try:
        return {name_of(operator): operator for operator in operators()}
    except ImportError as error:
        pytest.skip(f"torch's own tests cannot be imported: {error}")


def chosen() -> list[str]:
    """The operators that this run tries: with --slow all that the record knows."""
    names = sorted(KNOWN["operators"]["operators"])
    return names if scale() > 1 else sorted({*names[::SEVERAL], "nn.functional.softplus"})


@pytest.mark.parametrize("name", chosen())
def test_an_operator_gives_what_eager_pytorch_gives_or_an_error(
    name: str, of_torch: dict[str, Any]
) -> None:
    check("operators", outcome_of, name, of_torch)


@pytest.mark.parametrize("name", chosen())
def test_an_operator_on_a_mesh(name: str, of_torch: dict[str, Any]) -> None:
    check("cut_operators", cut_operators.outcome_of, name, of_torch)


def check(
    record: str, attempt: Callable[[Any], Outcome], name: str, of_torch: dict[str, Any]
) -> None:
    """Try an operator, and compare with what has been recorded."""
    if name not in of_torch:
        pytest.skip(f"this version of torch, {torch.__version__}, has no such operator")
    outcome = attempt(of_torch[name])
    assert not outcome.wrong
    assert outcome.tried == outcome.equal + sum(outcome.refused.values())
    known = KNOWN[record]
    if torch.__version__.partition("+")[0] == known["torch"]:
        assert outcome.as_record() == known["operators"][name]
