"""The GPT of examples/train_gpt.py, over a paged cache."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers.masking_utils import causal_mask_function

import cg

from .attention import PagedCache, attend
from .pages import Pages
from .parts import KeyValues, Model, Ways
from .products import project
from .states import State, StateName
from .weights import Held, Weights, fill


@dataclass(frozen=True)
class GptConfig:
    """The shape of a GPT of examples/train_gpt.py; bytes are its vocabulary."""

    layers: int = 8
    width: int = 192
    heads: int = 6
    context: int = 128
    vocabulary: int = 256


class GptBlock(nn.Module):
    """A block with the parameters of train_gpt's, over a paged cache."""

    def __init__(self, config: GptConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor, cache: PagedCache) -> Tensor:
        rows, tokens, width = x.shape
        head = width // self.heads
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, head)
        query, key, value = qkv.transpose(1, 3).unbind(2)
        mixed = attend(query, *cache.update(key, value, self.layer), mask, head**-0.5, cache)
        x = x + self.out(mixed.reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GptPart(nn.Module):
    """Blocks of the GPT, with the names that its checkpoints use."""

    def __init__(self, config: GptConfig, layers: range) -> None:
        super().__init__()
        self.states: dict[StateName, State] = {}
        self.goes_on = True
        if layers.start == 0:
            self.tokens = nn.Embedding(config.vocabulary, config.width)
            self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleDict({str(layer): GptBlock(config, layer) for layer in layers})
        if layers.stop == config.layers:
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor, positions: Tensor, pages: Pages, last: Tensor | None) -> Tensor:
        """Apply the part, as `Part` says."""
        cache = PagedCache(pages)
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.positions(positions)
        mask = cache.mask(causal_mask_function, x.dtype)
        for block in self.blocks.values():
            x = block(x, mask, cache)
        if not hasattr(self, "head"):
            return x
        if last is not None:
            x = x.gather(1, last[:, :, None].expand(-1, -1, x.shape[-1]))
        return self.head(self.norm(x))


def gpt(config: GptConfig, weights: Weights) -> Model:
    """The model of a configuration and weights."""

    def build(layers: range, dtype: torch.dtype, ways: Ways) -> nn.Module:
        with torch.device("meta"):
            part = GptPart(config, layers)
        fill(part, weights, dtype)
        if ways.ranks == 1:
            project(part)
        return part

    def plan(layers: range, experts: str | None) -> Any:
        rows, columns = cg.cut(0, "tp"), cg.cut(1, "tp")
        cuts = {
            "*.qkv.*": cg.cut(0, "tp", blocks=3),
            "*.up.*": rows,
            "*.out.weight|*.down.weight": columns,
        }
        cuts |= {"*.tokens.weight": rows} if layers.start == 0 else {}
        cuts |= {"*.head.weight": rows} if layers.stop == config.layers else {}
        return cg.plan(cuts)

    width = config.width // config.heads

    return Model(
        layers=config.layers,
        heads=config.heads,
        caches=dict.fromkeys(range(config.layers), KeyValues(config.heads, width, width)),
        states={},
        hidden=config.width,
        context=config.context,
        vocabulary=config.vocabulary,
        layer=12 * config.width**2,
        eos=(),
        build=build,
        plan=plan,
    )


def read_checkpoint(folder: Path) -> tuple[GptConfig, Weights]:
    """Read the newest checkpoint in a folder; its tensors give the shape of the model."""
    path = folder / (folder / "latest").read_text()
    manifest = json.loads((path / "manifest.json").read_text())
    tensors: dict[str, Tensor] = {}
    for name in manifest["actors"]:
        # Mapped: a rank reads the pages of its own layers only. On the host, wherever it was made.
        file = path / f"{name}.pt"
        tensors |= torch.load(file, map_location="cpu", mmap=True, weights_only=True)["model"]
    vocabulary, width = tensors["tokens.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    config = GptConfig(layers, width, context=len(tensors["positions.weight"]))
    return replace(config, vocabulary=vocabulary), Held(tensors)
