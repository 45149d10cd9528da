"""Snapshots of Python state: each kind of state, changed, named and put back."""

from __future__ import annotations

import array
import collections
import random
import sys
from collections.abc import Callable
from types import CellType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from cg.tracer.values.actor_state import collect
from cg.tracer.values.heap.reach import reach_all
from cg.tracer.values.heap.snapshot import MISSING, ModuleNames, Snapshot
from cg.tracer.values.heap.variables import users_modules


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a = 1


class Counter:
    total = 0


class Factories(collections.OrderedDict[str, Callable[[int], Any]]):
    """Gives what a factory makes, as transformers' activations do."""

    def __getitem__(self, key: str) -> Any:
        raise TypeError(f"the factory {key} takes an argument: {super().__getitem__(key)}")


def _cell() -> CellType:
    value = 1
    assert (lambda: value).__closure__ is not None
    return (lambda: value).__closure__[0]


def _set_cell(cell: CellType) -> None:
    cell.cell_contents = 2


CASES: list[tuple[str, Callable[[], Any], Callable[[Any], Any], list[str]]] = [
    ("dict", lambda: {"a": 1}, lambda d: d.update(a=2, b=3), ["x.a", "x.b"]),
    ("factories", lambda: Factories(a=int), lambda d: d.update(a=str), ["x.a"]),
    ("list", lambda: [1, 2], lambda v: v.__setitem__(1, 3), ["x.1"]),
    ("longer list", lambda: [1], lambda v: v.append(3), ["x"]),
    ("set", lambda: {1}, lambda v: v.add(2), ["x"]),
    ("deque", lambda: collections.deque([1]), lambda v: v.append(2), ["x"]),
    ("cell", _cell, _set_cell, ["x"]),
    (
        "names",
        lambda: ModuleNames({"a": 1, "c": 1}, ("a", "b")),
        lambda n: n.space.update(b=2),
        ["x.b"],
    ),
    ("class", lambda: type("C", (), {"a": 1}), lambda c: setattr(c, "b", 2), ["x.b"]),
    ("slots", Slotted, lambda s: setattr(s, "b", 2), ["x"]),
    ("array", lambda: np.zeros(2), lambda v: v.fill(1), ["x"]),
    ("generator", lambda: np.random.default_rng(0), lambda v: v.random(), ["x"]),
    ("old generator", lambda: np.random.RandomState(0), lambda v: v.rand(), ["x"]),
    ("random", lambda: random.Random(0), lambda v: v.random(), ["x"]),
    ("torch", torch.Generator, lambda v: v.manual_seed(5), ["x"]),
    ("bytes", lambda: bytearray(2), lambda v: v.extend(b"a"), ["x"]),
    ("numbers", lambda: array.array("i", [1]), lambda v: v.append(2), ["x"]),
]


@pytest.mark.parametrize(
    ("make", "change", "paths"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_change_is_named_and_put_back(
    make: Callable[[], Any], change: Callable[[Any], Any], paths: list[str]
) -> None:
    value = make()
    before = Snapshot([(value, "x")])
    assert before.changes() == []
    change(value)
    found = before.changes()
    assert [each.path for each in found] == paths
    for each in found:
        each.put(each.before)
    assert before.changes() == []
    for each in found:
        each.put(each.after)
    assert [each.path for each in before.changes()] == paths
    watches = [each.watch() for each in found]
    assert not any(watch() for watch in watches)
    before.restore()
    assert before.changes() == []
    assert all(watch() for watch in watches)


def test_what_was_not_there_is_missing() -> None:
    value: dict[str, int] = {}
    before = Snapshot([(value, "x")])
    value["a"] = 1
    (found,) = before.changes()
    assert (found.key, found.before, found.after) == ("a", MISSING, 1)
    assert found.words() == "from nothing to 1"


def test_changes_stand_in_the_order_of_what_is_held() -> None:
    first, empty, ordered, last = {"a": 1}, {}, collections.OrderedDict[str, int](), [1]
    values: list[Any] = [first, empty, ordered, last]
    before = Snapshot([(value, f"v{index}") for index, value in enumerate(values)])
    last.append(2)
    assert [change.path for change in before.changes()] == ["v3"]
    ordered["b"] = 1
    first["a"] = 2
    empty["c"] = 1
    assert [change.path for change in before.changes()] == ["v0.a", "v1.c", "v2.b", "v3"]
    before.restore()
    assert values == [{"a": 1}, {}, {}, [1]]
    assert before.changes() == []


def test_empty_containers_of_an_actor_are_state_once() -> None:
    shared: dict[str, Any] = {}
    actor = torch.nn.Module()
    actor.one, actor.other, actor.items = shared, shared, []
    actor.names, actor.count = set(), 1
    containers = collect(actor).containers
    assert [path for value, path in containers if value is shared] == ["one"]
    assert {path for _, path in containers} >= {"one", "items", "names", "_forward_hooks"}
    shared["weight"] = torch.ones(2)
    assert [tensor.path for tensor in collect(actor).tensors] == ["one.weight"]


def test_a_walk_names_what_a_function_refers_to() -> None:
    kept: list[Any] = [Counter()]

    def step() -> Any:
        Counter.total += 1
        return kept

    reach = reach_all(step, lambda value: None)
    assert {path for _, path in reach.variables} >= {"kept", "Counter", ""}
    assert {path for _, path in reach.containers} >= {"kept", "kept.0"}


def test_a_module_that_takes_the_place_of_another_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed, own = ModuleType("placed"), ModuleType("placed")
    installed.__file__, own.__file__ = "/usr/lib/site-packages/placed.py", "/home/user/placed.py"
    for module in (installed, own, installed):
        monkeypatch.setitem(sys.modules, "placed", module)
        assert (module in users_modules()) == (module is own)
    monkeypatch.delitem(sys.modules, "placed")
    assert installed not in users_modules()
    monkeypatch.setitem(sys.modules, "placed", own)
    assert own in users_modules()
