"""The verifier's rules for batches, and its messages for those that break them."""

from __future__ import annotations

import pytest

from cg.ir.ops.module import Module
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module
from cg.ir.verify.message_matching import match
from cg.ir.verify.verifier import verify

SWAP = """
module @swap phase=scheduled world=2 {
  channel 0 {ranks = {0..1}, via = hccl}
  channel 1 {ranks = {1,0}, via = hccl}
  program @0(%x: f32[4]) {
    %s = send(%x) {batch = 0, chan = 0, peer = 1, seq = 0, stream = message} : future<unit>
    %r = recv() {batch = 0, chan = 1, peer = 1, seq = 0, stream = message} : future<f32[4]>
    %d = wait(%s) : unit
    %y = wait(%r) : f32[4]
    return(%y)
  }
  program @1(%x: f32[4]) {
    %s = send(%x) {batch = 0, chan = 1, peer = 0, seq = 0, stream = message} : future<unit>
    %r = recv() {batch = 0, chan = 0, peer = 0, seq = 0, stream = message} : future<f32[4]>
    %d = wait(%s) : unit
    %y = wait(%r) : f32[4]
    return(%y)
  }
}
"""


def swap(*changes: tuple[str, str]) -> Module:
    text = SWAP
    for before, after in changes:
        assert before in text
        text = text.replace(before, after, 1)
    return parse_module(text)


def test_two_messages_that_cross_are_a_batch() -> None:
    module = swap()
    verify(module)
    assert parse_module(format_module(module)) == module
    one, other = match(module).values()
    assert one.unit == other.unit
    assert set(one.unit) == {one, other}


FIRST = "send(%x) {batch = 0, chan = 0"
SECOND = "recv() {batch = 0, chan = 1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(FIRST, "send(%x) {chan = 0")], "recv is in batch 0, which is a recv"),
        ([(SECOND, "recv() {batch = 1, chan = 1")], "send is in batch 0, which is a send"),
        (
            [("seq = 0, stream = message", "seq = 0, stream = send")],
            "recv is in batch 0, whose messages are on several streams",
        ),
        (
            [("{1,0}, via = hccl", "{1,0}, via = nccl")],
            "recv is in batch 0, whose messages go by several transports",
        ),
        (
            [
                ("    %d = wait(%s) : unit\n", ""),
                ("    %r =", "    %d = wait(%s) : unit\n    %r ="),
            ],
            "recv is in batch 0, with waits or other messages in between",
        ),
    ],
)
def test_what_is_no_batch(changes: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(IRError) as raised:
        verify(swap(*changes))
    assert message in str(raised.value)
    assert "a batch is one send and one recv, to and from the same rank" in str(raised.value)


def test_both_ends_are_in_the_same_batch() -> None:
    ends = [(f"recv() {{batch = 0, chan = {chan}", f"recv() {{chan = {chan}") for chan in (0, 1)]
    lone = [(f"send(%x) {{batch = 0, chan = {chan}", f"send(%x) {{chan = {chan}") for chan in (1,)]
    with pytest.raises(IRError, match="recv is in no batch, but its send is in batch 0"):
        match(swap(*ends, *lone))


def test_a_message_of_a_third_rank() -> None:
    text = SWAP.replace("world=2", "world=3").replace("ranks = {1,0}", "ranks = {2,0}")
    text = text.replace("chan = 1, peer = 1", "chan = 1, peer = 2")
    with pytest.raises(IRError, match="recv is in batch 0 with a message of rank 1"):
        verify(parse_module(text))


def test_there_are_none_before_programs_are_scheduled() -> None:
    text = """
    module @m phase=async world=2 {
      channel 0 {ranks = {0..1}}
      program @m(%x: f32[4]@0) {
        %s = send(%x) {batch = 0, chan = 0, peer = 1, seq = 0} : future<unit@0>
        %r = recv() {batch = 0, chan = 0, peer = 0, seq = 0} : future<f32[4]@1>
        %d = wait(%s) : unit@0
        %y = wait(%r) : f32[4]@1
        return(%y) {at = {1}}
      }
    }
    """
    with pytest.raises(IRError, match="is in batch 0 in phase async; only programs of ranks have"):
        verify(parse_module(text))
