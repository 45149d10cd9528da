"""Where tensors are when they arrive: of a step on the device, inside an object where they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cg.backends.fake.device import FakeDevice
from cg.backends.fake.queues import FakeQueue
from cg.ir.attributes import Stream
from cg.ir.text.parser import parse_module

from . import ranks
from .ranks import ThreadWorld, bound, on_ranks, pause

BOTH_WAYS = """
module @m phase=scheduled world=2 {
  channel 0 {ranks = {0,1}, via = "cpu"}
  program @0(%x: f32[4], %o: object) {
    %s = send(%x) {chan = 0, peer = 1, seq = 0} : future<unit>
    %t = send(%o) {chan = 0, peer = 1, seq = 1} : future<unit>
    wait(%s)
    wait(%t)
    return()
  }
  program @1() {
    %r = recv() {chan = 0, peer = 0, seq = 0} : future<f32[4]>
    %q = recv() {chan = 0, peer = 0, seq = 1} : future<object>
    %v = wait(%r) : f32[4]
    %w = wait(%q) : object
    return(%v, %w)
  }
}
"""


class Elsewhere(FakeDevice):
    """One whose memory is not the host's. There is nothing in it, so copies put nothing there."""

    def __init__(self, index: int = 0, delay: float = 0.0) -> None:
        super().__init__(index, delay, strict=False)
        self.torch_device = torch.device("meta")

    def copy(self, source: torch.Tensor, target: torch.Tensor, queue: FakeQueue) -> None:
        queue.put(f"copy from {source.device} to {target.device}", lambda: None)


def test_a_tensor_inside_an_object_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over an edge that tensors of the device go over, too, behind one that is still copied."""
    monkeypatch.setattr(ranks, "loose_device", Elsewhere)
    module = parse_module(BOTH_WAYS)
    inside = torch.arange(3.0)
    inputs: list[list[Any]] = [[torch.ones(4), {"inside": inside}], []]

    def play(world: ThreadWorld) -> tuple[Any, list[str]]:
        found = bound(world, module, delay=0.003).run(inputs[world.rank], pause)
        log = world.device.stream(Stream.COPY).log
        return found, [entry for entry in log if entry.startswith("copy")]

    (_, sent), ((tensor, there), received) = on_ranks(2, play)
    assert (sent, received) == (["copy from meta to cpu"], ["copy from cpu to meta"])
    assert tensor.device.type == "meta"
    assert there["inside"].device.type == "cpu"
    assert torch.equal(there["inside"], inside)
