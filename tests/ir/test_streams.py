"""The verifier says which streams an op may be on."""

from __future__ import annotations

import pytest

from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.verify.verifier import verify

PROGRAM = """
module @t phase=scheduled world=2 {
  function @a.make() -> (f32[4]) {actor = a, effect = write}
  function @b.use(f32[4]) -> (f32[4]) {actor = b, effect = write}
  channel 0 {ranks = {0..1}}
  channel 1 {collective = true, ranks = {0..1}}
  program @0() {
    %h = call() {fn = @a.make, stream = compute} : f32[4]
    %h.on_send = wait(%h) {stream = send} : f32[4]
    %h.send = send(%h.on_send) {chan = 0, peer = 1, seq = 0, stream = send} : future<unit>
    %b = barrier() {chan = 1, group = {0..1}, seq = 0, stream = collective} : future<unit>
    wait(%b) {stream = compute}
    %h.sent = wait(%h.send) {stream = compute} : unit
    return()
  }
  program @1() {
    %h.recv = recv() {chan = 0, peer = 0, seq = 0, stream = recv} : future<f32[4]>
    %b = barrier() {chan = 1, group = {0..1}, seq = 0, stream = collective} : future<unit>
    wait(%b) {stream = compute}
    %h = wait(%h.recv) {stream = compute} : f32[4]
    %y = call(%h) {fn = @b.use, stream = compute} : f32[4]
    return(%y)
  }
}
"""


@pytest.mark.parametrize(
    ("op", "stream", "wrong"),
    [
        ("send", "send", "compute"),
        ("send", "send", "copy"),
        ("recv", "recv", "tail"),
        ("barrier", "collective", "compute"),
        ("call", "compute", "send"),
        ("call", "compute", "collective"),
        ("wait", "compute", "copy"),
    ],
)
def test_an_op_is_on_a_stream_on_which_it_can_run(op: str, stream: str, wrong: str) -> None:
    verify(parse_module(PROGRAM))
    lines = PROGRAM.splitlines()
    at = next(i for i, line in enumerate(lines) if f" {op}(" in line and f"= {stream}" in line)
    lines[at] = lines[at].replace(f"stream = {stream}", f"stream = {wrong}")
    with pytest.raises(IRError, match=rf"{op} is on stream {wrong}(.|\n)*it may be on "):
        verify(parse_module("\n".join(lines)))
