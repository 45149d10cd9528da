"""Adapters that peft gives to stacked weights (`target_parameters`), as products of factors.

peft makes the sum of such a weight and its adapters for each forward. This sum is as large as all
experts, and its backward keeps it. Here tokens go through the weight and through the adapters, and
the results are added up: https://arxiv.org/abs/2106.09685. Values and parameters are those of peft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class _WithAdapters(Protocol):
    """A module of peft around one whose parameter has adapters; several are nested.

    From Python 3.12 on, `isinstance` looks at no attribute that a module finds by `__getattr__`, as
    it does its modules.

    Attributes:
        parameter_name: of the module's parameter.
        num_experts: the matrices that are stacked in it; 1 if it is one matrix.
        scaling: the number by which the product of an adapter's factors is multiplied.
        active_adapters: the names of those that count.
        disable_adapters, merged: true if none counts, or the parameter has them already.
    """

    parameter_name: str
    num_experts: int
    scaling: Mapping[str, float]
    active_adapters: list[str]
    disable_adapters: bool
    merged: bool
    forward: Callable[..., Any]

    def get_base_layer(self) -> nn.Module: ...
    def get_delta_weight(self, adapter_name: str) -> Tensor: ...


class _AdaptedModule(_WithAdapters, Protocol):
    """Such a module, and what it has modules for.

    Attributes:
        base_layer: the module, or another such wrapper of it.
        lora_A, lora_B: for each adapter, a layer whose weight has the factors of all matrices:
            `[experts * rank, in]`, expert by expert, and `[out, rank * experts]`, rank by rank.
    """

    base_layer: nn.Module
    lora_A: Mapping[str, nn.Linear]  # noqa: N815 (peft's name)
    lora_B: Mapping[str, nn.Linear]  # noqa: N815 (peft's name)


@dataclass(frozen=True)
class LowRank:
    """The factors of a change of stacked matrices: `scaling * outward @ inward` for each.

    Attributes:
        inward: `[experts, rank, in]`.
        outward: `[experts, out, rank]`.
        scaling: a number.
    """

    inward: Tensor
    outward: Tensor
    scaling: float


@dataclass(frozen=True)
class AdaptedWeight:
    """A stacked weight that is not changed, and the changes that are added to it.

    Attributes:
        weight: a tensor, or a module that stands for a quantized one.
        changes: of the matrices.
    """

    weight: Any
    changes: tuple[LowRank, ...]


def adapt_by_products(model: nn.Module, is_stacked: Callable[[nn.Module], bool]) -> None:
    """Have peft's wrappers of parameters give these, with their adapters, to the modules inside.

    Args:
        model: has such wrappers, or none. Nothing but their `forward` is changed.
        is_stacked: true for a module that takes an `AdaptedWeight` in the place of a stacked
            parameter. Others get the sum of the parameter and its adapters.
    """
    for module in model.modules():
        if isinstance(module, _WithAdapters):
            forward = _through_products if is_stacked(module.get_base_layer()) else _through_sum
            module.forward = MethodType(forward, module)


def _through_products(self: _AdaptedModule, *args: Any, **kwargs: Any) -> Any:
    """The forward of a wrapper of stacked weights."""
    with _replaced(self, lambda weight: AdaptedWeight(weight, tuple(_changes(self, weight)))):
        return self.base_layer(*args, **kwargs)


def _through_sum(self: _AdaptedModule, *args: Any, **kwargs: Any) -> Any:
    """The forward of a wrapper of any parameter, as peft computes it."""
    with _replaced(self, lambda weight: sum(map(self.get_delta_weight, _active(self)), weight)):
        return self.base_layer(*args, **kwargs)


@contextmanager
def _replaced(wrapper: _AdaptedModule, change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the `with` block, the wrapped module has another value in the parameter's place."""
    base, name = wrapper.get_base_layer(), wrapper.parameter_name
    # A quantized weight is a module of the wrapped one, whose parameters are looked at first.
    modules: dict[str, Any] = base._modules
    places: dict[str, Any] = base._parameters
    own = modules[name] if name in modules else places[name]
    if _active(wrapper):
        places[name] = change(own)
    try:
        yield
    finally:
        if name in modules:
            places.pop(name, None)
        else:
            places[name] = own


def _active(wrapper: _AdaptedModule) -> list[str]:
    """The names of the adapters that are to be added to the parameter."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def _changes(wrapper: _AdaptedModule, weight: Any) -> Iterator[LowRank]:
    for name in _active(wrapper):
        inward, outward = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
        by_rank = outward.reshape(len(outward), -1, wrapper.num_experts)
        yield LowRank(
            inward.reshape(wrapper.num_experts, -1, inward.shape[-1]).to(weight.dtype),
            by_rank.permute(2, 0, 1).to(weight.dtype),
            wrapper.scaling[name],
        )
