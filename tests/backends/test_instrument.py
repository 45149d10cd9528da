"""Calls with bodies of their own run as the program does, and each is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cg.backends.base import Body
from cg.backends.virtual.world import VirtualExecutable
from cg.ir.ops import Call
from cg.ir.ops.module import FunctionKind, Module
from cg.ir.text.printer import format_module
from cg.ir.verify.verifier import verify

from .instrument import instrument
from .programs import module

TEXT = """
module @twice phase=scheduled world=2 {
  function @a.inc(f32[2]) -> (f32[2]) {actor = a, effect = write, kind = opaque}
  function @builtin.add.f32.2(f32[2], f32[2]) -> (f32[2]) {kind = builtin}
  function @half(f32[2]) -> (f32[2]) {kind = graph}
  program @0(%x: f32[2]) {
    %y = call(%x) {fn = @a.inc} : f32[2]
    %z = call(%y) {fn = @a.inc} : f32[2]
    %s = call(%y, %z) {fn = @builtin.add.f32.2} : f32[2]
    %h = call(%s) {fn = @half} : f32[2]
    return(%h)
  }
  program @1(%x: f32[2]) {
    %h = call(%x) {fn = @half} : f32[2]
    return(%h)
  }
}
"""
BODIES: dict[str, Body] = {"a.inc": lambda x: (x + 1,), "half": lambda x: (x / 2,)}


class Seen:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int, str]] = []

    def wrap(self, rank: int, index: int, op: Call, body: Body) -> Body:
        name = op.fn.name

        def run(*values: Any) -> Sequence[Any]:
            self.calls.append((rank, index, name))
            return body(*values)

        return run


def run(made: Module, bodies: dict[str, Body]) -> list[list[float]]:
    inputs = [[torch.tensor([1.0, 3.0])] for _ in range(2)]
    return [output.tolist() for (output,) in VirtualExecutable(made, bodies, {}).run(inputs)]


def test_every_call_of_every_rank_is_seen_and_nothing_else_changes() -> None:
    made, seen = module(TEXT), Seen()
    before = format_module(made)
    watched, bodies = instrument(made, BODIES, range(2), seen.wrap)
    verify(watched)
    assert run(watched, bodies) == run(made, BODIES) == [[2.5, 4.5], [0.5, 1.5]]
    assert sorted(seen.calls) == [
        (0, 0, "a.inc"),
        (0, 1, "a.inc"),
        (0, 2, "builtin.add.f32.2"),
        (0, 3, "half"),
        (1, 0, "half"),
    ]
    assert format_module(made) == before


def test_ranks_that_are_played_elsewhere_have_names_but_no_bodies() -> None:
    made = module(TEXT)
    whole, _ = instrument(made, BODIES, range(2), Seen().wrap)
    part, bodies = instrument(made, BODIES, [1], Seen().wrap)
    assert format_module(part) == format_module(whole)
    assert list(bodies) == ["half.1.0"]
    assert part.functions["builtin.add.f32.2.0.2"].kind is FunctionKind.GRAPH
