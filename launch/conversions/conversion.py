"""The tensors that a model's library makes of those of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .composition import Composition


@dataclass(frozen=True)
class StoredType:
    """The shape and the element type of a stored tensor; None if torch has none such."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Conversion:
    """The tensors that a library makes of those of a folder, for a model.

    Attributes:
        compositions: the tensors that it makes, by their names in the model.
        ignored: the stored tensors that it does not use, and that folders of the model may have.
    """

    compositions: Mapping[str, Composition]
    ignored: frozenset[str]


def as_stored(stored: Mapping[str, StoredType]) -> Conversion:
    """The tensors of a folder as they are, without a library."""
    compositions = {name: Composition.of(name, tensor.shape) for name, tensor in stored.items()}
    return Conversion(compositions, frozenset())
