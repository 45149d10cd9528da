"""A model and a part of it, as the engine knows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .pages import Pages
from .states import State, StateName, bytes_of


class Part(Protocol):
    """Some layers of a model, as a module.

    Attributes:
        states: that its layers keep of a sequence.
        goes_on: whether a chunk of several tokens goes on with the states of its sequence, and not
            with keys and values alone.
    """

    states: Mapping[StateName, State]
    goes_on: bool

    def __call__(self, x: Tensor, positions: Tensor, pages: Pages, last: Tensor | None) -> Tensor:
        """Apply the part.

        Args:
            x: ids int64 [rows, tokens] for the first part; else what the part before gives.
            positions: int64 [rows, tokens].
            pages: where keys and values go, and states.
            last: int64 [rows, asked], the tokens of each row whose logits the last part gives;
                None: all.

        Returns:
            The input of the next part; of the last part, logits [rows, asked, vocabulary].
        """
        ...


@dataclass(frozen=True)
class Ways:
    """How many ranks share a part.

    Attributes:
        tp: each with a part of its heads, of its hidden units and of the vocabulary.
        ep: times `tp` ranks, each with a part of its experts.
        cp: times these, each with a part of a sequence's keys and values, and of a chunk's tokens.
    """

    tp: int = 1
    ep: int = 1
    cp: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.tp * self.ep * self.cp


@dataclass(frozen=True)
class KeyValues:
    """The heads of keys and values that a layer keeps of a token.

    Attributes:
        groups: heads of keys and values.
        key, value: the width of a head.
    """

    groups: int
    key: int
    value: int


@dataclass(frozen=True)
class Quantized:
    """The weights of layers that stay quantized.

    Attributes:
        numbers: that the tensors of a layer stand for, on average of all layers.
        bytes: of these tensors, scales included.
    """

    numbers: int
    bytes: int


def _bytes(numbers: int, quantized: Quantized | None, dtype: torch.dtype) -> int:
    """Bytes of weights, of which some stay quantized."""
    if quantized is None:
        return numbers * dtype.itemsize
    return (numbers - quantized.numbers) * dtype.itemsize + quantized.bytes


@dataclass(frozen=True)
class Experts:
    """The experts of a model's layers, which ranks can share.

    Attributes:
        count: of a layer; the fewest, if layers have several numbers of them.
        numbers: in the weights of a layer's experts, on average of all layers.
        quantized: those of them that stay quantized; None if there are none.
    """

    count: int
    numbers: int
    quantized: Quantized | None = None

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the experts of one layer, on average.

        Args:
            dtype: of weights that are not quantized.
        """
        return _bytes(self.numbers, self.quantized, dtype)


@dataclass(frozen=True)
class Model:
    """A model, as the engine needs to know it.

    Attributes:
        layers: how many.
        heads: the most heads of queries of a layer.
        caches: what each layer that keeps keys and values keeps, by its number.
        states: that layers keep of a sequence, in float32.
        hidden: the width of a layer's output.
        context: the longest sequence.
        vocabulary: the number of tokens.
        layer: numbers in the weights of one layer, on average.
        eos: the tokens that end a sequence.
        build: makes the part with these layers, with its weights, for ranks that share it.
        plan: how the ranks of an axis `tp` share the tensors of the part with these layers, and
            those of an axis, if one is named, its experts.
        experts: None if it has none.
        adapters: how many it is served with.
        quantized: None if no weight stays quantized.
    """

    layers: int
    heads: int
    caches: Mapping[int, KeyValues]
    states: Mapping[StateName, State]
    hidden: int
    context: int
    vocabulary: int
    layer: int
    eos: tuple[int, ...]
    build: Callable[[range, torch.dtype, Ways], nn.Module]
    plan: Callable[[range, str | None], Any]
    experts: Experts | None = None
    adapters: int = 0
    quantized: Quantized | None = None

    def layer_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights of one layer, on average.

        Args:
            dtype: of those that are not quantized.
        """
        return _bytes(self.layer, self.quantized, dtype)

    @property
    def groups(self) -> int:
        """The number of parts into which the heads of keys of every layer can be cut."""
        return math.gcd(*(kept.groups for kept in self.caches.values())) or 1

    @property
    def most_groups(self) -> int:
        """The most heads of keys of a layer; 0 if none keeps any."""
        return max((kept.groups for kept in self.caches.values()), default=0)

    @property
    def width(self) -> int:
        """The greatest width of a head."""
        return max((max(kept.key, kept.value) for kept in self.caches.values()), default=1)

    @property
    def entry(self) -> int:
        """The most numbers that a layer keeps of a token; 0 if none keeps any."""
        entries = (kept.groups * (kept.key + kept.value) for kept in self.caches.values())
        return max(entries, default=0)

    @property
    def state(self) -> int:
        """The most bytes of states that a layer keeps of a sequence; 0 if none keeps any."""
        layers = {name.layer for name in self.states}
        return max((bytes_of(self.states, (layer,)) for layer in layers), default=0)
