"""A Llama-shaped model in parts, how it is cut into stages, and what it costs in FLOPs.

The parts are plain modules: cg's actors and the stages of torch.distributed.pipelining are made of
the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a microbatch, which is one sequence."""

    layers: int = 16
    width: int = 4096
    heads: int = 32
    hidden: int = 11008
    vocabulary: int = 32000
    sequence: int = 2048

    @property
    def matrices(self) -> int:
        """Parameters of matrix products: layers and head, without the embedding and the norms."""
        layer = 4 * self.width**2 + 3 * self.width * self.hidden
        return self.layers * layer + self.vocabulary * self.width

    @property
    def flops(self) -> int:
        """Of a token, forward and backward: 6 for each parameter of a product, and attention.

        Attention counts as causal, half of the square: 2·2·(sequence/2)·width in the forward of a
        layer, three times that with the backward.
        """
        return 6 * self.matrices + 6 * self.layers * self.sequence * self.width


LLAMA = Shape()
SMALL = Shape(layers=8, width=64, heads=2, hidden=160, vocabulary=256, sequence=32)


class Layer(nn.Module):
    """A decoder layer: [batch, sequence, width] to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        width, hidden = shape.width, shape.hidden
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (
            linear(normed).view(batch, sequence, self.heads, -1).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotated(x: Tensor) -> Tensor:
    """The halves of the last dimension as complex numbers, times i."""
    one, other = x.chunk(2, dim=-1)
    return torch.cat((-other, one), dim=-1)


class Part(nn.Module):
    """Layers `layers` of the model, with the embedding if it begins there, the head if it ends.

    Weights depend on the seed and their place in the model, not on how it is cut.
    """

    def __init__(
        self, shape: Shape, layers: range, device: str, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = layers.start == 0, layers.stop == shape.layers
        with torch.device("meta"):
            self.layers = nn.ModuleDict({str(i): Layer(shape) for i in layers})
            if self.is_first:
                self.embedding = nn.Embedding(shape.vocabulary, shape.width)
            if self.is_last:
                self.norm = nn.RMSNorm(shape.width)
                self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.to(dtype).to_empty(device=device)
        for name, child in (*self.layers.items(), *self.named_children()):
            if child is not self.layers:
                _fill(child, int(name) if name.isdigit() else shape.layers + (name == "head"))
        size = shape.width // shape.heads
        rates = 10000.0 ** (-torch.arange(0, size, 2, device=device).float() / size)
        angles = torch.arange(shape.sequence, device=device).float()[:, None] * rates
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [batch, sequence] or activations in; activations or logits out."""
        if self.is_first:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x)) if self.is_last else x

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return cross_entropy(logits, targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """In float32, over [batch, sequence, vocabulary] and [batch, sequence]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _fill(module: nn.Module, seed: int) -> None:
    """Weights of a child: normal ones, and ones for norms."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or isinstance(module, nn.RMSNorm):
                parameter.fill_(1)
            else:
                parameter.normal_(std=0.02)


def batch(shape: Shape, microbatches: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and those that follow, int64 [microbatches, sequence]; the same on all ranks."""
    generator = torch.Generator().manual_seed(microbatches)
    size = (microbatches, shape.sequence + 1)
    tokens = torch.randint(shape.vocabulary, size, generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def forget_gradients(modules: Iterable[nn.Module]) -> None:
    """As before the first backward."""
    for module in modules:
        module.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Placing:
    """How the stages lie on ranks: in a line, several times around, or down and up again."""

    name: str
    ranks: tuple[int, ...]

    @staticmethod
    def make(name: str, ranks: int) -> Placing:
        line = tuple(range(ranks))
        return Placing(name, {"line": line, "loop": line * 2, "vee": line + line[::-1]}[name])

    def mine(self, rank: int) -> list[int]:
        """The stages of a rank."""
        return [stage for stage, home in enumerate(self.ranks) if home == rank]


Cut = tuple[range, ...]
"""The layers of each stage."""


def even(layers: int, stages: int) -> Cut:
    """As many layers for each stage."""
    bounds = [round(layers * i / stages) for i in range(stages + 1)]
    return tuple(range(a, b) for a, b in pairwise(bounds))


@dataclass(frozen=True)
class Weights:
    """The cost of parts, in milliseconds of forward and backward."""

    layer: float
    embedding: float
    head: float

    def of(self, cut: Cut) -> list[float]:
        """The cost of each stage."""
        costs = [len(layers) * self.layer for layers in cut]
        costs[0] += self.embedding
        costs[-1] += self.head
        return costs


def balanced(layers: int, placing: Placing, weights: Weights) -> Cut:
    """The cut whose busiest rank has least to do; among those, whose longest stage is shortest."""
    stages = len(placing.ranks)
    cuts = (
        tuple(range(a, b) for a, b in pairwise((0, *inner, layers)))
        for inner in combinations(range(1, layers), stages - 1)
    )
    return min(cuts, key=lambda cut: _burden(weights.of(cut), placing.ranks))


def _burden(costs: Sequence[float], ranks: Sequence[int]) -> tuple[float, float]:
    loads = [sum(c for c, home in zip(costs, ranks, strict=True) if home == r) for r in set(ranks)]
    # Differences beneath a microsecond are none.
    return round(max(loads), 3), round(max(costs), 3)
