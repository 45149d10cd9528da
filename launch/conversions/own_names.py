"""Tensors that quantized layers have under other names than folders, or stacked.

A folder has the tensors of experts one by one, `experts.3.up_proj.weight_scale`, and a model has
those of all of them stacked, as parts of what stands for its weight:
`experts.gate_up_proj.up_proj.weight_scale`. A folder may also have them stacked:
`experts.up_proj_scales` is `experts.up_proj.stacked.scales`. And a parameter has no name with a dot
in it: `weight.absmax` is `weight_absmax`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .composition import Composition, joined

STACKED = "stacked"
"""The name of a layer whose tensors a folder has stacked."""
EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the names of tensors of one of several experts."""
_OF_EXPERTS = re.compile(r"^(.*\.experts)\.(\w+)\.(\w+)\.(\w+)$")
_OF_WEIGHT = re.compile(r"^(.*\.)weight_(\w+)$")
_STATE = ("quant_state_", "quant_state.")
"""What begins the name of a tensor with a description, here and in folders."""


@dataclass(frozen=True)
class OwnNames:
    """The names of a model's tensors by those that folders have for them.

    Attributes:
        names: the second ones have `*` for the number of an expert.
    """

    names: Mapping[str, str]

    @staticmethod
    def of(names: Iterable[str]) -> OwnNames:
        """Those of a model's tensors that may have other names in a folder."""
        own: dict[str, str] = {}
        for name in names:
            experts, weight = _OF_EXPERTS.match(name), _OF_WEIGHT.match(name)
            if experts is not None and not experts[2].isdecimal():
                path, stacked, layer, tensor = experts.groups()
                is_stacked = layer == STACKED
                key = f"{path}.{stacked}_{tensor}" if is_stacked else f"{path}.*.{layer}.{tensor}"
                own[key] = name
            elif weight is not None:
                own[f"{weight[1]}weight.{weight[2].replace(*_STATE)}"] = name
        return OwnNames(own)

    def find(self, name: str, prefix: str) -> str | None:
        """The model's name of a tensor that a folder has under another one; None if it has none.

        Args:
            name: of the folder, renamed as the model's library does.
            prefix: of names that only one of folder and model may have.
        """
        key = EXPERT.sub(".experts.*.", name)
        for own in (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}.")):
            if own in self.names:
                return self.names[own]
        return None

    @staticmethod
    def stacked(name: str, parts: Sequence[Composition], shape: tuple[int, ...]) -> Composition:
        """The tensor of a model that consists of those of a folder.

        Args:
            name: of the tensor.
            parts: of the folder; those of experts are in their order.
            shape: of the tensor; it may have another one, if it is not known yet.

        Raises:
            ValueError: tensors of experts differ in shape.
        """
        of_experts = _OF_EXPERTS.match(name)
        if of_experts is None or of_experts[3] == STACKED:
            (whole,) = parts
        else:
            whole = joined([part.unsqueezed(0) for part in parts], 0)
        return as_matrix(whole, shape)


def as_matrix(composition: Composition, shape: tuple[int, ...]) -> Composition:
    """A composition in a shape of two dimensions or more, if it has as many numbers as that."""
    fits = len(shape) > 1 and math.prod(shape) == math.prod(composition.shape)
    return composition.viewed(shape) if fits else composition
