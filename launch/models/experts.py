"""Mixtures of experts of transformers, computed by products that any trace and any mesh takes."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...tracer.method.experts.expert_products import expert_linear
from .adapted import AdaptedWeight, adapt_by_products

IMPLEMENTATION = "cg"
"""Its name among transformers' implementations of experts."""

_DEFAULTS = (None, "eager", "grouped_mm")
"""What transformers chooses by itself. Another implementation is the user's choice."""


@runtime_checkable
class _ChoosesExperts(Protocol):
    """A model that computes experts in one of several ways, as those of transformers do."""

    config: Any

    def set_experts_implementation(self, experts_implementation: str) -> None: ...
    def _can_set_experts_implementation(self) -> bool: ...


@runtime_checkable
class StackedExperts(Protocol):
    """A module with the weights of all experts, stacked, and how they lie."""

    config: Any
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool


@runtime_checkable
class _Multiplying(Protocol):
    """A module that stands for a stacked weight, which is quantized, and multiplies by it."""

    dtype: torch.dtype

    def expert_product(self, rows: Tensor, ids: Tensor) -> Tensor: ...


def choose_experts(model: nn.Module, name: str | None) -> None:
    """Set by which implementation a model's mixtures of experts are computed.

    The defaults of transformers loop over the experts that the data chooses, or sort the rows of
    the whole batch, and so need all of it on each rank. `IMPLEMENTATION` takes their place; its
    values are the same. A model that is not of transformers, or has no such experts, or computes
    them in another way than by these defaults, is left as it is.

    Args:
        name: of the implementation; None takes the place of defaults alone.

    Raises:
        ValueError: there is no such implementation, or the model has no such experts.
    """
    _choose(model, name)
    adapt_by_products(model, _takes_adapters)


def has_other_experts(model: nn.Module) -> bool:
    """True if a model has mixtures of experts that it computes in another way than it could."""
    return any(
        module.config._experts_implementation != IMPLEMENTATION for module in _mixtures(model)
    )


def _mixtures(model: nn.Module) -> list[_ChoosesExperts]:
    """The modules of a model that can be told how to compute experts."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _ChoosesExperts) and module._can_set_experts_implementation()
    ]


def _takes_adapters(module: nn.Module) -> bool:
    """True for a module of experts that `_forward` computes."""
    return (
        isinstance(module, StackedExperts)
        and module.config._experts_implementation == IMPLEMENTATION
    )


def _choose(model: nn.Module, name: str | None) -> None:
    mixtures = _mixtures(model)
    if not mixtures:
        if name is None:
            return
        raise ValueError(
            f"experts='{name}' is asked for, and {type(model).__name__} has no experts of "
            "transformers that can be computed in several ways; leave it out"
        )
    names = _register()
    if name not in (None, *names):
        raise ValueError(f"there are no experts='{name}'; there are {', '.join(names)}")
    for module in mixtures:
        if name is not None or module.config._experts_implementation in _DEFAULTS:
            module.set_experts_implementation(name or IMPLEMENTATION)


def _register() -> list[str]:
    """Make the implementation known to transformers, which a user of its models has.

    Returns:
        The names of all implementations. "eager" is the model's own forward of its experts.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
    return sorted({"eager", *ALL_EXPERTS_FUNCTIONS})


def _forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of a module of experts, as transformers calls it.

    Args:
        module: has the weights of all experts, and says how they lie.
        hidden_states: `[tokens, width]`.
        top_k_index: integers `[tokens, k]`, the experts of each token.
        top_k_weights: `[tokens, k]`, by which their results are added up.
    """
    is_turned, has_bias = module.is_transposed, module.has_bias
    if module.has_gate:
        bias = module.gate_up_proj_bias if has_bias else None
        h = _project(hidden_states, module.gate_up_proj, bias, top_k_index, is_turned)
        h = module._apply_gate(h)
    else:
        bias = module.up_proj_bias if has_bias else None
        h = module.act_fn(_project(hidden_states, module.up_proj, bias, top_k_index, is_turned))
    bias = module.down_proj_bias if has_bias else None
    h = _project(h, module.down_proj, bias, top_k_index, is_turned)
    if vars(module).get("has_post_expert_norm", False):  # not known to older versions
        h = module.post_expert_norm(h)
    return (h * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def _project(
    rows: Tensor,
    weight: Tensor | _Multiplying | AdaptedWeight,
    bias: Tensor | None,
    ids: Tensor,
    is_turned: bool,
) -> Tensor:
    changes = weight.changes if isinstance(weight, AdaptedWeight) else ()
    plain = weight.weight if isinstance(weight, AdaptedWeight) else weight
    rows = rows.to(plain.dtype)
    if isinstance(plain, Tensor):
        result = expert_linear(rows, plain.transpose(1, 2) if is_turned else plain, ids)
    else:
        result = plain.expert_product(rows, ids)
    for change in changes:
        inner = expert_linear(rows, change.inward, ids)
        result = result + expert_linear(inner, change.outward, ids) * change.scaling
    return result if bias is None else result + _biases(rows, bias, ids)


_COLUMNS = 8
"""The least width of products that devices have a kernel for."""


def _biases(rows: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
    """The biases of the experts of each token, `[tokens, k, out]`: products with a first column.

    So rows of biases lie, and go, where the rows of other products do.
    """
    ones = functional.pad(rows.new_ones(len(ids), 1), (0, _COLUMNS - 1))
    return expert_linear(ones, functional.pad(bias.unsqueeze(-1), (0, _COLUMNS - 1)), ids)
