"""Models of transformers that pool, cut into parts: encoders, and decoders without their heads.

A part runs the model's own forward, as `cg.cut_layers` cuts it, on whole texts that are padded at
their ends. Nothing is cached.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

import cg

from ...weight_files import quantization
from ..parts import Ways
from ..products import project
from ..weights import Drawn, Stored, Weights, fill
from .recipe import SCORE, Dense, Recipe

log = logging.getLogger("serve")

LENGTH, PADDED = 6, 9
"""Tokens of the text on which a part is tried, and with padding."""
TOLERANCE, COARSE = 2e-4, 0.1
"""How far values may differ by padding, in float32 and in types of less precision."""
UNBOUNDED = 1 << 20
"""The context of a model that says none."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Encoder:
    """A model that pools, as the engine needs to know it.

    Attributes:
        recipe: how its values become a vector or a score.
        layers: how many.
        heads: numbers of heads, all of which ranks that share a part have to divide.
        context: the longest text.
        vocabulary: the number of tokens.
        padding: the token behind a text that is shorter than others.
        width: the numbers of what it gives.
        build: makes the part with these layers, with its weights.
        plan: how the ranks of an axis `tp` share the tensors of a part.
    """

    recipe: Recipe
    layers: int
    heads: tuple[int, ...]
    context: int
    vocabulary: int
    padding: int
    width: int
    build: Callable[[range, torch.dtype, Ways], EncoderPart]
    plan: Callable[[], Any]


class EncoderPart(nn.Module):
    """Layers of a model that pools.

    Args:
        part: of the model, as `cg.cut_layers` makes it.
        is_first, is_last: which part it is.
        takes: the names of what the model's forward takes.
        has_types: whether the model tells the second text of a pair from the first by a number.

    Attributes:
        sees_ahead: whether a token sees those behind it, and so padding, unless a mask hides it.
    """

    def __init__(
        self, part: Any, is_first: bool, is_last: bool, takes: frozenset[str], has_types: bool
    ) -> None:
        super().__init__()
        self.part, self.is_first, self.is_last = part, is_first, is_last
        self.takes_cache, self.has_types = "use_cache" in takes, has_types
        self.sees_ahead = True

    def forward(self, x: Tensor, ids: Tensor, lengths: Tensor, seconds: Tensor) -> Any:
        """Apply the part.

        Args:
            x: what the part before gives; ids for the first.
            ids: int64 [rows, tokens], padded at the end.
            lengths: int64 [rows], without padding.
            seconds: int64 [rows], where the second text of a pair begins; 0: there is none.

        Returns:
            The input of the next part; of the last part the model's output.
        """
        steps = torch.arange(ids.shape[1], device=ids.device)[None]
        more: dict[str, Any] = {"use_cache": False} if self.takes_cache else {}
        if self.sees_ahead:
            more["attention_mask"] = (steps < lengths[:, None]).long()
        if self.has_types:
            begins = seconds[:, None]
            types = (begins > 0) & (steps >= begins) & (steps < lengths[:, None])
            more["token_type_ids"] = types.long()
        return self.part(None if self.is_first else x, input_ids=ids, **more)


class Pooled(nn.Module):
    """Makes what clients get of a model's output, but for the length of a vector.

    Args:
        pooling: of `POOLINGS`; empty for a score.
    """

    def __init__(self, recipe: Recipe, pooling: str) -> None:
        super().__init__()
        self.task, self.pooling, self.activation = recipe.task, pooling, recipe.activation
        self.dense = nn.ModuleList(_DenseLayer(dense) for dense in recipe.dense)

    def forward(self, out: Any, lengths: Tensor) -> Tensor:
        """Vectors, float32 [rows, width]; scores have the width 1.

        Args:
            out: of the model's last part.
            lengths: int64 [rows], tokens of each row without padding.
        """
        if self.task == SCORE:
            logits = cg.layout(out.logits, cg.whole).float()
            return _ACTIVATIONS[self.activation](logits)
        x = pool(cg.layout(out.last_hidden_state, cg.whole).float(), lengths, self.pooling)
        for layer in self.dense:
            x = layer(x)
        return x


class _DenseLayer(nn.Module):
    """A `Dense` of sentence-transformers, in float32."""

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(dense.inputs, dense.outputs, dense.has_bias, device="meta")
        self.activation = dense.activation
        fill(self, Stored(cg.pretrained(dense.folder), self), torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return _ACTIVATIONS[self.activation](self.linear(x))


def pool(hidden: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """One vector for each row, as sentence-transformers' `Pooling` does it.

    Args:
        hidden: float32 [rows, tokens, width], padded at the end.
        lengths: int64 [rows], at least 1.
        pooling: of `POOLINGS`.
    """
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        last = (lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        return hidden.gather(1, last)[:, 0]
    steps = torch.arange(hidden.shape[1], device=hidden.device)[None]
    is_there = (steps < lengths[:, None])[:, :, None]
    if pooling == "max":
        return hidden.masked_fill(~is_there, -1e9).amax(1)
    return torch.where(is_there, hidden, 0.0).sum(1) / lengths[:, None]


def open_encoder(source: Path | PretrainedConfig, recipe: Recipe, seed: int = 0) -> Encoder:
    """The model of a folder of transformers, or of a configuration and random weights.

    Raises:
        ValueError: the model has something that is not served.
    """
    if isinstance(source, PretrainedConfig):
        scale = source.to_dict().get("initializer_range", 0.02)
        return encoder(source, Drawn(seed, scale), recipe)
    config = AutoConfig.from_pretrained(source)
    if method := quantization(source):
        raise ValueError(
            f"the weights in {source} are quantized by {method}, and models that pool are served "
            "from plain ones: give a folder with weights in bfloat16, float16 or float32"
        )
    return encoder(config, Stored(cg.pretrained(source), _empty(config, recipe.task)), recipe)


def encoder(config: PretrainedConfig, weights: Weights, recipe: Recipe) -> Encoder:
    """The model of a configuration and weights.

    Raises:
        ValueError: the model has something that is not served.
    """
    model = _empty(config, recipe.task)
    name = f"{type(model).__name__} ({config.model_type})"
    takes = frozenset(inspect.signature(type(model).forward).parameters)
    if "input_ids" not in takes or "attention_mask" not in takes:
        raise ValueError(f"{name} is not served: its forward takes no input_ids, or no mask")
    if recipe.task == SCORE and config.num_labels != 1:
        raise ValueError(
            f"{name} is not served: it tells {config.num_labels} classes apart, and a score is "
            "one number"
        )
    settings: dict[str, Any] = config.to_dict()
    has_types = recipe.has_types and "token_type_ids" in takes
    has_types = has_types and settings.get("type_vocab_size", 0) > 1
    try:
        cuts = cg.cut_layers(model, 1, "bytes", example=_example(takes))
    except ValueError as error:
        raise ValueError(f"{name} is not served: {error}") from error
    count, embedding = len(cuts[0].layers), model.get_input_embeddings()
    padding = settings.get("pad_token_id")
    if padding is None and recipe.task == SCORE:
        raise ValueError(
            f"{name} is not served: config.json has no pad_token_id, by which the model finds the "
            "last token of a text. Write one there that no text has"
        )

    def build(layers: range, dtype: torch.dtype, ways: Ways) -> EncoderPart:
        sizes = [n for n in (layers.start, len(layers), count - layers.stop) if n]
        own = _empty(config, recipe.task, dtype)
        part: Any = cg.cut_layers(own, sizes, "bytes", example=_example(takes))
        is_first, is_last = layers.start == 0, layers.stop == count
        encoder = EncoderPart(part.part(0 if is_first else 1), is_first, is_last, takes, has_types)
        fill(encoder.part.model, weights, dtype)
        if ways.ranks == 1:
            project(encoder)
        _try(encoder, name, _hidden(config), embedding.num_embeddings, padding or 0, dtype)
        return encoder

    def plan() -> Any:
        return cg.plans.hf(_empty(config, recipe.task).requires_grad_(), batch=None)

    hidden = recipe.dense[-1].outputs if recipe.dense else _hidden(config)
    heads = settings.get("num_attention_heads", 1), settings.get("num_key_value_heads")
    return Encoder(
        recipe=recipe,
        layers=count,
        heads=tuple(number for number in heads if isinstance(number, int)),
        context=min(_context(model, settings), recipe.longest or UNBOUNDED),
        vocabulary=embedding.num_embeddings,
        padding=padding or 0,
        width=1 if recipe.task == SCORE else hidden,
        build=build,
        plan=plan,
    )


def _hidden(config: Any) -> int:
    return int(config.get_text_config().hidden_size)


def _empty(config: PretrainedConfig, task: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model without weights."""
    make = AutoModelForSequenceClassification if task == SCORE else AutoModel

    def model(**more: Any) -> Any:
        with cg.empty_weights():
            return make.from_config(copy.deepcopy(config), dtype=dtype, **more)

    whole = model()
    if task != SCORE and "add_pooling_layer" in inspect.signature(type(whole).__init__).parameters:
        whole = model(
            add_pooling_layer=False
        )  # it would give another vector, which nobody asks for
    whole.requires_grad_(False).eval()
    return whole


def _example(takes: frozenset[str]) -> dict[str, Any]:
    """Inputs on which a model is analysed: those that a part is given."""
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return inputs | ({"use_cache": False} if "use_cache" in takes else {})


def _context(model: nn.Module, settings: dict[str, Any]) -> int:
    """The longest text that a model takes, by its configuration.

    A table of positions that has a row for padding begins to count behind that row, as in RoBERTa.
    """
    length = settings.get("max_position_embeddings")
    if not isinstance(length, int):
        return UNBOUNDED
    ahead = (
        module.padding_idx + 1
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and module.num_embeddings == length
        and module.padding_idx is not None
        and module is not model.get_input_embeddings()  # type: ignore[operator]
    )
    return length - max(ahead, default=0)


@torch.no_grad()
def _try(
    part: EncoderPart, name: str, hidden: int, vocabulary: int, padding: int, dtype: torch.dtype
) -> None:
    """Find out whether tokens see those behind them, and check that padding changes nothing.

    A part that takes more than the values of tokens, such as the biases of positions, is not tried.

    Raises:
        ValueError: padding changes the values of a text.
    """
    if part.part.entering > 1:
        return
    generator = torch.Generator().manual_seed(0)
    least = min(3, vocabulary - 1)
    ids = torch.randint(least, vocabulary, (2, PADDED), generator=generator)
    x = torch.randn(2, PADDED, hidden, generator=generator).to(dtype)
    zeros = torch.zeros(1, dtype=torch.int64)

    def run(ids: Tensor, x: Tensor, lengths: list[int]) -> Tensor:
        out = part(ids if part.is_first else x, ids, torch.tensor(lengths), zeros.expand(len(ids)))
        if not part.is_last:
            several = out if isinstance(out, tuple) else (out,)
            return next(tensor for tensor in several if tensor.shape[:2] == ids.shape)
        return out.logits if "logits" in out else out.last_hidden_state

    text, its = ids[:1, :LENGTH], x[:1, :LENGTH]
    wanted = run(text, its, [LENGTH])
    if wanted.ndim == 3:
        part.sees_ahead = _sees_ahead(run, text, its, wanted)
    ids[0, LENGTH:] = padding
    values = run(ids, x, [LENGTH, PADDED])[:1]
    values = values[:, :LENGTH] if wanted.ndim == 3 else values
    distance = (values.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-9)
    if not float(distance) <= (TOLERANCE if dtype is torch.float32 else COARSE):
        raise ValueError(
            f"{name} is not served: padding behind a text changes its values, so texts of several "
            "lengths cannot share a batch"
        )


def _sees_ahead(run: Any, ids: Tensor, x: Tensor, wanted: Tensor) -> bool:
    """True if other tokens at the end change the values of those before."""
    ids, x = ids.clone(), x.clone()
    ids[:, -1], x[:, -1] = ids[:, :-1].max() - ids[:, -1].clamp(max=1), -x[:, -1]
    return not torch.equal(run(ids, x, [LENGTH])[:, :-1], wanted[:, :-1])


def pooling_of(recipe: Recipe, sees_ahead: bool) -> str:
    """How values are pooled: as the recipe says, or else as vLLM does for such a model."""
    if recipe.task == SCORE or recipe.pooling:
        return recipe.pooling
    return "cls" if sees_ahead else "last"
