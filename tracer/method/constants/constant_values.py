"""The values of tensors that follow from no input, such as causal masks and positions.

A trace runs on fakes, which have shapes and hold nothing. But what operators compute of Python's
numbers alone is the same in every execution. Where the shape of a result is the number of such
values that are not 0, they are computed, and the operator is traced with that number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ...values.operators import is_random, storage_key

LIFTS = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift"})
"""Operators that `torch.tensor([...])` applies to the numbers it was given."""

_ATEN = torch.ops.aten
_CPU = torch.device("cpu")


@dataclass(eq=False)
class _ConstantCall:
    """A call of an operator on constants.

    Attributes:
        tensor: what it gives; it is kept, so that no other tensor gets its id.
        position: that of the tensor among the results.
        value: of the tensor, if it was computed.
    """

    tensor: torch.Tensor
    operator: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: int
    value: torch.Tensor | None = None


class ConstantValues:
    """The tensors of a run that follow from no input; it is told of each operator.

    They are integers and booleans, which all devices compute alike, and nothing is written to them
    in place.

    Attributes:
        asked: how often the values of a tensor were needed.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._calls: dict[int, _ConstantCall] = {}
        self._written: set[int | None] = set()

    def static_form(
        self, operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]:
        """A call of an operator, or of one that gives the same in a shape that is known."""
        if operator is not _ATEN.nonzero.default:
            return operator, args, kwargs
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            value = self._value(args[0])
            if value is None:
                return operator, args, kwargs
            size = int(value.count_nonzero())
        self.asked += 1
        return _ATEN.nonzero_static.default, args, {"size": size}

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are known."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            return self._value(tensor) is not None

    def note(
        self,
        operator: torch._ops.OpOverload,
        args: Any,
        kwargs: Any,
        results: Any,
        written: Iterable[Any],
    ) -> None:
        """Note a call of an operator, and what it has given; `written` is what it writes to."""
        writes = any(isinstance(value, torch.Tensor) for value in written)
        if writes or not _is_exact(operator, args, kwargs, results):
            return
        lifts = operator._schema.name in LIFTS
        if all(lifts or id(tensor) in self._calls for tensor in _tensors((args, kwargs))):
            for position, tensor in enumerate(_tensors(results)):
                call = _ConstantCall(tensor, operator, args, kwargs, position)
                self._calls.setdefault(id(tensor), call)

    def note_write(self, memory: int | None) -> None:
        """Note a write to memory, which `storage_key` gives."""
        self._written.add(memory)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor; None if they follow from an input, or were written to."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        call = self._calls.get(id(tensor))
        if call is None or storage_key(tensor) in self._written:
            return None
        if call.value is None:
            arguments = call.args, call.kwargs
            if any(self._value(operand) is None for operand in _tensors(arguments)):
                return None
            args, kwargs = tree_map_only(torch.Tensor, self._value, arguments)
            args, kwargs = tree_map_only(torch.device, lambda _: _CPU, (args, kwargs))
            call.value = list(_tensors(call.operator(*args, **kwargs)))[call.position]
        return call.value


def _is_exact(operator: torch._ops.OpOverload, args: Any, kwargs: Any, results: Any) -> bool:
    """Whether a call gives integers or booleans that its arguments alone determine."""
    return (
        not any(t.is_floating_point() or t.is_complex() for t in _tensors(results))
        and operator.namespace in ("aten", "prims")
        and "empty" not in operator._schema.name
        and not is_random(operator, args, kwargs)
    )


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    if isinstance(values, torch.Tensor):  # as most operators give
        return (values,)
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
