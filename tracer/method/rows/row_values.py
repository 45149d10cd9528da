"""What stands for rows that the data chooses: how many they are is not known while tracing.

A `Universe` is a set of rows whose number is known, and says to which class each belongs. `Rows`
are values of those of one class. They are no tensors: a tree says how each row is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch

from ....ir.location import Location
from ...error_translation import current_location
from ...errors import UnknownRowsError

ROWS = 1009
"""The number of rows of a probe; a prime, so that no other dimension is taken for it."""

_REMEDY = (
    "shapes are static in a step: keep all elements, torch.where(mask, x, 0) instead of x[mask], "
    "and divide a mean by mask.sum(); or compute each row by itself, by linear layers, "
    "activations, sums and products, and put the results back where the rows are from. Where no "
    "gradient flows through the method, @cg.opaque calls it as it is"
)


def refusal(reason: str) -> UnknownRowsError:
    """The error for something that cannot be done with rows that the data chooses."""
    words = (
        "the shape of a result depends on the values of a tensor (nonzero, a boolean mask as "
        f"index, or numbers that it holds), and {reason}"
    )
    return UnknownRowsError(words, _REMEDY)


@dataclass(frozen=True, eq=False)
class Read:
    """A tensor that is read later, and must be then what it was.

    Attributes:
        tensor: the tensor.
        version: the number of writes to it so far.
    """

    tensor: torch.Tensor
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Read:
        return Read(tensor, tensor._version)

    def check(self) -> None:
        """Refuse a tensor that has been written to since."""
        if self.tensor._version != self.version:
            raise refusal("what they are computed from is written to before they are put back")


@dataclass(frozen=True, eq=False)
class Universe:
    """Rows of which each belongs to one class at most.

    Attributes:
        shape: of the rows.
        classes: how many there are.
        ids: integers of this shape, the class of each row; None if there is one class.
        mask: of this shape, whether a row belongs to the one class; None if there are several.
        read: the tensor that says so.
        loc: the user's line that takes the first rows of it.
    """

    shape: tuple[int, ...]
    classes: int
    read: Read
    ids: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    loc: Location | None = field(default_factory=lambda: current_location()[0])


@dataclass(frozen=True, eq=False)
class Source:
    """The rows of a tensor.

    Attributes:
        tensor: its first dimensions are dimensions of the universe.
        dims: these, ascending.
        units: how many dimensions of one element follow at the end.
    """

    tensor: torch.Tensor
    dims: tuple[int, ...]
    units: int = 0


@dataclass(frozen=True, eq=False)
class Applied:
    """A function that computes each row by itself.

    Attributes:
        name: of the function.
        function: called with tensors in the place of trees.
        args, kwargs: its arguments: trees, `OfClass`, tensors without rows, and plain values.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Item:
    """A result of a function with several.

    Attributes:
        of: the function.
        index: of the result.
    """

    of: Applied
    index: int


Tree: TypeAlias = Source | Applied | Item


@dataclass(frozen=True, eq=False)
class OfClass:
    """The part of a stack of tensors that belongs to a class.

    Attributes:
        stack: its first dimension is that of the classes.
        number: of the class.
        is_turned: whether the part, a matrix, is transposed.
    """

    stack: torch.Tensor
    number: int
    is_turned: bool = False


def _refused(self: object, *_: object) -> NoReturn:
    raise refusal("Python computes with them, or compares them, other than row by row")


_REFUSED: Any = _refused


class RowValue:
    """Anything that stands for rows which the data chooses, or for their number."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        raise refusal(f"{getattr(func, '__name__', func)} is not computed row by row")

    def __bool__(self) -> bool:
        raise refusal("a condition depends on them")

    def __iter__(self) -> Any:
        raise refusal("Python iterates over them")

    def __len__(self) -> int:
        raise refusal("Python asks how many they are")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise refusal(f"Tensor.{name} of them is read")

    def __getitem__(self, index: Any) -> Any:
        raise refusal("they are indexed")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _REFUSED
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _REFUSED
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _REFUSED
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = __invert__ = _REFUSED
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __abs__ = _REFUSED
    __hash__ = object.__hash__


class RowCount(RowValue):
    """The number of some rows.

    Args:
        counts: a tensor that has it, if one does.
        index: where.
        is_positive: whether it is not 0.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, counts: torch.Tensor | None = None, index: int = 0, is_positive: bool = False
    ) -> None:
        self.counts, self.index, self.is_positive = counts, index, is_positive

    def __eq__(self, other: object) -> bool:
        if self.is_positive and isinstance(other, int) and other == 0:
            return False
        raise self._unknown()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def item(self) -> RowCount:
        return self

    def _unknown(self, *_: object) -> Exception:
        return refusal(
            "Tensor.item() or Tensor.tolist() needs the value of a tensor, which is not known "
            "while tracing"
        )

    def __index__(self) -> int:
        raise self._unknown()

    def _refused(self, *_: object) -> NoReturn:
        raise self._unknown()

    __int__ = __float__ = __str__ = __repr__ = __format__ = __lt__ = __le__ = _refused
    __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refused
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __neg__ = _refused


@dataclass(eq=False)
class RowIndex(RowValue):
    """Where the rows of a class are along a dimension of their universe."""

    universe: Universe
    number: int
    dim: int

    def numel(self) -> RowCount:
        """How many rows there are: the class is one that has some."""
        return RowCount(is_positive=True)


@dataclass(eq=False)
class Rows(RowValue):
    """The values of the rows of a class.

    Attributes:
        universe, number: say which rows these are.
        tree: how they are computed.
        probe: of the meta device, of their type, with `ROWS` rows.
        reads: the tensors of which they are computed.
        apply: computes a function of them.
    """

    universe: Universe
    number: int
    tree: Tree
    probe: torch.Tensor
    reads: tuple[Read, ...]
    apply: Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any] = field(repr=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.probe.dtype

    @property
    def ndim(self) -> int:
        return self.probe.dim()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        method = getattr(torch.Tensor, name, None)
        if not callable(method):
            raise refusal(f"Tensor.{name} of them is read")
        return lambda *args, **kwargs: self.apply(name, method, (self, *args), kwargs)

    def _binary(self, name: str, other: Any) -> Any:
        return self.apply(name, getattr(operator, name), (self, other), {})

    def __add__(self, other: Any) -> Any:
        return self._binary("add", other)

    def __sub__(self, other: Any) -> Any:
        return self._binary("sub", other)

    def __mul__(self, other: Any) -> Any:
        return self._binary("mul", other)

    def __matmul__(self, other: Any) -> Any:
        return self._binary("matmul", other)

    def __neg__(self) -> Any:
        return self.apply("neg", operator.neg, (self,), {})

    __radd__, __rmul__ = __add__, __mul__
