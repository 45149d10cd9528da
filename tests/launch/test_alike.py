"""What ranks must have traced alike, and what each may have of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cg
from cg.backends.errors import PlanMismatch
from cg.backends.virtual import VirtualWorld
from cg.launch.alike import check_alike
from cg.launch.world import use_world
from cg.tracer.trace import Trace


def traced(factor: int) -> Trace:
    """A step whose torch functions are given a number, and the name of a device."""
    with use_world(VirtualWorld(2)):

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            return x * factor + torch.zeros_like(x, device="cpu")

        return step.lower(torch.ones(2)).traces[0]


def told(*traces: Trace) -> Any:
    """A world whose ranks have traced these."""
    everyone = [[(given.function, given.values) for given in trace.given] for trace in traces]
    return SimpleNamespace(allgather=lambda value: everyone)


def test_numbers_must_be_alike() -> None:
    mine = traced(2)
    check_alike(told(mine, traced(2)), mine)
    with pytest.raises(PlanMismatch, match="is given 2 on rank 0, and 3 on rank 1") as caught:
        check_alike(told(mine, traced(3)), mine)
    assert __file__ in str(caught.value)


def test_names_of_devices_are_each_ranks_own() -> None:
    values = [value for given in traced(2).given for value in given.values]
    assert "2" in values
    assert not any("cpu" in value for value in values)
