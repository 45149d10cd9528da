"""Hand-written scheduled modules, and a short way to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cg.backends.base import Body
from cg.backends.virtual.world import VirtualExecutable
from cg.ir.ops.module import Module
from cg.ir.text.parser import parse_module
from cg.ir.verify.verifier import verify


def module(text: str, check: bool = True) -> Module:
    """Parse a scheduled module; `check=False` for one that is wrong on purpose."""
    parsed = parse_module(text)
    if check:
        verify(parsed)
    return parsed


def run(
    text: str,
    inputs: Sequence[Sequence[Any]],
    bodies: Mapping[str, Body] | None = None,
    **options: Any,
) -> list[tuple[Any, ...]]:
    """Run a module's text once in the virtual world."""
    constants = options.pop("constants", {})
    return VirtualExecutable(module(text), bodies or {}, constants, **options).run(inputs)


CHAIN = """
module @chain phase=scheduled world=3 {
  function @a.inc(f32[4]) -> (f32[4]) {actor = a, effect = pure, kind = opaque}
  function @b.double(f32[4]) -> (f32[4]) {actor = b, effect = pure, kind = opaque}
  function @c.dec(f32[4]) -> (f32[4]) {actor = c, effect = pure, kind = opaque}
  channel 0 {ranks = {0..1}}
  channel 1 {ranks = {1..2}}
  program @0(%x: f32[4]) {
    %h = call(%x) {fn = @a.inc} : f32[4] loc("chain.py":3 in step)
    %s = send(%h) {chan = 0, peer = 1, seq = 0} : future<unit>
    wait(%s)
    return()
  }
  program @1() {
    %r = recv() {chan = 0, peer = 0, seq = 0} : future<f32[4]>
    %v = wait(%r) : f32[4]
    %h = call(%v) {fn = @b.double} : f32[4] loc("chain.py":4 in step)
    %s = send(%h) {chan = 1, peer = 2, seq = 0} : future<unit>
    wait(%s)
    return()
  }
  program @2() {
    %r = recv() {chan = 1, peer = 1, seq = 0} : future<f32[4]>
    %v = wait(%r) : f32[4]
    %h = call(%v) {fn = @c.dec} : f32[4]
    return(%h)
  }
}
"""

LOCAL = """
module @local phase=scheduled world=1 {{
  {functions}
  program @0({params}) {{
    {ops}
  }}
}}
"""


def local(functions: str, params: str, ops: str) -> str:
    """A module of one rank; functions and ops are given one a line."""
    return LOCAL.format(functions=functions, params=params, ops=ops)


CHAIN_BODIES: dict[str, Body] = {
    "a.inc": lambda x: (x + 1,),
    "b.double": lambda x: (x * 2,),
    "c.dec": lambda x: (x - 1,),
}


def exchange(first: str, second: str) -> str:
    """Two ranks that send to each other; `first` and `second` are their op orders."""
    ops = {
        "send": "%s = send(%x) {{chan = {out}, peer = {peer}, seq = 0}} : future<unit>",
        "sent": "wait(%s)",
        "recv": "%r = recv() {{chan = {into}, peer = {peer}, seq = 0}} : future<f32[2]>",
        "got": "%v = wait(%r) : f32[2]",
    }
    programs = []
    for rank, order in enumerate((first, second)):
        names = {"out": rank, "into": 1 - rank, "peer": 1 - rank}
        lines = "\n".join(
            f'    {ops[name].format(**names)} loc("swap.py":{number + 10 * rank} in step)'
            for number, name in enumerate(order.split(), 1)
        )
        programs.append(f"  program @{rank}(%x: f32[2]) {{\n{lines}\n    return(%v)\n  }}\n")
    return (
        "module @swap phase=scheduled world=2 {\n  channel 0 {ranks = {0..1}}\n"
        "  channel 1 {ranks = {1,0}}\n" + "".join(programs) + "}\n"
    )
