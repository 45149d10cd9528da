"""Linear layers whose products are of float8: which layers, and how tensors are scaled for it.

The recipes are torchao's "tensorwise" and "rowwise", `Float8LinearConfig.from_recipe_name` in
`torchao/float8/config.py`. Their reasons are in Micikevicius et al., FP8 Formats for Deep Learning,
2022.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

import torch

from .actor_state import StateTensor

ALIGNMENT = 16
"""The sizes of a weight are multiples of it: `torch._scaled_mm` takes no others."""

_KINDS = (torch.float32, torch.bfloat16, torch.float16)


class Float8Recipe(Enum):
    """How tensors are scaled to float8, and in which types."""

    TENSORWISE = "tensorwise"
    """One scale for a tensor. Gradients are e5m2, all else e4m3."""

    ROWWISE = "rowwise"
    """A scale for each row along the dimension that a product contracts, rounded down to a power
    of 2. All is e4m3, and products are rounded to bfloat16."""

    @property
    def gradient(self) -> torch.dtype:
        """The type of the gradients of a layer's result."""
        is_row = self is Float8Recipe.ROWWISE
        return torch.float8_e4m3fn if is_row else torch.float8_e5m2

    @property
    def fast_gradients(self) -> bool:
        """Whether products of gradients accumulate as fast as those of the forward.

        The kernels of row-wise scales are fast only so.
        """
        return self is Float8Recipe.ROWWISE


@dataclass(frozen=True, slots=True)
class Float8Layers:
    """The layers that one `cg.float8` names.

    Attributes:
        patterns: patterns of names of modules.
        recipe: how they compute.
        skip: patterns of names of modules that they leave as they are.
    """

    patterns: tuple[str, ...]
    recipe: Float8Recipe
    skip: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Python that names the layers."""
        skip = f", skip={list(self.skip)}" if self.skip else ""
        names = ", ".join(f'"{pattern}"' for pattern in self.patterns)
        return f'cg.float8({names}, recipe="{self.recipe.value}"{skip})'


@dataclass(frozen=True)
class Float8Choice:
    """The weights of an actor that are multiplied in float8, and those that are not.

    Attributes:
        recipes: the recipe of each weight that is, by path.
        left: the reason for each weight that a pattern names and that is not, by path.
    """

    recipes: dict[str, Float8Recipe]
    left: dict[str, str]


def choose(layers: Iterable[Float8Layers], tensors: Iterable[StateTensor]) -> Float8Choice:
    """Choose the weights of an actor.

    Args:
        layers: of the actor's plan; the first that names a module counts.
        tensors: the actor's state.
    """
    chosen = Float8Choice({}, {})
    for tensor in tensors:
        names = [slot.path.rpartition(".")[0] for slot in tensor.slots]
        named = next((each for each in layers if _matches(each.patterns, names)), None)
        if named is None or len(tensor.shape) != 2:
            continue
        reason = _reason(named, names, tensor)
        if reason is None:
            chosen.recipes[tensor.path] = named.recipe
        else:
            chosen.left[tensor.path] = reason
    return chosen


def _matches(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _reason(layers: Float8Layers, names: list[str], tensor: StateTensor) -> str | None:
    """Why a weight is left as it is; None if it is not."""
    if _matches(layers.skip, names):
        return "skip= names it"
    if tensor.tensor.dtype not in _KINDS:
        return f"it is of {tensor.tensor.dtype}"
    if any(size % ALIGNMENT for size in tensor.shape):
        sizes = " x ".join(map(str, tensor.shape))
        return f"its sizes, {sizes}, are no multiples of {ALIGNMENT}"
    return None


def unmatched(layers: Iterable[Float8Layers], tensors: Iterable[StateTensor]) -> str | None:
    """A pattern that names no module with a matrix among an actor's state; None if all do."""
    modules = {
        slot.path.rpartition(".")[0]
        for tensor in tensors
        if len(tensor.shape) == 2
        for slot in tensor.slots
    }
    for each in layers:
        for pattern in (*each.patterns, *each.skip):
            if not _matches((pattern,), modules):
                return pattern
    return None
