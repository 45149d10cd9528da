"""The instructions: closures over a list of registers, as short as they can be.

An instruction takes nothing and returns whether it is done; one that is not is called again later.
Whatever can be looked up or decided when it is made is not left to its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ...ir.types import TensorType
from ..base import Body, Boxed, Port
from ..dtypes import TORCH_DTYPES

Instruction = Callable[[], bool]
Registers = list[Any]


def filled(
    type_: TensorType, fill: float | int | bool, device: torch.device | None = None
) -> Callable[[], Tensor]:
    """Make a function that makes tensors of `type_` filled with `fill`."""
    dtype, shape = TORCH_DTYPES[type_.dtype], type_.shape
    return lambda: torch.full(shape, fill, dtype=dtype, device=device)


def store(registers: Registers, target: int, make: Callable[[], Any]) -> Instruction:
    """Write the value that `make` makes."""

    def run() -> bool:
        registers[target] = make()
        return True

    return run


def store_all(
    registers: Registers, targets: Sequence[int], make: Callable[[], Sequence[Any]]
) -> Instruction:
    """Write the values that `make` makes to registers side by side."""
    first, last = targets[0], targets[0] + len(targets)

    def run() -> bool:
        registers[first:last] = make()
        return True

    return run


def move(registers: Registers, source: int, target: int) -> Instruction:
    """Write what a register holds to another."""

    def run() -> bool:
        registers[target] = registers[source]
        return True

    return run


def copy_into(registers: Registers, source: int, buffer: int, target: int) -> Instruction:
    """Copy a tensor into a buffer, and write the buffer."""

    def run() -> bool:
        registers[target] = registers[buffer].copy_(registers[source])
        return True

    return run


def apply(
    registers: Registers, source: int, target: int, function: Callable[[Any], Any]
) -> Instruction:
    """Write `function` of a register to another."""

    def run() -> bool:
        registers[target] = function(registers[source])
        return True

    return run


def gathered(
    registers: Registers,
    sources: Sequence[int],
    target: int,
    function: Callable[[Sequence[Any]], Any],
) -> Instruction:
    """Write `function` of several registers to another."""
    get = getter(sources)

    def run() -> bool:
        registers[target] = function(get(registers))
        return True

    return run


def both(first: Instruction, second: Instruction) -> Instruction:
    """Two instructions that never wait, as one."""

    def run() -> bool:
        first()
        return second()

    return run


def view(
    registers: Registers, source: int, target: int, dim: int, start: int, length: int
) -> Instruction:
    """Write a part of a tensor, which shares its storage."""

    def run() -> bool:
        registers[target] = registers[source].narrow(dim, start, length)
        return True

    return run


def clear(registers: Registers, target: int) -> Instruction:
    """Drop what a register holds."""

    def run() -> bool:
        registers[target] = None
        return True

    return run


def issue(port: Port, registers: Registers, source: int | None) -> Instruction:
    """Start a communication op, with the operand in register `source` if it has one."""
    start = port.start
    if source is None:

        def run_alone() -> bool:
            start(None)
            return True

        return run_alone

    def run() -> bool:
        start(registers[source])
        return True

    return run


def issue_all(port: Port, registers: Registers, sources: Sequence[int]) -> Instruction:
    """Start a communication op; it takes several operands as a tuple."""
    if len(sources) < 2:
        return issue(port, registers, sources[0] if sources else None)
    start, get = port.start, getter(sources)

    def run() -> bool:
        start(get(registers))
        return True

    return run


def wait(port: Port, registers: Registers, target: int) -> Instruction:
    """Poll a communication op; once it is complete, write its value."""
    poll, take = port.poll, port.take

    def run() -> bool:
        if poll():
            registers[target] = take()
            return True
        return False

    return run


def release(port: Port) -> Instruction:
    """Give a port's buffer back."""
    give_back = port.release

    def run() -> bool:
        give_back()
        return True

    return run


def call(
    body: Body, registers: Registers, inputs: Sequence[int], outputs: Sequence[int]
) -> Instruction:
    """Call `body`; for the common arities without packing a tuple."""
    if len(outputs) == 1:
        return _call_for_one(body, registers, inputs, outputs[0])
    get = getter(inputs)
    count = len(outputs)
    first = outputs[0] if outputs else 0
    last = first + count

    def run() -> bool:
        results = body(*get(registers))
        if len(results) != count:
            raise ValueError(f"the function returned {len(results)} values instead of {count}")
        registers[first:last] = results
        return True

    return run


def call_boxed(
    body: Boxed,
    registers: Registers,
    inputs: Sequence[int],
    outputs: Sequence[int],
    emptied: Sequence[int],
) -> Instruction:
    """Call `body` with its inputs in a list; the registers of `emptied` are emptied before."""
    get = getter(inputs)
    count = len(outputs)
    first = outputs[0] if outputs else 0
    last = first + count

    def run() -> bool:
        values = [*get(registers)]
        for register in emptied:
            registers[register] = None
        results = body(values)
        if len(results) != count:
            raise ValueError(f"the function returned {len(results)} values instead of {count}")
        registers[first:last] = results
        return True

    return run


def _call_for_one(
    body: Body, registers: Registers, inputs: Sequence[int], target: int
) -> Instruction:
    if len(inputs) == 1:
        (source,) = inputs

        def run() -> bool:
            registers[target] = _only(body(registers[source]))
            return True

        return run
    if len(inputs) == 2:
        left, right = inputs

        def run_two() -> bool:
            registers[target] = _only(body(registers[left], registers[right]))
            return True

        return run_two
    get = getter(inputs)

    def run_many() -> bool:
        registers[target] = _only(body(*get(registers)))
        return True

    return run_many


def _only(results: Sequence[Any]) -> Any:
    """The only result, without the iterator that unpacking would make."""
    if len(results) != 1:
        raise ValueError(f"the function returned {len(results)} values instead of 1")
    return results[0]


def getter(indices: Sequence[int]) -> Callable[[Registers], tuple[Any, ...]]:
    """Make a function that reads several registers into a tuple."""
    if not indices:
        return lambda registers: ()
    if len(indices) == 1:
        (index,) = indices
        return lambda registers: (registers[index],)
    return itemgetter(*indices)
