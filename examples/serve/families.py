"""Models that can be served, layer by layer: transformers' decoders, and examples/train_gpt.py's.

A model is cut into parts. A part has some of the layers, the embedding if they are the first, the
norm and the head if they are the last. It reads its own weights and no others.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

import cg

from ..weight_files import refuse_quantized
from .attention import Pages, attend
from .layers import FIXED_TURNS, RmsNorm, merge, turns

log = logging.getLogger("serve")


class Part(Protocol):
    """Some layers of a model, as a module."""

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Map ids [rows, tokens] to the input of the first layer, [rows, tokens, width]."""
        ...

    def run(self, hidden: Tensor, positions: Tensor, pages: Pages) -> Tensor:
        """Apply the layers: [rows, tokens, width] to the same."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Map outputs of the last layer for some tokens to logits, [rows, vocabulary]."""
        ...


@dataclass(frozen=True)
class Model:
    """A model, as the engine needs to know it.

    Attributes:
        layers: how many.
        heads, groups: how many heads of queries there are, and of keys and values.
        width: of a head.
        hidden: the width of a layer's output.
        context: the longest sequence.
        vocabulary: the number of tokens.
        layer: numbers in the weights of one layer.
        eos: the tokens that end a sequence.
        build: makes the part with these layers, with its weights.
        cuts: how ranks that hold some layers together share them, by paths of tensors.
    """

    layers: int
    heads: int
    groups: int
    width: int
    hidden: int
    context: int
    vocabulary: int
    layer: int
    eos: tuple[int, ...]
    build: Callable[[range, torch.dtype], nn.Module]
    cuts: Mapping[str, Any]


def open_model(source: Path | PretrainedConfig | GptConfig, seed: int = 0) -> Model:
    """The model of a folder, or one of random weights.

    Args:
        source: a folder in transformers' format; a folder of checkpoints that
            examples/train_gpt.py has written; a configuration of either, for random weights.
        seed: of random weights, which are the same however the model is cut.

    Raises:
        FileNotFoundError: the folder has no model.
        ValueError: the model has something that the engine does not serve, or is quantized.
    """
    if isinstance(source, GptConfig):
        return _gpt(source, Drawn(seed, 0.08))
    if isinstance(source, PretrainedConfig):
        _check(source)
        weights = Drawn(seed, source.initializer_range)
        return _hugging_face(source, weights, source.eos_token_id)
    if (source / "latest").exists():
        return _gpt(*_read_checkpoint(source))
    if not (source / "config.json").exists():
        raise FileNotFoundError(
            f"{source} holds no model: neither config.json of transformers nor checkpoints of "
            "examples/train_gpt.py"
        )
    config = AutoConfig.from_pretrained(source)
    _check(config)
    refuse_quantized(source)
    return _hugging_face(config, _tied_as_stored(config, source), _eos(source))


# -- weights ------------------------------------------------------------------------------------


class Weights(Protocol):
    """Gives the weights of a part."""

    def load(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors with these names in the whole model; raises KeyError for a missing one."""
        ...


@dataclass(frozen=True)
class Drawn:
    """Random weights, each from a generator of its own, so that a cut does not change them."""

    seed: int
    scale: float

    def load(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = {}
        for name, parameter in parameters.items():
            seed = zlib.crc32(f"{self.seed} {name}".encode())
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            tensors[name] = (noise * self.scale + is_scale).to(dtype)
        return tensors


@dataclass(frozen=True)
class Stored:
    """A folder of weights, as the model's library reads it.

    Attributes:
        folder: by cg.pretrained.
        model: the whole model, on the meta device.
    """

    folder: Any
    model: nn.Module

    def load(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        state = self.model.state_dict(keep_vars=True)
        wanted = {name: state[name] for name in parameters}
        tensors = self.folder.tensors(self.model, wanted, "the model")
        return {
            name: stored.read(tuple(((0, size),) for size in wanted[name].shape), dtype)
            for name, stored in tensors.items()
        }


@dataclass(frozen=True)
class Held:
    """Weights in memory."""

    tensors: Mapping[str, Tensor]

    def load(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: self.tensors[name].to(dtype) for name in parameters}


def _fill(part: nn.Module, names: Mapping[str, str], weights: Weights, dtype: torch.dtype) -> None:
    """Replace a part's parameters, which are on the meta device, by weights.

    Args:
        names: the name of each of the part's parameters in the whole model.
    """
    parameters = dict(part.named_parameters())
    loaded = weights.load({names[name]: parameter for name, parameter in parameters.items()}, dtype)
    for name, parameter in parameters.items():
        if loaded[names[name]].shape != parameter.shape:
            raise ValueError(
                f"the weight {names[name]} is {tuple(loaded[names[name]].shape)}, and the model's "
                f"configuration says {tuple(parameter.shape)}"
            )
    # Not strict, since a tied weight has two names and is loaded under one.
    part.load_state_dict(
        {name: loaded[names[name]] for name in parameters}, strict=False, assign=True
    )
    part.requires_grad_(False).eval()


# -- transformers -------------------------------------------------------------------------------


class DecoderPart(nn.Module):
    """Layers of a decoder of transformers."""

    def __init__(self, model: Any, layers: range, last: int) -> None:
        super().__init__()
        decoder = model.model
        self.layers = nn.ModuleList(decoder.layers[layers.start : layers.stop])
        if layers.start == 0:
            self.tokens = decoder.embed_tokens
        if layers.stop == last:
            self.norm = decoder.norm
            self.head = model.lm_head

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(ids)

    def serve(self, turns: Tensor) -> None:
        """Prepare for `run`, once weights are loaded; `turns` are those of all positions."""
        self.register_buffer("turns", turns)
        for layer in self.layers:
            merge(layer)
        if hasattr(self, "norm"):
            self.norm = RmsNorm(self.norm)

    def run(self, hidden: Tensor, positions: Tensor, pages: Pages) -> Tensor:
        turns = self.turns.index_select(0, positions.flatten())
        turns = turns.view(*positions.shape, 2, 1, 1, -1).unbind(2)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=turns, pages=pages)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _tied_as_stored(config: PretrainedConfig, folder: Path) -> Stored:
    """The weights of a folder; unties the configuration's embedding if the stored head differs.

    transformers does the same (`tie_weights`). A tied head and embedding may be stored under
    either name.
    """
    weights = cg.pretrained(folder)
    model = _empty(config)
    if weights.differing(model):
        config.tie_word_embeddings = False
        model = _empty(config)
        if cg.rank() == 0:
            log.warning(
                "%s has a %s that is not its embedding, so it is used, although config.json says "
                "tie_word_embeddings",
                folder,
                HEAD,
            )
    return Stored(weights, model)


def _empty(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _eos(folder: Path) -> int | list[int] | None:
    """The tokens that end a text, as `generate` of transformers has them.

    They are those of generation_config.json; without this file, those of config.json.
    """
    try:
        return GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        return GenerationConfig.from_pretrained(folder, "config.json").eos_token_id


def _hugging_face(config: PretrainedConfig, weights: Weights, eos: int | list[int] | None) -> Model:
    def build(layers: range, dtype: torch.dtype) -> nn.Module:
        model = _empty(config)
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        part = DecoderPart(model, layers, config.num_hidden_layers)
        if tied and hasattr(part, "head"):
            names[id(part.head.weight)] = EMBEDDING
        _fill(
            part,
            {n: names[id(parameter)] for n, parameter in part.named_parameters()},
            weights,
            dtype,
        )
        if tied and hasattr(part, "tokens") and hasattr(part, "head"):
            part.head.weight = part.tokens.weight
        # Frequencies are computed, not stored, so this module is made in memory.
        rotary = type(model.model.rotary_emb)(config=config)
        part.serve(turns(rotary, config.max_position_embeddings, dtype))
        return part

    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Model(
        layers=config.num_hidden_layers,
        heads=heads,
        groups=groups,
        width=width,
        hidden=config.hidden_size,
        context=config.max_position_embeddings,
        vocabulary=config.vocab_size,
        layer=config.hidden_size * (2 * width * (heads + groups) + 3 * config.intermediate_size),
        eos=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        build=build,
        cuts={
            "*.qkv.*": cg.cut(0, "tp"),
            "*.gate_up.*": cg.cut(0, "tp", blocks=2),
            "*.o_proj.weight|*.down_proj.weight": cg.cut(1, "tp"),
        },
    )


_SERVED = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Model types that have been looked at: pre-norm decoders whose layers take rotary positions."""


def _check(config: PretrainedConfig) -> None:
    if config.model_type not in _SERVED:
        raise ValueError(
            f"models of type {config.model_type!r} are not served; those that are: "
            + ", ".join(_SERVED)
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or (config.model_type == "mistral" and config.sliding_window is not None):
        raise ValueError(
            f"{config.model_type} with {sorted(kinds) or 'sliding windows'}: layers "
            "are served that attend to all of a sequence"
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in FIXED_TURNS:
        raise ValueError(
            f"{config.model_type} with rotary positions of type {rope!r}; those that are served: "
            + ", ".join(FIXED_TURNS)
        )


# -- the GPT of examples/train_gpt.py -----------------------------------------------------------


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

    def forward(self, x: Tensor, pages: Pages) -> Tensor:
        rows, tokens, width = x.shape
        head = width // self.heads
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, head).transpose(2, 3)
        query, new = qkv.split((1, 2), 3)
        x = x + self.out(attend(query, new, pages, self.layer, head**-0.5))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GptPart(nn.Module):
    """Blocks of the GPT, with the names that its checkpoints use."""

    def __init__(self, config: GptConfig, layers: range) -> None:
        super().__init__()
        if layers.start == 0:
            self.tokens = nn.Embedding(config.vocabulary, config.width)
            self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleDict({str(layer): GptBlock(config, layer) for layer in layers})
        if layers.stop == config.layers:
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(positions)

    def run(self, hidden: Tensor, positions: Tensor, pages: Pages) -> Tensor:
        for block in self.blocks.values():
            hidden = block(hidden, pages)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


def _gpt(config: GptConfig, weights: Weights) -> Model:
    def build(layers: range, dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            part = GptPart(config, layers)
        _fill(part, {name: name for name, _ in part.named_parameters()}, weights, dtype)
        return part

    return Model(
        layers=config.layers,
        heads=config.heads,
        groups=config.heads,
        width=config.width // config.heads,
        hidden=config.width,
        context=config.context,
        vocabulary=config.vocabulary,
        layer=12 * config.width**2,
        eos=(),
        build=build,
        cuts={
            "*.qkv.*": cg.cut(0, "tp", blocks=3),
            "*.up.*": cg.cut(0, "tp"),
            "*.out.weight|*.down.weight": cg.cut(1, "tp"),
        },
    )


def _read_checkpoint(folder: Path) -> tuple[GptConfig, Weights]:
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
