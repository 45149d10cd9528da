"""Choose the variant of a compiled step that fits the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from ...tracer.record.session.inputs import InputError, InputSpec
from ...tracer.values.specs import Leaf, ObjectSpec, TensorSpec, static_key

Chosen = tuple[int, Sequence[Any]]
"""A variant, and the values of the step's parameters."""

Select = Callable[[tuple[Any, ...], dict[str, Any]], Chosen]
"""Takes a call's positional and keyword arguments.

Raises:
    InputError: no variant fits.
"""


def selection(specs: Sequence[InputSpec]) -> Select:
    """A function that chooses among variants with these inputs, as fast as they allow."""
    if len(specs) > 1:
        return _Choice(specs).select
    (spec,) = specs
    flatten = spec.flatten
    count = len(spec.tree.leaves)
    objects = all(isinstance(leaf, ObjectSpec) for leaf in spec.tree.leaves)
    flat = tree_flatten(((0,) * count, {}))[1]

    if objects and flat == spec.tree.spec:

        def select(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Chosen:
            if kwargs or len(args) != count:
                return 0, flatten(args, kwargs)
            return 0, args

        return select
    return lambda args, kwargs: (0, flatten(args, kwargs))


class _Choice:
    def __init__(self, specs: Sequence[InputSpec]) -> None:
        self._specs = specs

    def select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Chosen:
        leaves, structure = tree_flatten((args, kwargs))
        for index, spec in enumerate(self._specs):
            same = structure == spec.tree.spec
            if same and all(map(_fits, spec.tree.leaves, leaves)):
                return index, spec.flatten(args, kwargs)
        return self._try_each(args, kwargs)

    def _try_each(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Chosen:
        """Choose for arguments that are given in another way than the step was traced with."""
        reasons = []
        for index, spec in enumerate(self._specs):
            try:
                return index, spec.flatten(args, kwargs)
            except InputError as error:
                reasons.append(f"  variant {index}: {error}")
        lines = "\n".join(reasons)
        raise InputError(
            f"no variant of {self._specs[0].step} was compiled for these arguments; add them to "
            f"lower_many():\n{lines}"
        )


def _fits(spec: Leaf, leaf: Any) -> bool:
    if isinstance(spec, TensorSpec):
        return (
            isinstance(leaf, torch.Tensor)
            and leaf.dtype is spec.dtype
            and tuple(leaf.shape) == spec.shape
        )
    if isinstance(spec, ObjectSpec):
        return True
    return static_key(leaf) == static_key(spec.value)
