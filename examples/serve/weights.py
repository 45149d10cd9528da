"""Weights of a part of a model: drawn, stored in a folder, or in memory."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import cg


class Weights(Protocol):
    """Gives the weights of a part."""

    def load(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors with these names in the whole model; raises KeyError for a missing one."""
        ...

    def prepare(self, model: nn.Module) -> frozenset[str]:
        """Give a model the kinds of layers whose tensors these weights have.

        Returns:
            The names of the tensors that stay quantized.
        """
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

    def prepare(self, model: nn.Module) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class Stored:
    """A folder of weights, as the model's library reads it.

    Attributes:
        folder: by cg.pretrained.
        model: the whole model, on the meta device, prepared.
        quantized: the names of its tensors that stay as they are stored.
    """

    folder: Any
    model: nn.Module
    quantized: frozenset[str] = frozenset()

    def load(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        state = self.model.state_dict(keep_vars=True)
        wanted = {name: state[name] for name in parameters}
        tensors = self.folder.tensors(self.model, wanted, "the model")

        def kind(name: str) -> torch.dtype:
            is_kept = name in self.quantized or not wanted[name].is_floating_point()
            return wanted[name].dtype if is_kept else dtype

        return {
            name: stored.read(tuple(((0, size),) for size in wanted[name].shape), kind(name))
            for name, stored in tensors.items()
        }

    def prepare(self, model: nn.Module) -> frozenset[str]:
        return cg.keep_quantized(model, self.folder)


@dataclass(frozen=True)
class Held:
    """Weights in memory."""

    tensors: Mapping[str, Tensor]

    def load(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: self.tensors[name].to(dtype) for name in parameters}

    def prepare(self, model: nn.Module) -> frozenset[str]:
        return frozenset()


def fill(part: nn.Module, weights: Weights, dtype: torch.dtype) -> None:
    """Replace the tensors of a part that are on the meta device by weights.

    Args:
        part: whose tensors have the names that they have in the whole model. Tied ones stay tied.
    """
    empty = [*part.named_parameters(), *part.named_buffers()]
    wanted = {name: tensor for name, tensor in empty if tensor.is_meta}
    loaded = weights.load(wanted, dtype)
    new: dict[int, Tensor] = {}
    for name, tensor in wanted.items():
        if loaded[name].shape != tensor.shape:
            raise ValueError(
                f"the weight {name} is {tuple(loaded[name].shape)}, and the model's "
                f"configuration says {tuple(tensor.shape)}"
            )
        is_parameter = isinstance(tensor, nn.Parameter)
        new[id(tensor)] = nn.Parameter(loaded[name], False) if is_parameter else loaded[name]
    for module in part.modules():
        slots: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for holder in slots:
            holder.update({key: new[id(t)] for key, t in holder.items() if id(t) in new})
    part.requires_grad_(False).eval()
