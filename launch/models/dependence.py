"""Find the parameters and layers that the tensors of a run depend on, by watching its operators.

A run on fake tensors computes nothing. The sources of a tensor are kept for its storage, as the
bits of an int. Operators that use nothing but the shape of a tensor do not make their result depend
on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...tracer.method.experts.expert_products import static_form

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
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._sources: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # so that no number is given out again
        self.read = 0

    def sources_of(self, value: Any) -> int:
        """The sources that the tensors of a pytree depend on."""
        sources = 0
        for tensor in _tensors(value):
            sources |= self._sources.get(_key(tensor), 0)
        return sources

    def set_sources(self, value: Any, sources: int) -> None:
        """Set the sources that the tensors of a pytree depend on."""
        for tensor in _tensors(value):
            self._keep(tensor)
            self._sources[_key(tensor)] = sources

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func, args, kwargs = static_form(func, args, kwargs or {})
        results = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=results))
        if func.overloadpacket.__name__ in _OF_SHAPE_ALONE:
            return results
        sources = self.sources_of((args, kwargs))
        self.read |= sources
        written = [a for a, s in zip(args, func._schema.arguments, strict=False) if _is_written(s)]
        if sources:
            for tensor in _tensors((results, written)):
                self._keep(tensor)
                key = _key(tensor)
                self._sources[key] = self._sources.get(key, 0) | sources
        return results

    def _keep(self, tensor: torch.Tensor) -> None:
        if _key(tensor) not in self._sources:
            self._alive.append(tensor.untyped_storage())


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
