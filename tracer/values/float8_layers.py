"""Linear layers whose products are of float8: which layers, and how tensors are scaled for it.

The recipes are torchao's "tensorwise" and "rowwise", `Float8LinearConfig.from_recipe_name` in
`torchao/float8/config.py`. Their reasons are in Micikevicius et al., FP8 Formats for Deep Learning,
2022.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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
        skip: patterns of names of modules that they leave as they are, where an actor has them.
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


@dataclass(frozen=True, eq=False)
class Float8Use:
    """The layers of an actor that compute in float8, and what traces have seen of them.

    Attributes:
        layers: of the actor's plan.
        multiplied: the paths of the weights that layers have multiplied in float8 so far.
    """

    layers: tuple[Float8Layers, ...]
    multiplied: set[str] = field(default_factory=set)

    def recipes(self, tensors: Iterable[StateTensor]) -> dict[str, Float8Recipe]:
        """The recipes of the actor's weights, by path."""
        return choose(self.layers, tensors).recipes

    def describe(self, actor: str, tensors: Iterable[StateTensor]) -> list[str]:
        """A line for each matrix that the plan names: how it is multiplied, or why it is not."""
        choice = choose(self.layers, tensors)
        lines = {path: f"is left as it is: {reason}" for path, reason in choice.left.items()}
        for path, recipe in choice.recipes.items():
            idle = "is left as it is: no linear layer of the traced methods takes it"
            lines[path] = f"in float8, {recipe.value}" if path in self.multiplied else idle
        return [f"{actor}.{path} {line}" for path, line in lines.items()]


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


def unsupported(layers: Iterable[Float8Layers], capability: tuple[int, int]) -> str | None:
    """The reason why a CUDA device of a compute capability cannot compute layers, or None."""
    for each in layers:
        needed = (9, 0) if each.recipe is Float8Recipe.ROWWISE else (8, 9)
        if capability < needed:
            have, need = (".".join(map(str, version)) for version in (capability, needed))
            return (
                f"'{each.recipe.value}' needs compute capability {need}, and this device has {have}"
            )
    return None


def check_named(layers: Iterable[Float8Layers], cls: type, tensors: Iterable[StateTensor]) -> None:
    """Refuse patterns that name no module with a matrix: a misspelt one would change nothing.

    Args:
        layers: of an actor's plan.
        cls: the actor's class, for messages.
        tensors: its state.

    Raises:
        ValueError: a pattern names none.
    """
    paths = [slot.path for tensor in tensors if len(tensor.shape) == 2 for slot in tensor.slots]
    modules = [path.rpartition(".")[0] for path in paths]
    for each in layers:
        for pattern in each.patterns:
            if not _matches((pattern,), modules):
                shown = ", ".join(modules[:8]) + (", ..." if len(modules) > 8 else "")
                raise ValueError(
                    f"cg.float8: '{pattern}' names no module of {cls.__name__} that has a matrix; "
                    f"those that have one are {shown or 'none'}"
                )
