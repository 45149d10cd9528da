"""The traces that ranks must have alike, and the parts that may differ."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

import cg
from cg.launch.api.compile_options import CompileOptions
from cg.launch.runtime.agreement import text_of

from ..worlds import virtual_world

_world = virtual_world(2)


@cg.trace
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + torch.zeros_like(x, device="cpu")


def test_what_torch_functions_are_given_is_known_but_for_devices() -> None:
    values = [
        value
        for given in doubled.lower(torch.ones(2)).trace.plain_arguments
        for value in given.values
    ]
    assert "2" in values
    assert not any("cpu" in value for value in values)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (2, 3),
        (2, 2.0),
        ("a", "b"),
        (slice(1), slice(2)),
        ((1, (2,)), (1, (3,))),
        (frozenset({1}), frozenset({2})),
        (torch.float32, torch.float64),
        (np.float32(1), np.float64(1)),
        (len, sum),
        (cg.on(0), cg.on(1)),
        (cg.schedules.gpipe(), cg.schedules.zb_h1()),
    ],
)
def test_static_values_that_differ(one: Any, other: Any) -> None:
    assert text_of(one) == text_of(one)
    assert text_of(one) != text_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.device("cuda", 0), torch.device("cuda", 1)),
        ("cuda:0", "cuda:1"),
        (object(), object()),
        (lambda: 1, lambda: 2),
    ],
)
def test_what_each_rank_may_have_of_its_own(one: Any, other: Any) -> None:
    assert text_of(one) == text_of(other)


@pytest.mark.parametrize(
    ("given", "every"), [(None, None), (True, 1), (False, 0), (1, 1), (64, 64)]
)
def test_intervals(given: Any, every: int | None) -> None:
    assert CompileOptions(check_inputs=given).compared_every == every


@pytest.mark.parametrize("given", ["all", 1.5, [1]])
def test_check_inputs_of_another_type(given: Any) -> None:
    with pytest.raises(TypeError, match=r"check_inputs=.*True or False, an int"):
        doubled.lower(torch.ones(2)).compile(check_inputs=given)


@pytest.mark.parametrize("given", [0, -1])
def test_check_inputs_below_1(given: int) -> None:
    with pytest.raises(ValueError, match="at least 1; False compares none"):
        doubled.lower(torch.ones(2)).compile(check_inputs=given)


def test_no_such_dispatch() -> None:
    with pytest.raises(ValueError, match="dispatch='all_to_all': it is auto, gather, exchange"):
        doubled.lower(torch.ones(2)).compile(dispatch=cast("Any", "all_to_all"))


@pytest.mark.parametrize(("tasks", "kind"), [(0, ValueError), (True, TypeError), (1.5, TypeError)])
def test_no_such_number_of_tasks_in_flight(tasks: object, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"tasks_in_flight={tasks}: "):
        doubled.lower(torch.ones(2)).compile(tasks_in_flight=cast("Any", tasks))


def test_options_that_must_be_equal_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CG_PASSES", "-overlap")
    monkeypatch.setenv("CG_SEED", "3")
    options = CompileOptions(passes="-cse", dump="here", timeout=1.0, check_inputs=True)
    assert options.agreed() == {
        "schedule": None,
        "passes": "-overlap,-cse",
        "seed": 3,
        "max_inflight": None,
        "memory": None,
        "costs": None,
        "host_link": (0.01, 50.0),
        "saved": None,
        "fuse": None,
        "fsdp": None,
        "check_inputs": 1,
        "dispatch": "auto",
        "tasks_in_flight": 1,
    }


def test_options_keep_the_settings_that_they_were_made_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CG_TIMEOUT", "7")
    options = CompileOptions()
    monkeypatch.setenv("CG_TIMEOUT", "9")
    assert (options.call_timeout, options.execute_timeout) == (7.0, 7.0)
    assert CompileOptions(timeout=2.0).execute_timeout == 2.0
    monkeypatch.delenv("CG_TIMEOUT")
    assert CompileOptions().execute_timeout is None
