"""LoRA adapters of a served model: rows of a batch may use several of them, and none.

An adapter adds `scaling * B(A(x))` to the output of a linear layer (Edward J. Hu and others, "LoRA:
Low-Rank Adaptation of Large Language Models", 2021). The matrices of all adapters of a layer lie
side by side, so two products serve the batch, and a mask leaves each row the ranks of its own one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers.pytorch_utils import Conv1D

import cg

from .attention import CurrentCache
from .options import ADAPTER_SETTINGS, ADAPTER_WEIGHTS

PREFIX = "base_model.model."
"""Of the names in peft's files."""
FACTOR = re.compile(r"(?P<path>.+)\.lora_(?P<factor>[AB])\.weight")
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "layer_replication": (None,),
    # Others subtract the first factors from the weights of the model.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""Settings of peft that change the formula or the model, and their values that do not."""


@dataclass(frozen=True)
class Factors:
    """The matrices by which an adapter changes a linear layer.

    Attributes:
        a: [rank, inputs].
        b: [outputs, rank], times the scaling.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Adapter:
    """An adapter, as peft writes it.

    Attributes:
        folder: that it is read from.
        layers: by the path of a linear layer in the model.
    """

    folder: Path
    layers: Mapping[str, Factors]


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter of a folder with adapter_config.json and adapter_model.safetensors.

    Raises:
        FileNotFoundError: one of these files is missing.
        ValueError: a file is damaged, or it is no plain LoRA of linear layers.
    """
    settings = _settings(folder / ADAPTER_SETTINGS)
    for name, neutral in NEUTRAL.items():
        value = settings.get(name, neutral[0])
        if value not in neutral:
            served = " or ".join(map(repr, neutral))
            raise ValueError(f"{folder} has {name}={value!r}, and {served} is served")
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _tensors(folder / ADAPTER_WEIGHTS).items():
        factor = FACTOR.fullmatch(name.removeprefix(PREFIX))
        is_factor = factor is not None and tensor.dim() == 2 and tensor.is_floating_point()
        if factor is None or not is_factor or ".experts." in name:
            raise ValueError(f"{folder} has {name}, and only factors of linear layers are served")
        pairs.setdefault(factor["path"].removesuffix(".base_layer"), {})[factor["factor"]] = tensor
    halves = sorted(path for path, pair in pairs.items() if len(pair) < 2)
    if halves or not pairs:
        raise ValueError(
            f"{folder} has one factor of {', '.join(halves) or 'no layer'}, and not two"
        )
    layers: dict[str, Factors] = {}
    for path, pair in pairs.items():
        a, b = pair["A"].float(), pair["B"].float()  # of less precision, scaling would round them
        if a.shape[0] != b.shape[1]:
            raise ValueError(
                f"{folder} has factors of rank {a.shape[0]} and {b.shape[1]} for {path}"
            )
        try:
            layers[path] = Factors(a, b * _scaling(settings, path, len(a)))
        except ValueError as error:
            raise ValueError(f"{folder / ADAPTER_SETTINGS}: {error}") from error
    return Adapter(folder, layers)


def _settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} is damaged: it has no settings by name")
    return settings


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _scaling(settings: Mapping[str, Any], path: str, rank: int) -> float:
    """The factor of a layer, as peft computes it.

    Raises:
        ValueError: settings do not give it.
    """
    alpha, patterns = settings.get("lora_alpha"), settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"alpha_pattern={patterns!r} has no numbers by name")
    for pattern, own in patterns.items():
        try:
            is_own = re.match(rf"(.*\.)?({pattern})$", path)
        except re.error as error:
            raise ValueError(f"alpha_pattern has {pattern!r}, no pattern: {error}") from error
        if is_own:
            alpha = own
            break
    if not isinstance(alpha, int | float):
        raise ValueError(f"lora_alpha={alpha!r} for {path}, which is no number")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


class Lora(nn.Module):
    """The adapters of a linear layer.

    Args:
        factors: of each adapter; None of one that leaves the layer as it is.
        current: of the batch that the part runs on.
        dtype: of the layer.
    """

    def __init__(
        self, factors: Sequence[Factors | None], current: CurrentCache, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._current = current
        there = [one for one in factors if one is not None]
        self.register_buffer("a", torch.cat([one.a for one in there]).to(dtype))
        self.register_buffer("b", torch.cat([one.b for one in there], 1).to(dtype))
        ranks = torch.tensor([0 if one is None else len(one.a) for one in factors])
        owners = torch.arange(1, 1 + len(ranks)).repeat_interleave(ranks)
        rows = torch.arange(1 + len(ranks))[:, None]
        # Row 0 is of requests without an adapter.
        self.register_buffer("shown", (rows == owners).to(dtype))

    def hook(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Behind the layer's own forward: its output with that of each row's adapter."""
        cache = self._current.cache
        if cache is None or cache.pages.adapters is None:
            return None
        (x,) = args
        shown = self.shown[cache.pages.adapters]
        if x.dim() == 3:
            shown = shown[:, None]
        else:  # of all tokens, one after the other
            shown = shown.repeat_interleave(len(x) // len(shown), 0)
        return output + F.linear(F.linear(x, self.a) * shown, self.b)


def check_adapters(adapters: Iterable[Adapter], shapes: Mapping[str, tuple[int, int]]) -> None:
    """Refuse adapters of layers that a model does not have.

    Args:
        shapes: the inputs and outputs of the model's linear layers, by path.

    Raises:
        ValueError: a layer is missing, or has other sizes.
    """
    for adapter in adapters:
        for path, factors in adapter.layers.items():
            sizes = factors.a.shape[1], factors.b.shape[0]
            if path not in shapes:
                raise ValueError(
                    f"{adapter.folder} adapts {path}, which is no linear layer of the model"
                )
            if sizes != shapes[path]:
                raise ValueError(
                    f"{adapter.folder} adapts {path} from {sizes[0]} to {sizes[1]}, which is from "
                    f"{shapes[path][0]} to {shapes[path][1]} in the model"
                )


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The inputs and outputs of the linear layers of a model, by path."""
    shapes: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shapes[path] = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            shapes[path] = inputs, outputs
    return shapes


def attach(
    part: nn.Module, adapters: Sequence[Adapter], current: CurrentCache, dtype: torch.dtype
) -> None:
    """Give the layers of a part the adapters that they have."""
    for path, module in list(part.named_modules()):
        factors = [adapter.layers.get(path) for adapter in adapters]
        if any(one is not None for one in factors):
            lora = Lora(factors, current, dtype)
            module.register_forward_hook(lora.hook)
            module.lora = lora


@contextmanager
def must_run(part: nn.Module, adapters: Sequence[Adapter]) -> Iterator[None]:
    """Inside the `with` block the part runs, and with it each layer that has an adapter.

    Raises:
        ValueError: the model takes the weight of such a layer and does not run it, so that an
            adapter would change nothing.
    """
    paths = {path for adapter in adapters for path in adapter.layers}
    idle = {path: module for path, module in part.named_modules() if path in paths}

    def note(path: str, *_: object) -> None:
        idle.pop(path, None)

    hooks = [m.register_forward_hook(partial(note, path)) for path, m in idle.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for path in idle:
        folder = next(adapter.folder for adapter in adapters if path in adapter.layers)
        raise ValueError(
            f"{folder} adapts {path}, whose weight the model takes without running the layer: "
            "merge this adapter into the model's weights, with peft"
        )


def adapter_cuts(
    part: nn.Module, adapters: Sequence[Adapter], of_tensor: Callable[[str], cg.Sharding | None]
) -> dict[str, cg.Sharding]:
    """How ranks share the factors of a part's layers: as they share the layers' weights.

    Args:
        of_tensor: how they share a weight of the part, by its path.

    Returns:
        Entries of a plan.
    """
    cuts: dict[str, cg.Sharding] = {}
    for path, module in part.named_modules():
        sharding = of_tensor(f"{path}.weight")
        if sharding is None or not any(path in adapter.layers for adapter in adapters):
            continue
        # The weight of `Conv1D` is [inputs, outputs].
        inputs, outputs = (0, 1) if isinstance(module, Conv1D) else (1, 0)
        for dimension, cut in sharding.cuts:
            if dimension == outputs:
                cuts[f"*{path}.lora.b"] = cg.cut(0, *cut.axes, blocks=cut.blocks)
            elif dimension == inputs:
                cuts[f"*{path}.lora.a"] = cg.cut(1, *cut.axes, blocks=cut.blocks)
    return cuts
