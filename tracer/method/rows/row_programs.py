"""Follow a method that computes rows that the data chooses, and compute all rows instead.

Rows are taken in one of three ways, and put back in the same way:

- `x[mask]`, and `y[mask] = rows`;
- `x.split(counts.tolist())`, and `torch.cat(parts)`;
- in a loop over the classes that occur in a one-hot tensor, `for e in one_hot.sum(...) > 0` by
  `nonzero`: `token = torch.where(one_hot[e])`, `x[token]`, and `y.index_add_(0, token, rows)`.

In between each row is computed by itself, perhaps with the weights of its class, `weight[e]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from ...checked_ids import CHECKED_IDS
from ...function_runs import Run
from . import rowwise
from .class_loops import ClassIndex, ClassLoop, ClassMask, Occurring, OneHot
from .iterations import Iterations
from .row_values import (
    OfClass,
    Read,
    RowCount,
    RowIndex,
    Rows,
    RowValue,
    Source,
    Universe,
    refusal,
)
from .rowwise import name_of

UNHANDLED = object()
"""Stands for no answer."""


_PASSIVE = frozenset(
    (
        *("view", "reshape", "transpose", "t", "permute", "unsqueeze", "squeeze", "getitem"),
        *("get", "size", "dim", "numel", "is_floating_point", "_set_grad_enabled"),
    )
)
"""Functions of tensors without rows that an iteration over classes may call."""


class RowPrograms:
    """Answers the torch functions of a method that have to do with rows that the data chooses.

    Args:
        iterations: those of its loops over classes.
        is_constant: whether the values of a tensor follow from no input. A mask of which that is
            true chooses rows that are known.
    """

    def __init__(
        self,
        iterations: Iterations | None = None,
        is_constant: Callable[[torch.Tensor], bool] = lambda tensor: False,
    ) -> None:
        self._iterations = iterations or Iterations()
        self._is_constant = is_constant
        self._facts: dict[int, tuple[Read, Any]] = {}
        self._loop: ClassLoop | None = None
        self._universes: dict[int, Universe] = {}

    def answer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        """The result of a torch function; `UNHANDLED` if it has nothing to do with such rows."""
        name = name_of(function)
        if _hold_rows(args) or (kwargs and _hold_rows(kwargs.values())):
            return self._of_rows(name, function, args, kwargs, run)
        if self._loop is not None:
            return self._in_loop(name, function, args, kwargs, run)
        notice = _NOTICES.get(name)
        return UNHANDLED if notice is None else notice(self, function, args, kwargs, run)

    def _fact(self, tensor: Any) -> Any:
        """The fact known of a tensor, unless it has been written to since."""
        read, fact = self._facts.get(id(tensor), (None, None))
        return fact if read is not None and read.version == tensor._version else None

    def _know(self, tensor: torch.Tensor, fact: Any) -> torch.Tensor:
        self._facts[id(tensor)] = Read.of(tensor), fact
        return tensor

    def _enter(self, loop: ClassLoop | None) -> None:
        if loop is not None and self._loop is not None:
            raise refusal("a loop over classes is inside of another one")
        self._loop = loop

    # -- tensors that rows come from -------------------------------------------------------------

    def _one_hot(self, function: Any, args: Any, kwargs: Any, run: Run) -> Any:
        named = dict(zip(("input", "num_classes"), args, strict=False)) | kwargs
        ids, classes = named.get("tensor", named.get("input")), named.get("num_classes", -1)
        is_tensor = isinstance(ids, torch.Tensor)
        if is_tensor and classes > 0 and not self._is_constant(ids):
            checked = run(CHECKED_IDS, (ids, classes, None, "one_hot"), {})
            result = run(function, (checked, classes), {})
        else:
            result = run(function, args, kwargs)
        if is_tensor:
            dims = (*range(ids.dim()), -1)
            fact = OneHot(ids, result.shape[-1], dims, Read.of(ids))
            self._know(result, fact)
        return result

    def _permute(self, function: Any, args: Any, kwargs: Any, run: Run) -> Any:
        fact = self._fact(args[0])
        if not isinstance(fact, OneHot) or kwargs:
            return UNHANDLED
        order = args[1] if len(args) == 2 else args[1:]
        dims = tuple(fact.dims[dim] for dim in order)
        return self._know(run(function, args, kwargs), replace(fact, dims=dims))

    def _sum(self, function: Any, args: Any, kwargs: Any, run: Run) -> Any:
        fact = self._fact(args[0])
        if not isinstance(fact, OneHot) or fact.dims[0] != -1:
            return UNHANDLED
        dims = kwargs.get("dim", args[1] if len(args) == 2 else None)
        count = len(fact.dims)
        if not isinstance(dims, tuple | list) or {d % count for d in dims} != set(range(1, count)):
            return UNHANDLED
        return self._know(run(function, args, kwargs), Occurring(fact, is_count=True))

    def _greater(self, function: Any, args: Any, kwargs: Any, run: Run) -> Any:
        fact = self._fact(args[0])
        if not isinstance(fact, Occurring) or not fact.is_count or args[1:] != (0,) or kwargs:
            return UNHANDLED
        return self._know(run(function, args, kwargs), Occurring(fact.one_hot, is_count=False))

    def _nonzero(self, function: Any, args: Any, kwargs: Any, run: Run) -> Any:
        fact = self._fact(args[0])
        if not isinstance(fact, Occurring) or kwargs.get("as_tuple") or len(args) > 1:
            return UNHANDLED
        one_hot = fact.one_hot
        shape = tuple(one_hot.ids.shape)
        universe = Universe(shape, one_hot.classes, one_hot.read, ids=one_hot.ids)
        return ClassLoop(one_hot, universe, self._enter, self._iterations)

    def _getitem(self, function: Any, args: Any, kwargs: Any, run: Run) -> Any:
        tensor, index = args
        known = self._known_places(index, run)
        if known is not None:
            return run(function, (tensor, known), kwargs)
        if _is_mask(index):
            return self._masked(tensor, index)
        if type(index) is int and tensor.dim() and 0 <= index < tensor.shape[0]:
            return self._know(run(function, args, kwargs), OfClass(tensor, index))
        return UNHANDLED

    def _setitem(self, function: Any, args: Any, kwargs: Any, run: Run) -> Any:
        tensor, index, value = args
        if not isinstance(value, torch.Tensor) or not value.dim():
            return UNHANDLED
        known = self._known_places(index, run)
        return UNHANDLED if known is None else run(function, (tensor, known, value), kwargs)

    def _known_places(self, index: Any, run: Run) -> tuple[Any, ...] | None:
        """An index with numbers for its masks, if it has some and all are constant; else None."""
        parts = index if isinstance(index, tuple) else (index,)
        masks = [part for part in parts if _is_mask(part)]
        if not masks or not all(map(self._is_constant, masks)):
            return None
        places: list[Any] = []
        for part in parts:
            is_mask = _is_mask(part)
            places += (
                run(torch.unbind, (run(torch.nonzero, (part,), {}), 1), {}) if is_mask else [part]
            )
        return tuple(places)

    def _masked(self, tensor: torch.Tensor, mask: torch.Tensor) -> Any:
        """The rows that a mask chooses."""
        dims = mask.dim()
        if tensor.shape[:dims] != mask.shape:
            return UNHANDLED  # which raises
        universe = self._universes.get(id(mask))
        if universe is None or universe.read.version != mask._version:
            universe = Universe(tuple(mask.shape), 1, Read.of(mask), mask=mask)
            self._universes[id(mask)] = universe
        source = Source(tensor, tuple(range(dims)))
        return rowwise.rows_of(universe, 0, source, tensor.shape[dims:])

    def _unbind(self, function: Any, args: Any, kwargs: Any, run: Run) -> Any:
        """The numbers of `tolist`, which a fake tensor takes out of its elements."""
        counts = args[0]
        if counts.dim() != 1 or counts.is_floating_point() or not _is_in_tolist(sys._getframe(1)):
            return UNHANDLED
        return tuple(RowCount(counts, index) for index in range(len(counts)))

    # -- rows ------------------------------------------------------------------------------------

    def _of_rows(self, name: str, function: Any, args: Any, kwargs: Any, run: Run) -> Any:
        take = _TAKES.get(name)
        result = UNHANDLED if take is None else take(self, args, kwargs, run)
        if result is not UNHANDLED:
            return result
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RowValue))
        if not isinstance(first, Rows):
            raise refusal(f"{name} takes a {type(first).__name__}")

        def of_class(leaf: Any) -> Any:
            fact = self._fact(leaf) if isinstance(leaf, torch.Tensor) else None
            is_own = isinstance(fact, OfClass) and fact.number == first.number
            return fact if is_own and first.universe.ids is not None else leaf

        args, kwargs = tree_map(of_class, (args, kwargs))
        return rowwise.apply(name, function, args, kwargs)

    def _split(self, args: Any, kwargs: Any, run: Run) -> Any:
        tensor = args[0]
        counts: Any = args[1] if len(args) > 1 else kwargs.get("split_size")
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        if not isinstance(tensor, torch.Tensor) or not _are_counts(counts) or dim != 0:
            return UNHANDLED
        numbers: torch.Tensor = counts[0].counts
        rows, key = tensor.shape[0], id(numbers)
        universe = self._universes.get(key)
        is_other = universe is None or universe.read.version != numbers._version
        if universe is None or is_other or universe.shape != (rows,):
            ends = run(torch.cumsum, (numbers, 0), {})
            is_whole = run(torch.eq, (run(torch.Tensor.__getitem__, (ends, -1), {}), rows), {})
            message = f"split takes counts that do not add up to {rows} rows"
            run(torch._assert_async, (is_whole, message), {})
            places = run(torch.arange, (rows,), {"device": tensor.device})
            ids = run(torch.searchsorted, (ends, places), {"right": True})
            universe = Universe((rows,), len(counts), Read.of(numbers), ids=ids)
            self._universes[key] = universe
        source, features = Source(tensor, (0,)), tensor.shape[1:]
        return tuple(
            rowwise.rows_of(universe, number, source, features)
            for number in range(universe.classes)
        )

    def _cat(self, args: Any, kwargs: Any, run: Run) -> Any:
        parts = args[0]
        first = parts[0]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if not all(isinstance(part, Rows) for part in parts) or dim != 0:
            return UNHANDLED
        universe = first.universe
        in_order = [part.number for part in parts] == list(range(universe.classes))
        is_split = universe.ids is not None and len(universe.shape) == 1 and self._loop is None
        if not in_order or not is_split or any(part.universe is not universe for part in parts):
            raise refusal("cat joins others than all parts of one split, in order")
        return rowwise.combined(universe, parts, run)

    def _where(self, args: Any, kwargs: Any, run: Run) -> Any:
        mask = args[0]
        if not isinstance(mask, ClassMask) or len(args) > 1 or kwargs:
            return UNHANDLED
        loop = self._own(mask.loop)
        return tuple(RowIndex(loop.universe, loop.number, dim) for dim in loop.one_hot.dims[1:])

    def _own(self, loop: ClassLoop) -> ClassLoop:
        if loop is not self._loop:
            raise refusal("they are used behind the loop over their classes")
        return loop

    def _take(self, args: Any, kwargs: Any, run: Run) -> Any:
        tensor, index = args
        if isinstance(index, ClassIndex):
            return self._of_class(tensor, self._own(index.loop), index.number, run)
        places = index if isinstance(index, tuple) else (index,)
        rows = [place for place in places if isinstance(place, RowIndex)]
        units = places[len(rows) :]
        loop = self._loop
        if not isinstance(tensor, torch.Tensor) or loop is None or any(units):
            return UNHANDLED
        if any(type(unit) is not type(None) for unit in units) or not rows:
            return UNHANDLED
        dims = tuple(place.dim for place in rows)
        shape = tuple(loop.universe.shape[dim] for dim in dims)
        if any((r.universe, r.number) != (loop.universe, loop.number) for r in rows):
            raise refusal("they are used behind the loop over their classes")
        axes = sorted(range(len(dims)), key=dims.__getitem__)
        if tensor.shape[: len(dims)] != shape or len(set(dims)) != len(dims):
            raise refusal("a tensor has not one row for each of them and of all others")
        features = tensor.shape[len(dims) :]
        if axes != list(range(len(dims))):
            tensor = run(torch.permute, (tensor, (*axes, *range(len(dims), tensor.dim()))), {})
        source = Source(tensor, tuple(sorted(dims)), len(units))
        return rowwise.rows_of(loop.universe, loop.number, source, (*features, *(1 for _ in units)))

    def _of_class(self, tensor: Any, loop: ClassLoop, number: int, run: Run) -> Any:
        """The part of a tensor that belongs to the class of an iteration."""
        if self._fact(tensor) is loop.one_hot:
            return ClassMask(loop)
        part = run(torch.Tensor.__getitem__, (tensor, min(number, tensor.shape[0] - 1)), {})
        self._iterations.name(part, "part", (tensor, number))
        return self._know(part, OfClass(tensor, number))

    def _put(self, args: Any, kwargs: Any, run: Run) -> Any:
        tensor, mask, rows = args
        universe = self._universes.get(id(mask))
        if universe is None or not isinstance(rows, Rows) or rows.universe is not universe:
            raise refusal("they are put back by another mask")
        for read in (universe.read, *rows.reads):
            read.check()
        if tensor.shape != (*universe.shape, *rows.probe.shape[1:]):
            raise refusal("a tensor has not one row for each of them and of all others")
        if tensor.dtype != rows.dtype:
            raise refusal(f"rows of {rows.dtype} are put into {tensor.dtype}")
        group = rowwise.RowGroup.of(universe, (0,), run)
        chosen = group.chosen(group.value(rows.tree), tensor)
        run(torch.Tensor.copy_, (tensor, chosen), {})
        return None

    def _add(self, args: Any, kwargs: Any, run: Run) -> Any:
        tensor, dim, index, rows = (*args, *(kwargs.get(k) for k in ("index", "source")))[:4]
        loop = self._loop
        if dim != 0 or kwargs or loop is None or not isinstance(tensor, torch.Tensor):
            return UNHANDLED
        if not isinstance(index, RowIndex) or not isinstance(rows, Rows):
            return UNHANDLED
        here = (loop.universe, loop.number)
        if (index.universe, index.number) != here or (rows.universe, rows.number) != here:
            raise refusal("they are used behind the loop over their classes")
        if tensor.shape != (loop.universe.shape[index.dim], *rows.probe.shape[1:]):
            raise refusal("a tensor has not one row for each of them and of all others")
        if tensor.dtype != rows.dtype:
            raise refusal(f"index_add_ takes {rows.dtype} to add to {tensor.dtype}")
        loop.added.append((tensor, index.dim, rows))
        return tensor

    # -- what else an iteration does -------------------------------------------------------------

    def _in_loop(self, name: str, function: Any, args: Any, kwargs: Any, run: Run) -> Any:
        """A function of tensors without rows, in an iteration over classes."""
        loop, tensor = self._loop, args[0] if args else None
        assert loop is not None
        if name not in _PASSIVE:
            raise refusal(f"an iteration over their classes calls {name}, for no rows")
        if not isinstance(tensor, torch.Tensor):
            return UNHANDLED
        if name == "getitem" and type(args[1]) is int and args[1] == loop.number:
            return self._of_class(tensor, loop, loop.number, run)
        if name == "get":
            return self._property(function, tensor, run)
        others = tree_leaves((args[1:], kwargs))
        if not all(isinstance(other, int | slice | type(None)) for other in others):
            return self._iterations.name(run(function, args, kwargs), name, args)
        key = (name, id(tensor), str((args[1:], kwargs)))
        if key not in loop.views:  # one for all iterations, so that these are alike
            result = self._iterations.name(run(function, args, kwargs), name, args)
            loop.views[key] = tensor, result
        return loop.views[key][1]

    def _property(self, function: Any, tensor: torch.Tensor, run: Run) -> Any:
        result = run(function, (tensor,), {})
        fact = self._fact(tensor)
        is_turned = isinstance(result, torch.Tensor) and result.dim() == 2
        if is_turned and isinstance(fact, OfClass) and function in _TURNS:
            self._know(result, OfClass(fact.stack, fact.number, not fact.is_turned))
        return self._iterations.name(result, "property", (tensor,))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() > 0


def _hold_rows(arguments: Iterable[Any]) -> bool:
    """True if a `RowValue` is among arguments, or in their tuples, lists and dicts.

    Every torch function of a method is asked, and torch's own walk takes ten times as long.
    """
    for argument in arguments:
        if isinstance(argument, RowValue):
            return True
        if isinstance(argument, tuple | list):
            if _hold_rows(argument):
                return True
        elif isinstance(argument, dict) and _hold_rows(argument.values()):
            return True
    return False


def _is_in_tolist(frame: FrameType | None) -> bool:
    for _ in range(8):
        if frame is None or frame.f_code is FakeTensor.tolist.__code__:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is FakeTensor.tolist.__code__


def _are_counts(counts: Any) -> bool:
    """True if numbers are all those of one tensor, in order."""
    return (
        isinstance(counts, tuple | list)
        and bool(counts)
        and all(isinstance(c, RowCount) and c.counts is counts[0].counts for c in counts)
        and counts[0].counts is not None
        and [c.index for c in counts] == list(range(len(counts[0].counts)))
    )


_T: Any = torch.Tensor
_TURNS = (_T.T.__get__, _T.mT.__get__)
_NOTICES: dict[str, Callable[..., Any]] = {
    "one_hot": RowPrograms._one_hot,
    "permute": RowPrograms._permute,
    "sum": RowPrograms._sum,
    "greater": RowPrograms._greater,
    "gt": RowPrograms._greater,
    "nonzero": RowPrograms._nonzero,
    "getitem": RowPrograms._getitem,
    "setitem": RowPrograms._setitem,
    "unbind": RowPrograms._unbind,
}
"""Functions of tensors of which rows come, by name."""
_TAKES: dict[str, Callable[..., Any]] = {
    "split": RowPrograms._split,
    "cat": RowPrograms._cat,
    "where": RowPrograms._where,
    "getitem": RowPrograms._take,
    "setitem": RowPrograms._put,
    "index_add_": RowPrograms._add,
}
"""Functions that take rows of a tensor, or put them back, by name."""
