"""What torch's operators give in traced methods is what eager PyTorch gives, or a clear error."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ..sampling import scale
from .operators import RECORD, name_of, operators, outcome_of

torch.set_num_threads(1)

KNOWN: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["operators"]
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
    names = sorted(KNOWN)
    return names if scale() > 1 else sorted({*names[::SEVERAL], "nn.functional.softplus"})


@pytest.mark.parametrize("name", chosen())
def test_an_operator_gives_what_eager_pytorch_gives_or_an_error(
    name: str, of_torch: dict[str, Any]
) -> None:
    if name not in of_torch:
        pytest.skip(f"this version of torch, {torch.__version__}, has no such operator")
    outcome = outcome_of(of_torch[name])
    assert not outcome.wrong
    assert outcome.tried == outcome.equal + sum(outcome.refused.values())
    if torch.__version__.partition("+")[0] == json.loads(RECORD.read_text())["torch"]:
        assert outcome.as_record() == KNOWN[name]
