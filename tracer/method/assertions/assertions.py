"""Turn `assert` statements on the values of tensors into operators that check them when they run.

While a method is traced, no value is known. An assertion needs none of them to go on: it only has
to hold. So a number that is taken out of a tensor inside of one stands for the tensor, comparisons
of it are tensors, and where Python asks whether such a tensor is true, the trace notes a check.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import operator
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch

from ....ir.location import Location
from ...function_runs import Run

_Position: TypeAlias = tuple[int | None, int | None, int | None, int | None]
_ORDERING = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)


class AssertedNumber:
    """The value of a tensor, in an assertion: it can be compared with numbers, and nothing else.

    Args:
        tensor: of one element.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def _compare(self, compare: Callable[[Any, Any], Any], other: Any) -> Any:
        if isinstance(other, AssertedNumber):
            other = other._tensor.reshape(())
        value = self._tensor.reshape(())
        if isinstance(other, float) and not value.is_complex():
            value = value.to(torch.float64)  # a Python number has this precision
        return compare(value, other)

    def __bool__(self) -> bool:
        raise TypeError("in an assertion, the value of a tensor can only be compared")

    def __lt__(self, other: Any) -> Any:
        return self._compare(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._compare(operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(operator.ge, other)

    def __eq__(self, other: Any) -> Any:
        return self._compare(operator.eq, other)

    def __ne__(self, other: Any) -> Any:
        return self._compare(operator.ne, other)


def asserted(
    function: Any, args: tuple[Any, ...], frame: FrameType, run: Run
) -> AssertedNumber | bool | None:
    """The answer to a call that needs the value of a tensor; None if it is in no assertion.

    A number counts in a comparison that an assertion makes, by itself or with others by `and`. What
    Python asks a tensor counts if an assertion fails where it is false.

    Args:
        function: `Tensor.item` or `Tensor.__bool__`, or any other.
        args: its arguments.
        frame: the code that calls it.
        run: calls a torch function, for the graph.
    """
    if function not in (torch.Tensor.item, torch.Tensor.__bool__):
        return None
    tensor = args[0]
    if tensor.numel() != 1 or not _is_in_assertion(frame, function is torch.Tensor.__bool__):
        return None
    if function is torch.Tensor.item:
        return AssertedNumber(tensor)
    where = Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    line = linecache.getline(where.file, where.line).strip()
    run(torch._assert_async, (tensor, f"an assertion does not hold, at {where}: {line}"), {})
    return True


def _is_in_assertion(frame: FrameType, decides: bool) -> bool:
    """True if a frame computes a condition of an `assert`, or a side of a comparison in one.

    Args:
        frame: the frame.
        decides: whether it asks if a condition holds, and not for a side.
    """
    code, at = frame.f_code, frame.f_lasti
    if decides:
        return at in _deciding(code)
    places = _sides("".join(linecache.getlines(code.co_filename)))
    return list(code.co_positions())[at // 2] in places


_IDLE = ("NOP", "CACHE", "EXTENDED_ARG", "POP_TOP", "NOT_TAKEN")
"""Instructions on the way from a jump to what fails; of a chained comparison a value is dropped."""


@functools.lru_cache(maxsize=256)
def _deciding(code: CodeType) -> frozenset[int]:
    """The offsets of instructions that ask a value, and fail an `assert` where it is false."""
    rows = list(dis.get_instructions(code))
    index = {row.offset: i for i, row in enumerate(rows)}

    def fails(i: int) -> bool:
        """True if Python raises the `AssertionError` of an `assert` from an instruction on."""
        while i < len(rows) and (rows[i].opname in _IDLE or rows[i].opname == "JUMP_FORWARD"):
            i = index[rows[i].argval] if rows[i].opname == "JUMP_FORWARD" else i + 1
        return i < len(rows) and rows[i].opname == "LOAD_ASSERTION_ERROR"

    offsets = set()
    for i, row in enumerate(rows):
        if "POP_JUMP" not in row.opname or not row.opname.endswith(("IF_TRUE", "IF_FALSE")):
            continue
        if fails(index[row.argval] if row.opname.endswith("IF_FALSE") else i + 1):
            before = rows[i - 1]
            offsets |= {row.offset, before.offset} if before.opname == "TO_BOOL" else {row.offset}
    return frozenset(offsets)


@functools.lru_cache(maxsize=64)
def _sides(text: str) -> frozenset[_Position]:
    """The places of what the `assert`s in a file compare."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a file that has been changed
        return frozenset()
    asserts = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    tests = [test for condition in asserts for test in _comparisons(condition)]
    sides = [side for test in tests for side in (test.left, *test.comparators)]
    return frozenset(map(_position, sides))


def _position(part: ast.expr) -> _Position:
    return part.lineno, part.end_lineno, part.col_offset, part.end_col_offset


def _comparisons(test: ast.expr) -> Iterator[ast.Compare]:
    """The comparisons that must all be true if a condition is to hold."""
    match test:
        case ast.BoolOp(op=ast.And()):
            for value in test.values:
                yield from _comparisons(value)
        case ast.Compare():
            if all(isinstance(op, _ORDERING) for op in test.ops):
                yield test
