"""What transformers does to the names and tensors of a folder as it loads a model: read from it.

Of transformers 5.0 and later are used, in the order of use: `PreTrainedModel` with its
`base_model_prefix` and `_keys_to_ignore_on_load_unexpected`; `get_model_conversion_mapping` of
`transformers.conversion_mapping`, which `peft` uses as well; and of `core_model_loading`
`WeightRenaming`, `WeightConverter` (`source_patterns`, `target_patterns`, `operations`,
`add_tensor`, `convert`), `rename_source_key` and `dot_natural_key`. The steps are those of
`convert_and_load_state_dict_in_model` there. No other module of cg knows transformers.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .composition import Composition
from .conversion import Conversion, StoredType
from .own_names import OwnNames, as_matrix
from .symbolic_tensor import SymbolicTensor


def library_model(instance: object) -> nn.Module | None:
    """The model of transformers that an object is, or has as a module; None if there is none."""
    loaded = sys.modules.get("transformers.modeling_utils")
    if loaded is None or not isinstance(instance, nn.Module):
        return None
    models = (m for m in instance.modules() if isinstance(m, loaded.PreTrainedModel))
    return next(models, None)


def conversion_of(
    model: Any, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredType]
) -> Conversion:
    """The tensors that transformers makes of those of a folder.

    Args:
        model: of transformers; some of its layers may be missing.
        shapes: of its whole tensors, by the names that it has for them without adapters.
        stored: the shapes and element types of the folder's tensors, by name.

    Raises:
        ValueError: it converts tensors by an operation that computes, such as one that undoes a
            quantization, or that cannot be applied to these shapes.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix, known, own = model.base_model_prefix, dict(shapes), OwnNames.of(shapes)
    compositions: dict[str, Composition] = {}
    renamed: dict[str, str] = {}
    collected: dict[str, tuple[Any, list[str]]] = {}
    stacks: dict[str, list[Composition]] = {}
    for name in sorted(stored, key=dot_natural_key):
        if own.names:
            place = own.find(rename_source_key(name, renamings, [], prefix, known)[0], prefix)
            if place is not None:
                part = Composition.of(name, stored[name].shape)
                stacks.setdefault(place, []).append(part)
                continue
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in shapes and name in shapes:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target not in shapes or (pattern is None and target in compositions):
            renamed[name] = target
        elif pattern is None:
            whole = Composition.of(name, stored[name].shape)
            is_bytes = stored[name].dtype is torch.uint8
            compositions[target] = as_matrix(whole, shapes[target]) if is_bytes else whole
        else:
            if target not in collected:
                collected[target] = copy.deepcopy(by_pattern[pattern]), []
            converter, sources = collected[target]
            sources.append(name)
            converter.add_tensor(target, name, pattern, _symbolic(name, stored[name]))
    compositions |= {n: own.stacked(n, parts, shapes[n]) for n, parts in stacks.items()}
    for target, (converter, sources) in collected.items():
        compositions |= _converted(model, target, converter, sources, shapes)
    return Conversion(compositions, frozenset(_ignored(model, renamed)))


@dataclass(frozen=True)
class _Shapes:
    """Stands for a model in conversions, which ask it for the shapes of its whole tensors.

    Attributes:
        shapes: by name.
    """

    shapes: Mapping[str, tuple[int, ...]]

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name], device="meta")


def _symbolic(name: str, stored: StoredType) -> SymbolicTensor:
    return SymbolicTensor(Composition.of(name, stored.shape), stored.dtype or torch.uint8)


def _converted(
    model: Any,
    target: str,
    converter: Any,
    sources: list[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Composition]:
    """The tensors that a converter makes of those that it has collected, by name."""
    try:
        converted = converter.convert(target, model=_Shapes(shapes), config=model.config)
        if isinstance(converted, tuple):  # of 5.0, with errors beside it
            converted = converted[0]
        values = {n: v[0] if isinstance(v, list) else v for n, v in converted.items()}
        return {name: value.composition for name, value in values.items()}
    except Exception as error:
        kinds = ", ".join(type(op).__name__ for op in converter.operations)
        raise ValueError(
            f"'{target}' of {type(model).__name__} is made from '{sources[0]}' by {kinds} of "
            f"transformers, which cg cannot follow: {error}. Load the folder by transformers, and "
            "write the model's state_dict() as safetensors"
        ) from error


def _ignored(model: Any, renamed: Mapping[str, str]) -> Iterable[str]:
    """The stored tensors that a model says older folders have, and that it makes by itself.

    So are tables of frequencies and positions that the model has as buffers: transformers ignores
    them for all models (`_adjust_missing_and_unexpected_keys`).
    """
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    for name, target in renamed.items():
        if any(re.search(pattern, target) for pattern in patterns):
            yield name
