"""Find the sources that the tensors of a run depend on, by watching its operators.

A run on fake tensors computes nothing. The sources of a tensor are the bits of an int. They are
kept for the tensor, since a view of a tensor may have others than what it is a view of; what is
written in place is kept for the memory, which all views share. Operators that use nothing but the
shape of a tensor do not make their result depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...tracer.method.constants.constant_values import ConstantValues
from ...tracer.method.experts.expert_products import static_form
from ...tracer.values.operators import written_values

_OF_SHAPE_ALONE = frozenset(
    {
        "empty_like",
        "full_like",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "rand_like",
        "randint_like",
        "randn_like",
        "zeros_like",
    }
)
"""Operators whose result holds nothing of the tensor that they are given."""


class Dependence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches operators; counts their floating-point operations, and follows what depends on what.

    Attributes:
        flops: of all operators so far, as torch's counter counts them.
        read: the sources of all operands so far.
        inside: sources that are added to each result that depends on something.
        random: sources of random numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.read = self.inside = self.random = 0
        self._constants = ConstantValues()
        self._own: dict[int, tuple[int, int]] = {}  # of a tensor, with the time when it was set
        self._views: dict[int, int] = {}  # of all views of a memory
        self._writes: dict[int, list[tuple[int, int]]] = {}  # into a memory, with their times
        self._time = 0
        self._alive: list[torch.Tensor] = []  # so that no number is given out again

    def sources_of(self, value: Any) -> int:
        """The sources that the tensors of a pytree depend on."""
        sources = 0
        for tensor in _tensors(value):
            memory = _memory(tensor)
            since, own = self._own.get(id(tensor), (-1, self._views.get(memory, 0)))
            sources |= own
            for time, written in self._writes.get(memory, ()):
                sources |= written if time > since else 0
        return sources

    def set_sources(self, tensor: torch.Tensor, sources: int) -> None:
        """Set the sources of a tensor, but not those of other views of its memory."""
        self._alive.append(tensor)
        self._own[id(tensor)] = self._time, sources
        memory = _memory(tensor)
        self._views[memory] = self._views.get(memory, 0) | sources

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func, args, kwargs = self._constants.static_form(*static_form(func, args, kwargs or {}))
        results = func(*args, **kwargs)
        self._constants.note(func, args, kwargs, results, written_values(func, args, kwargs))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=results))
        sources = self._random_of(func)
        if func.overloadpacket.__name__ not in _OF_SHAPE_ALONE:
            operands = self.sources_of((args, kwargs))
            self.read |= operands
            sources |= operands
        if sources:
            sources |= self.inside
        written = [a for a, s in zip(args, func._schema.arguments, strict=False) if _is_written(s)]
        self._time += 1
        for tensor in _tensors(written):
            self._writes.setdefault(_memory(tensor), []).append((self._time, sources))
        for tensor in _tensors(results):
            if not any(tensor is other for other in _tensors(written)):
                self.set_sources(tensor, sources)
        return results

    def _random_of(self, func: Any) -> int:
        return self.random if torch.Tag.nondeterministic_seeded in func.tags else 0


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
