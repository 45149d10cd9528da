"""The verifier's messages for tensors that are assembled in place."""

from __future__ import annotations

import pytest

from cg.ir.text.parser import parse_module
from cg.ir.verify.verifier import verify

from .valid_modules import broken

RESERVE = "%y, %a, %b = reserve() {regions = {[0:2], [2:4]}} : f32[4], f32[2], f32[2]"
RECV = "%r = recv(%b) {chan = 0, peer = 0, seq = 0} : future<f32[2]>"
COPY = "%c = copy(%x, %a) : f32[2]"
ASSEMBLE = "%z = assemble(%y, %c, %v) {regions = {[0:2], [2:4]}} : f32[4]"
PROGRAM = f"""module @m phase=scheduled world=2 {{
  function @f(f32[2]) -> (f32[2])
  function @g(f32[4]) -> (f32[4])
  channel 0 {{ranks = {{0,1}}}}
  program @0(%x: f32[2]) {{
    %s = send(%x) {{chan = 0, peer = 1, seq = 0}} : future<unit>
    wait(%s)
    return()
  }}
  program @1(%x: f32[2]) {{
    {RESERVE}
    {RECV}
    {COPY}
    %v = wait(%r) : f32[2]
    {ASSEMBLE}
    return(%z)
  }}
}}
"""
TWICE = "%d = copy(%x, %a) : f32[2]"


def test_what_is_written_once_and_assembled_is_valid() -> None:
    verify(parse_module(PROGRAM))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (RESERVE, RESERVE.replace("()", "(%x)"), "reserve takes no operand"),
        (RESERVE, RESERVE.replace(", f32[2], f32[2]", ", f32[2], f32[2], f32[2]")
         .replace("%b =", "%b, %b9 ="), "reserve makes the whole, and a buffer for each region"),
        (RESERVE, RESERVE.replace("f32[4]", "f32[5]"), "1 elements of the whole, [0:5], are in no"),
        (RESERVE, RESERVE.replace("f32[4], f32[2], ", "f32[4], f32[3], "), "its region has f32[2]"),
        (RESERVE, RESERVE.replace("f32[4]", "f32[5]").replace("[0:2], [2:4]", "[0:1+4:5], [1:4]")
         .replace("f32[2]\n", "f32[3]\n"), "[0:1+4:5] is no block: a dimension has several"),
        (COPY, f"{COPY}\n    {TWICE}", "%a is written a second time"),
        (COPY, f"%w = call(%a) {{fn = @f}} : f32[2]\n    {COPY}",
         "call takes %a, which is storage of a tensor to assemble"),
        (COPY, f"%w = call(%y) {{fn = @g}} : f32[4]\n    {COPY}", "call takes %y, which"),
        (COPY, f"{COPY}\n    %w = call(%c) {{fn = @f}} : f32[2]", "call takes %c, which"),
        (ASSEMBLE, f"{ASSEMBLE}\n    %w = call(%v) {{fn = @f}} : f32[2]", "call takes %v, which"),
        (COPY, "%c = copy(%x) : f32[2]", "%c is not what was written to %a"),
        (ASSEMBLE, ASSEMBLE.replace("%c, %v", "%v, %c"), "%v is not what was written to %a"),
        (ASSEMBLE, ASSEMBLE.replace("(%y, ", "(%t, ").replace("%z", "%t = call(%z0) {fn = @g} : "
         "f32[4]\n    %z").replace("%t = ", "%z0 = constant() {fill = 0.0} : f32[4]\n    %t = "),
         "%t is not the whole of a reserve"),
        (ASSEMBLE, ASSEMBLE.replace("%y, ", ""), "%y is never assembled"),
        (ASSEMBLE, f"{ASSEMBLE}\n    {ASSEMBLE.replace('%z', '%z1')}",
         "%y is assembled a second time"),
        (ASSEMBLE, ASSEMBLE.replace("f32[4]", "f32[5]"), "what is assembled in it is f32[5]"),
        (COPY, COPY.replace("%a)", "%a, %a)"), "copy takes a value, and a buffer or none"),
        (COPY, COPY.replace("(%x,", "(%z0,").replace("%c", "%z0 = constant() {fill = 0.0} : "
         "f32[1]\n    %c"), "a copy into it has f32[1]"),
    ],
)  # fmt: skip
def test_reserves(old: str, new: str, message: str) -> None:
    assert message in broken(PROGRAM, old, new)


def test_a_buffer_that_nothing_writes() -> None:
    text = PROGRAM.replace(f"    {COPY}\n", "").replace("%c, %v", "%a, %v")
    with pytest.raises(Exception, match="%a is not what was written to %a"):
        verify(parse_module(text))
