"""A program that posts a receive ahead of its turn stands still where hosts wait for devices."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cg.backends.errors import RemoteError
from cg.backends.fake.device import FakeDevice
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.passes.check.check_deadlock import CheckDeadlock
from tests.backends.devices import ranks

IN_TURN = """
module @t phase=scheduled world=2 {
  function @a.f(f32[4]) -> (f32[4]) {actor = a, effect = read}
  channel 0 {ranks = {0..1}, via = fake}
  channel 1 {ranks = {1,0}, via = fake}
  program @0(%x: f32[4]) {
    %h = call(%x) {fn = @a.f, stream = compute} : f32[4]
    %s = wait(%h) {stream = send} : f32[4]
    %h.send = send(%s) {chan = 0, peer = 1, seq = 0, stream = send} : future<unit>
    %g.recv = recv() {chan = 1, peer = 1, seq = 0, stream = recv} : future<f32[4]>
    %g = wait(%g.recv) {stream = compute} : f32[4]
    %h.sent = wait(%h.send) {stream = compute} : unit
    return(%g)
  }
  program @1() {
    %h.recv = recv() {chan = 0, peer = 0, seq = 0, stream = recv} : future<f32[4]>
    %h = wait(%h.recv) {stream = compute} : f32[4]
    %s = wait(%h) {stream = send} : f32[4]
    %g.send = send(%s) {chan = 1, peer = 0, seq = 0, stream = send} : future<unit>
    %g.sent = wait(%g.send) {stream = compute} : unit
    return()
  }
}
"""
RECEIVE = IN_TURN[IN_TURN.index("    %g.recv") : IN_TURN.index("    %g = wait")]
CALL = "    %h = call(%x)"
AHEAD = IN_TURN.replace(RECEIVE, "").replace(CALL, RECEIVE + CALL)
BODIES = {"a.f": lambda x: (x * 2.0,)}
X = torch.arange(4.0)


def play(text: str, monkeypatch: pytest.MonkeyPatch, strict: bool) -> torch.Tensor:
    """What rank 0 returns in the last of two executions."""
    device = partial(FakeDevice, strict=strict, patience=5.0)
    monkeypatch.setattr(ranks, "loose_device", device)
    outputs = ranks.play(parse_module(text), [[[X], []]] * 2, BODIES)
    value: torch.Tensor = outputs[-1][0][0]
    return value


def test_a_receive_ahead_of_its_turn_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteError, match="stream recv has waited"):
        play(AHEAD, monkeypatch, strict=True)


def test_it_does_not_where_no_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(AHEAD, monkeypatch, strict=False).equal(X * 2)


def test_a_receive_in_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(IN_TURN, monkeypatch, strict=True).equal(X * 2)


def test_the_proof_says_so() -> None:
    CheckDeadlock().run(parse_module(IN_TURN))
    with pytest.raises(IRError, match="the host of rank 0 may wait here for its device"):
        CheckDeadlock().run(parse_module(AHEAD))
