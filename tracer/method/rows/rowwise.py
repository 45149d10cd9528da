"""Functions that compute each row by itself, and what they compute of all rows.

Rows of other classes are zeros wherever they could be seen. Functions in the table have finite
derivatives there, so such a row, whose cotangent is zero, adds exact zeros to gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ...function_runs import Run
from ..experts.expert_products import EXPERT_LINEAR
from .row_values import (
    ROWS,
    Applied,
    Item,
    OfClass,
    Read,
    Rows,
    RowValue,
    Source,
    Tree,
    Universe,
    refusal,
)

_OF_ELEMENTS = frozenset(
    (
        *("gelu", "silu", "relu", "relu6", "sigmoid", "tanh", "softplus", "mish", "hardswish"),
        *("hardtanh", "leaky_relu", "elu", "selu", "celu", "logsigmoid", "softsign"),
        *("to", "type", "type_as", "float", "double", "half", "bfloat16"),
        *("clone", "contiguous", "detach", "neg", "add", "sub", "mul"),
    )
)
"""Functions that compute each element by itself, by name."""
_PRODUCTS = frozenset(("linear", "matmul", "mm"))
_NORMS = frozenset(("layer_norm", "rms_norm"))
"""Functions of the last dimensions, which are not that of rows."""
_OTHERS = _NORMS | {"dropout"}


def name_of(function: Any) -> str:
    """The name of a function of torch, without what marks it as an operator of Python."""
    name = str(getattr(function, "__name__", function))
    return name.removeprefix("__").removesuffix("__")


def apply(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of rows: rows again, and a tuple of them if it has several results.

    Raises:
        UnknownRowsError: it is not known to compute each row by itself.
    """
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RowValue)]
    first = next((value for value in inputs if isinstance(value, Rows)), None)
    if first is None or not all(_is_of(value, first) for value in inputs):
        raise refusal(f"{name} takes rows that are chosen in several ways")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise refusal("autocast chooses the types of what is computed of them")
    args, kwargs = _checked(name, args, kwargs, first)
    probe = _probe(function, args, kwargs)
    node = Applied(
        name,
        function,
        tree_map(_tree, args, is_leaf=_is_value),
        tree_map(_tree, kwargs, is_leaf=_is_value),
    )
    reads = _reads(tree_leaves((args, kwargs), is_leaf=_is_value))
    if isinstance(probe, (tuple, list)):
        return tuple(_rows(first, Item(node, i), part, reads) for i, part in enumerate(probe))
    return _rows(first, node, probe, reads)


def rows_of(universe: Universe, number: int, source: Source, features: Sequence[int]) -> Rows:
    """The rows of a tensor that belong to a class, with these dimensions besides."""
    probe = probe_of(features, source.tensor.dtype)
    like = Rows(universe, number, source, probe, (Read.of(source.tensor),), apply)
    return _rows(like, source, probe, like.reads)


def _reads(leaves: Sequence[Any]) -> tuple[Read, ...]:
    """The tensors that values read, each once."""
    reads: dict[int, Read] = {}
    for leaf in leaves:
        own: Sequence[Read] = ()
        if isinstance(leaf, Rows):
            own = leaf.reads
        elif isinstance(leaf, torch.Tensor | OfClass):
            own = (Read.of(leaf if isinstance(leaf, torch.Tensor) else leaf.stack),)
        reads |= {id(read.tensor): read for read in own if id(read.tensor) not in reads}
    return tuple(reads.values())


def _is_of(value: RowValue, first: Rows) -> bool:
    return (
        isinstance(value, Rows)
        and value.universe is first.universe
        and value.number == first.number
    )


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, RowValue | OfClass)


def _tree(leaf: Any) -> Any:
    return leaf.tree if isinstance(leaf, Rows) else leaf


def _rows(like: Rows, tree: Tree, probe: Any, reads: tuple[Read, ...]) -> Rows:
    if probe.dim() == 0 or probe.shape[0] != ROWS:
        raise refusal("a result has not one row for each of them")
    if not torch.is_grad_enabled():  # trees are computed later
        tree = Applied("detach", torch.detach, (tree,), {})
    return Rows(like.universe, like.number, tree, probe, reads, like.apply)


def _checked(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], first: Rows
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function, with dimensions that are counted from the last one.

    Raises:
        UnknownRowsError: called so, it does not compute each row by itself.
    """
    flags = [arg for arg in args[3 if name == "dropout" else 1 :] if isinstance(arg, bool)]
    if kwargs.get("inplace") or any(flags):
        raise refusal(f"{name} writes to them in place")
    if name in _OF_ELEMENTS:
        _check_dimensions(name, tree_leaves((args, kwargs)), first)
    elif name in _PRODUCTS:
        others = tree_leaves((args[1:], kwargs))
        if not isinstance(args[0], Rows) or any(isinstance(other, Rows) for other in others):
            raise refusal(f"{name} takes them as a matrix")
    elif name in ("view", "reshape"):
        sizes = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
        if not sizes or sizes[0] != -1:
            raise refusal(f"{name} does not keep their dimension by a -1")
        return (args[0], tuple(sizes)), kwargs
    elif name in ("chunk", "split", "unsqueeze"):
        dim = _from_last(name, args, kwargs, first)
        return (args[:1] if name == "unsqueeze" else args[:2]), {"dim": dim}
    elif name == "dropout":
        rate, training = _dropout(args, kwargs)
        if rate and training:
            raise refusal("dropout draws a number for each of them")
    elif name not in _OTHERS:
        raise refusal(f"{name} is not known to compute each row by itself")
    elif name in _NORMS and _eps(name, args, kwargs) == 0:
        raise refusal(f"{name} with an eps of 0 has no derivative at rows of zeros")
    return args, kwargs


def _eps(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    position = 4 if name == "layer_norm" else 3
    eps: float | None = kwargs.get("eps", args[position] if len(args) > position else None)
    return eps


def _check_dimensions(name: str, leaves: Sequence[Any], first: Rows) -> None:
    """Refuse operands that are not broadcast along the dimensions of each row alone."""
    for leaf in leaves:
        if isinstance(leaf, Rows) and leaf.ndim != first.ndim:
            raise refusal(f"{name} takes rows of {leaf.ndim} and of {first.ndim} dimensions")
        if isinstance(leaf, torch.Tensor | OfClass) and _dims(leaf) >= first.ndim:
            raise refusal(f"{name} takes a tensor that has rows as well")


def _from_last(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], first: Rows) -> int:
    """The dimension that a function of shapes is along, counted from the last one."""
    dim: int = kwargs.get("dim", args[-1] if name == "unsqueeze" or len(args) > 2 else 0)
    end = first.ndim + (name == "unsqueeze")
    dim = dim - end if dim >= 0 else dim
    if dim == -end:
        raise refusal(f"{name} is along their dimension")
    return dim


def _dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, bool]:
    named = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    return named.get("p", 0.5), named.get("training", True)


def _dims(value: torch.Tensor | OfClass) -> int:
    return value.dim() if isinstance(value, torch.Tensor) else value.stack.dim() - 1


def _probe(function: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function on tensors that hold nothing."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Rows):
            return leaf.probe
        if isinstance(leaf, OfClass):
            return _meta(leaf.stack.shape[1:][:: -1 if leaf.is_turned else 1], leaf.stack.dtype)
        return _meta(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf

    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        args, kwargs = tree_map(of, (args, kwargs), is_leaf=_is_value)
        return function(*args, **kwargs)


def _meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def probe_of(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The probe of rows with these further dimensions."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return _meta((ROWS, *shape), dtype)


def signature(tree: Any, key: Callable[[torch.Tensor], Any] = id) -> Any:
    """A key that is equal for trees that compute the same of the rows of their own classes.

    Args:
        tree: the tree.
        key: the key of a tensor in it.
    """
    if isinstance(tree, Source):
        return "source", key(tree.tensor), tree.dims, tree.units
    if isinstance(tree, Item):
        return "item", signature(tree.of, key), tree.index
    if isinstance(tree, Applied):
        named = sorted(tree.kwargs.items())
        args = signature(tree.args, key)
        return tree.name, args, tuple((name, signature(value, key)) for name, value in named)
    if isinstance(tree, OfClass):
        return "stack", key(tree.stack), tree.is_turned
    if isinstance(tree, (tuple, list)):
        return tuple(signature(part, key) for part in tree)
    return ("tensor", key(tree)) if isinstance(tree, torch.Tensor) else (type(tree), tree)


@dataclass(frozen=True)
class RowGroup:
    """Rows of some classes of a universe, which are computed alike.

    Attributes:
        universe: of the rows.
        ids: for each row its class; another one of these classes where it is of none of them.
        mask: whether a row is of these classes; None if all are.
        run: calls a function of torch.
        values: of trees so far, by id.
    """

    universe: Universe
    ids: torch.Tensor | None
    mask: torch.Tensor | None
    run: Run
    values: dict[int, tuple[Tree, Any]] = field(default_factory=dict)

    @staticmethod
    def of(universe: Universe, numbers: Collection[int], run: Run) -> RowGroup:
        """The rows of the classes with these numbers."""
        if universe.ids is None:
            return RowGroup(universe, None, universe.mask, run)
        if len(numbers) == universe.classes:
            return RowGroup(universe, universe.ids, None, run)
        first, last = min(numbers), max(numbers)
        ids, mask = universe.ids, None
        if len(numbers) == last - first + 1:
            mask = run(torch.ge, (ids, first), {})
            mask = run(torch.logical_and, (mask, run(torch.le, (ids, last), {})), {})
        else:
            for number in sorted(numbers):
                is_one = run(torch.eq, (ids, number), {})
                mask = is_one if mask is None else run(torch.logical_or, (mask, is_one), {})
        return RowGroup(universe, run(torch.where, (mask, ids, first), {}), mask, run)

    def value(self, tree: Any) -> Any:
        """A tree's tensor, whose first dimensions are those of the universe."""
        if isinstance(tree, Item):
            return self.value(tree.of)[tree.index]
        if not isinstance(tree, Source | Applied):
            return tree
        if id(tree) not in self.values:
            result = self._source(tree) if isinstance(tree, Source) else self._applied(tree)
            self.values[id(tree)] = tree, result
        return self.values[id(tree)][1]

    def _applied(self, tree: Applied) -> Any:
        if tree.name in _PRODUCTS:
            return self._product(tree)
        if tree.name in ("view", "reshape"):
            sizes = (*self.universe.shape, *tree.args[1][1:])
            return self.run(torch.reshape, (self.value(tree.args[0]), sizes), {})
        arguments, spec = tree_flatten((tree.args, tree.kwargs))
        values = [self.value(argument) for argument in arguments]
        trees = (v for a, v in zip(arguments, values, strict=True) if isinstance(a, Tree))
        dims = max(value.dim() for value in trees)
        own = [self._own(v, dims) if isinstance(v, OfClass) else v for v in values]
        args, kwargs = tree_unflatten(own, spec)
        return self.run(tree.function, args, kwargs)

    def _own(self, of_class: OfClass, dims: int) -> torch.Tensor:
        """For each row the part of its own class, with so many dimensions."""
        value: torch.Tensor = self.run(torch.Tensor.__getitem__, (of_class.stack, self.ids), {})
        for _ in range(dims - value.dim()):
            value = self.run(torch.unsqueeze, (value, len(self.universe.shape)), {})
        return value

    def kept(self, value: torch.Tensor) -> torch.Tensor:
        """Rows of these classes, and zeros in the place of others."""
        return value if self.mask is None else self.chosen(value, 0)

    def chosen(self, value: torch.Tensor, other: Any) -> torch.Tensor:
        """Rows of these classes, and those of another value in the place of others."""
        assert self.mask is not None
        mask = self.mask
        for _ in range(value.dim() - mask.dim()):
            mask = self.run(torch.unsqueeze, (mask, -1), {})
        result: torch.Tensor = self.run(torch.where, (mask, value, other), {})
        return result

    def _source(self, source: Source) -> torch.Tensor:
        tensor = source.tensor
        for dim in range(len(self.universe.shape)):
            if dim not in source.dims:
                tensor = self.run(torch.unsqueeze, (tensor, dim), {})
        features = tensor.shape[len(self.universe.shape) :]
        tensor = self.run(torch.Tensor.expand, (tensor, (*self.universe.shape, *features)), {})
        for _ in range(source.units):
            tensor = self.run(torch.unsqueeze, (tensor, -1), {})
        return self.kept(tensor)

    def _product(self, tree: Applied) -> torch.Tensor:
        names = ("input", "weight", "bias")
        operands = dict(zip(names, tree.args, strict=False)) | tree.kwargs
        weight, bias = operands.get("weight", operands.get("other")), operands.get("bias")
        if isinstance(weight, OfClass):
            value = self._with_own_weights(operands["input"], weight, tree.name == "linear")
        else:
            value = self.run(tree.function, (self.value(operands["input"]), weight), {})
        if bias is None:
            return value
        bias = self._own(bias, value.dim()) if isinstance(bias, OfClass) else bias
        result: torch.Tensor = self.run(torch.add, (value, bias), {})
        return result

    def _with_own_weights(self, rows: Tree, weight: OfClass, is_linear: bool) -> torch.Tensor:
        """The product of each row with the matrix of its class."""
        assert self.ids is not None
        stack, ids, shape = weight.stack, self.ids, self.universe.shape
        if stack.dim() != 3:
            raise refusal("they are multiplied by a stack that is not one of matrices")
        if is_linear == weight.is_turned:
            stack = self.run(torch.transpose, (stack, 1, 2), {})
        product: torch.Tensor
        is_all = self.mask is None and len(shape) == 2
        if is_all and isinstance(rows, Source) and (rows.dims, rows.units) == ((0,), 0):
            product = self.run(EXPERT_LINEAR, (rows.tensor, stack, ids), {})
            return product  # a token's row is the same for each of its choices
        value = self.value(rows)
        if value.dim() != len(shape) + 1:
            raise refusal("they have several dimensions besides, and are multiplied by matrices")
        if len(shape) != 2:
            ids = self.run(torch.reshape, (ids, (-1, 1)), {})
            value = self.run(torch.reshape, (value, (-1, 1, value.shape[-1])), {})
        product = self.run(EXPERT_LINEAR, (value, stack, ids), {})
        product = self.run(torch.reshape, (product, (*shape, product.shape[-1])), {})
        return product


def combined(universe: Universe, parts: Sequence[Rows], run: Run) -> torch.Tensor:
    """The values of the rows of all classes, each computed as its class is; others are zeros.

    Args:
        universe: of the rows.
        parts: the rows of some classes.
        run: calls a function of torch.
    """
    alike: dict[Any, tuple[Tree, list[int]]] = {}
    for rows in parts:
        for read in (universe.read, *rows.reads):
            read.check()
        alike.setdefault(signature(rows.tree), (rows.tree, []))[1].append(rows.number)
    result: torch.Tensor | None = None
    for tree, numbers in alike.values():
        group = RowGroup.of(universe, numbers, run)
        value = group.value(tree)
        result = group.kept(value) if result is None else group.chosen(value, result)
    assert result is not None
    return result
