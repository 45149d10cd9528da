"""Digests of values: equal for equal bits, whatever holds them."""

from __future__ import annotations

import enum
import threading
from collections import UserDict, deque
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch

from cg.backends.agreement.digests import digest, joined


@dataclass
class Batch:
    tokens: torch.Tensor
    names: list[str]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Held:
    def __init__(self, content: Any) -> None:
        self.content = content


class Slotless:
    __slots__ = ("lock",)


class Slotted(Slotless):
    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


BASE = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE.t().contiguous().t(),
        torch.cat([BASE, BASE])[:4],
        BASE[None].expand(2, 4, 6)[1],
        BASE.clone().requires_grad_(),
    ],
)
def test_what_a_tensor_lies_in_does_not_count(tensor: torch.Tensor) -> None:
    assert digest(tensor) == digest(BASE)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.bool, torch.float8_e4m3fn],
)
def test_tensors_of_all_dtypes(dtype: torch.dtype) -> None:
    one = torch.arange(7).to(torch.float32).to(dtype)
    assert digest(one) == digest(one.clone())
    assert digest(one) != digest(one.flip(0)) if dtype is not torch.float8_e4m3fn else True
    digest(one[0])
    digest(one[:0])


def test_bits_count() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert digest(nan) == digest(nan.clone())
    assert digest(zero) != digest(-zero)
    rows = torch.eye(8)
    assert digest(rows) != digest(rows[torch.arange(7, -1, -1)])
    assert digest(torch.tensor([1 + 2j]).conj()) == digest(torch.tensor([1 - 2j]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        ("a", b"a"),
        ([1, 2], (1, 2)),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        (UserDict(a=1), UserDict(a=2)),
        ({1, 2}, {1, 3}),
        (Color.RED, Color.BLUE),
        (np.arange(3), np.arange(3) + 1),
        (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
        (Batch(BASE, ["a"]), Batch(BASE + 1, ["a"])),
        (Held([BASE]), Held([BASE + 1])),
        (Slotted([BASE]), Slotted([BASE + 1])),
        (deque([1, 2]), deque([2, 1])),
        (date(2026, 1, 1), date(2026, 1, 2)),
        (timedelta(1), timedelta(2)),
        (Decimal("0.1"), Decimal("0.2")),
        (Fraction(1, 2), Fraction(1, 3)),
        (Path("a"), Path("b")),
        (UUID(int=1), UUID(int=2)),
        (Held({"x": Held(1)}), Held({"x": Held(2)})),
    ],
)
def test_data_that_differs(one: Any, other: Any) -> None:
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_order_counts_where_there_is_one() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"x", "y", "z"}) == digest({"z", "x", "y"})


def test_what_one_process_alone_can_hold_counts_by_its_type() -> None:
    assert digest(threading.Lock()) == digest(threading.Lock())
    assert digest(lambda: 1) == digest(lambda: 2)
    assert digest(Held(torch.device("cpu"))) == digest(Held(torch.device("meta")))
    assert digest(Slotless()) == digest(Slotless())


def test_a_value_that_holds_itself() -> None:
    held = Held(1)
    held.content = [held]
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert digest(held) == digest(held)
    digest(deep)


def test_joined_digests_are_never_nothing() -> None:
    assert 0 < joined([]) < 2**64
    assert joined([1, 2]) != joined([2, 1])
