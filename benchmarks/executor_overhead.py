"""Measure the executor: microseconds for each instruction of a rank's program.

    python benchmarks/executor_overhead.py [--instructions 1000] [--repeats 30] [--json FILE]

Programs of one rank repeat one kind of op that does as little as it can. The fixed cost of an
execution is that of an empty program; it is taken off the others. Figures are medians over the
repeats, and the least of them, since load on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from cg.backends.program.executor import Executable, poll_only
from cg.backends.program.linked import LinkedProgram
from cg.backends.virtual.fabric import VirtualFabric
from cg.ir.text.parser import parse_module

FUNCTIONS = """
  function @one(object) -> (object) {effect = pure, kind = graph}
  function @two(object, object) -> (object) {effect = pure, kind = graph}
  function @four(object, object, object, object) -> (object, object, object, object)
    {effect = pure, kind = graph}
  function @a.none() -> () {actor = a, effect = write, kind = opaque}
  function @a.tensor(f32[1]) -> (f32[1]) {actor = a, effect = write, kind = opaque}
  function @draw(object) -> (object) {effect = pure, kind = graph, random = true}
"""
CASES = {
    "empty call": "%y{i} = call(%x) {{fn = @one}} : object",
    "call, 2 inputs": "%y{i} = call(%x, %x) {{fn = @two}} : object",
    "call, 4 inputs, 4 results": "%y{i}, %p{i}, %q{i}, %r{i} = call(%x, %x, %x, %x) "
    "{{fn = @four}} : object, object, object, object",
    "opaque call, no values": "call() {{fn = @a.none}}",
    "opaque call, tensor": "%y{i} = call(%t) {{fn = @a.tensor}} : f32[1]",
    "seeded call": "%y{i} = call(%x) {{fn = @draw, key = {i}}} : object",
    "view": "%y{i} = view(%t) {{dim = 0, start = 0, length = 1}} : f32[1]",
    "wait across streams (elided)": "%y{i} = wait(%x) {{stream = send}} : object",
    "call and free": "%y{i} = call(%x) {{fn = @one}} : object free(%y{i})",
    "barrier and wait": "%f{i} = barrier() {{chan = 0, group = {{0}}, seq = {i}}} : future<unit> "
    "wait(%f{i})",
}


def program(line: str, count: int) -> Executable:
    """A program of one rank that repeats `line`."""
    ops = "\n    ".join(line.format(i=i) for i in range(count))
    text = (
        f"module @bench phase=scheduled world=1 {{{FUNCTIONS}"
        "  channel 0 {collective = true, ranks = {0}}\n"
        f"  program @0(%x: object, %t: f32[1]) {{\n    {ops}\n    return()\n  }}\n}}\n"
    )
    module = parse_module(text)
    bodies: dict[str, Any] = {
        "one": lambda x: (x,),
        "two": lambda x, y: (x,),
        "four": lambda a, b, c, d: (a, b, c, d),
        "a.none": lambda: (),
        "a.tensor": lambda t: (t,),
        "draw": lambda x: (x,),
    }
    communicators = {0: VirtualFabric().communicator(0)}
    return Executable(LinkedProgram(module, 0, bodies, communicators=communicators))


def measure(executable: Executable, repeats: int) -> list[float]:
    """Seconds of each of `repeats` executions, after a few to warm up."""
    inputs: Sequence[Any] = [None, torch.ones(1)]
    for _ in range(3):
        executable.run(inputs, poll_only)
    times = []
    for _ in range(repeats):
        began = perf_counter()
        executable.run(inputs, poll_only)
        times.append(perf_counter() - began)
    return times


def rows(instructions: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each case, and one for an empty program, in microseconds."""
    fixed = measure(program("", 0), max(repeats, 1000))
    base, least = statistics.median(fixed), min(fixed)
    found = [{"case": "empty program", "median_us": base * 1e6, "min_us": least * 1e6}]
    for case, line in CASES.items():
        times = measure(program(line, instructions), repeats)
        scale = 1e6 / instructions
        found.append(
            {
                "case": case,
                "median_us": (statistics.median(times) - base) * scale,
                "min_us": (min(times) - least) * scale,
            }
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--instructions", type=int, default=1000, help="ops in each program")
    parser.add_argument("--repeats", type=int, default=30, help="executions of each program")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    arguments = parser.parse_args()
    found = rows(arguments.instructions, arguments.repeats)
    if arguments.json:
        text = json.dumps({"instructions": arguments.instructions, "rows": found}, indent=1)
        arguments.json.write_text(text)
    print(f"{'µs per op':<32}{'median':>10}{'min':>10}")
    for row in found:
        print(f"{row['case']:<32}{row['median_us']:>10.3f}{row['min_us']:>10.3f}")


if __name__ == "__main__":
    main()
