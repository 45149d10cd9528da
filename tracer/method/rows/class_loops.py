"""Loops over the classes that occur in a one-hot tensor: one iteration for each class there is.

The rows that iterations add to tensors are added for all classes at once behind the loop. So an
iteration must do nothing else: for a class that does not occur, plain Python would not run it.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from ...function_runs import run_plainly
from ...values.operators import storage_key
from . import rowwise
from .iterations import Iterations
from .row_values import Read, Rows, RowValue, Universe, refusal


@dataclass(frozen=True, eq=False)
class OneHot:
    """A tensor is one-hot, along the dimension `dims.index(-1)`.

    Attributes:
        ids: the classes.
        classes: how many there are.
        dims: for each dimension of the tensor that of the ids; -1 for the classes.
        read: the ids, as they were.
    """

    ids: torch.Tensor
    classes: int
    dims: tuple[int, ...]
    read: Read


@dataclass(frozen=True, eq=False)
class Occurring:
    """A tensor says for each class how often it occurs, or whether it does."""

    one_hot: OneHot
    is_count: bool


@dataclass(eq=False)
class ClassIndex(RowValue):
    """The number of the class of an iteration."""

    loop: ClassLoop
    number: int

    def __getitem__(self, index: int) -> ClassIndex:
        if index != 0:
            raise refusal("a class is a vector of one number")
        return self

    def item(self) -> int:
        return self.number

    def __int__(self) -> int:
        return self.number

    __index__ = __int__

    def _compare(self, compare: Callable[[int, int], bool], other: object) -> bool:
        if not isinstance(other, int | ClassIndex):
            raise refusal("a class is compared with something else than a number")
        return compare(self.number, int(other))

    def __eq__(self, other: object) -> bool:
        return self._compare(operator.eq, other)

    def __ne__(self, other: object) -> bool:
        return self._compare(operator.ne, other)

    def __lt__(self, other: object) -> bool:
        return self._compare(operator.lt, other)

    def __le__(self, other: object) -> bool:
        return self._compare(operator.le, other)

    def __gt__(self, other: object) -> bool:
        return self._compare(operator.gt, other)

    def __ge__(self, other: object) -> bool:
        return self._compare(operator.ge, other)

    __hash__ = RowValue.__hash__


@dataclass(eq=False)
class ClassMask(RowValue):
    """Which rows are of the class of an iteration."""

    loop: ClassLoop

    def squeeze(self, dim: int) -> ClassMask:
        if self.loop.mask_shape[dim] == 1:
            raise refusal("a dimension of one row is taken away")
        return self


@dataclass(eq=False)
class ClassLoop(RowValue):
    """The classes that occur; a loop over them runs once for each class that there is.

    The rows that iterations add to tensors are added for all classes together at the end.
    """

    one_hot: OneHot
    universe: Universe
    enter: Callable[[ClassLoop | None], None]
    iterations: Iterations
    number: int = -1
    added: list[tuple[torch.Tensor, int, Rows]] = field(default_factory=list)
    views: dict[Any, Any] = field(default_factory=dict)

    @property
    def mask_shape(self) -> tuple[int, ...]:
        return tuple(self.universe.shape[dim] for dim in self.one_hot.dims[1:])

    def __iter__(self) -> Iterator[ClassIndex]:
        frame = sys._getframe(1)
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] not in ("GET_ITER", "FOR_ITER"):
            raise refusal("Python counts the classes that occur")
        return self._iterate(frame)

    def _iterate(self, frame: FrameType) -> Iterator[ClassIndex]:
        with self.iterations.of_loop(self.one_hot.classes) as numbers:
            yield from self._run(frame, numbers)
            self._add()

    def _run(self, frame: FrameType, numbers: Sequence[int]) -> Iterator[ClassIndex]:
        before = _numbers(frame)
        is_left = True
        self.enter(self)
        try:
            for number in numbers:
                self.number = number
                yield ClassIndex(self, number)
                now = _numbers(frame)
                changed = [name for name, value in before.items() if now.get(name) != value]
                if changed:
                    raise refusal(f"each iteration over classes changes '{changed[0]}'")
            is_left = False
        finally:
            self.enter(None)
            if is_left:
                refusal("a loop over classes is left before its end")  # it is noted

    def _add(self) -> None:
        """Add the rows of all classes to the tensors to which the iterations have added some."""
        targets: dict[tuple[int, int], tuple[torch.Tensor, list[Rows]]] = {}
        written = {storage_key(tensor) for tensor, _, _ in self.added}
        for tensor, dim, rows in self.added:
            if any(
                storage_key(read.tensor) in written for read in (self.universe.read, *rows.reads)
            ):
                raise refusal("an iteration reads a tensor to which iterations add rows")
            _, parts = targets.setdefault((id(tensor), dim), (tensor, []))
            if any(rows.number == part.number for part in parts):
                raise refusal("an iteration adds rows twice to one tensor")
            parts.append(rows)
            computed = rowwise.signature(rows.tree, self.iterations.words)
            self.iterations.note(rows.number, (self.iterations.words(tensor), dim, computed))
        for (_, dim), (tensor, parts) in targets.items():
            values = rowwise.combined(self.universe, parts, run_plainly)
            others = tuple(d for d in range(len(self.universe.shape)) if d != dim)
            tensor.add_(values.sum(others) if others else values)


def _numbers(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame that hold plain numbers, and how much is in those with more."""
    values = frame.f_locals.items()
    numbers = {name: value for name, value in values if isinstance(value, int | float)}
    return numbers | {name: len(v) for name, v in values if isinstance(v, list | dict | set)}
