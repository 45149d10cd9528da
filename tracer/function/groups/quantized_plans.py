"""Plans of models that have quantized layers: those of plain layers, for other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import nn

from ...values.plan import Sharding


@runtime_checkable
class QuantizedLayer(Protocol):
    """A layer whose weight is quantized: tensors of several names stand for it."""

    def plain(self) -> nn.Linear:
        """A layer of the same sizes with a plain weight, without memory."""
        ...

    def shardings(self, weight: Sharding) -> dict[str, Sharding]:
        """How ranks share the tensors, by name, where they share a plain weight."""
        ...


@contextmanager
def plain_layers(model: nn.Module) -> Iterator[dict[str, QuantizedLayer]]:
    """Inside the `with` block a model has plain layers, without memory, for quantized ones.

    Yields:
        The quantized ones, by path.
    """
    layers = {path: module for path, module in model.named_modules() if _is_quantized(module)}
    try:
        for path, layer in layers.items():
            assert isinstance(layer, QuantizedLayer), "it was chosen by this"
            _put(model, path, layer.plain())
        yield {path: each for path, each in layers.items() if isinstance(each, QuantizedLayer)}
    finally:
        for path, layer in layers.items():
            _put(model, path, layer)


def of_quantized(
    shardings: Mapping[str, Sharding],
    layers: Mapping[str, QuantizedLayer],
    named: Callable[[str], str],
) -> dict[str, Sharding]:
    """Shardings of plain weights, and of the tensors of quantized layers.

    Args:
        shardings: by path.
        layers: by path in the model.
        named: the path under which `shardings` have a module of the model.
    """
    more: dict[str, Sharding] = {}
    for path, layer in layers.items():
        weight = shardings.get(f"{named(path)}.weight")
        if weight is not None:
            own = layer.shardings(weight)
            more |= {f"{named(path)}.{name}": sharding for name, sharding in own.items()}
    return {**shardings, **more}


def _is_quantized(module: nn.Module) -> bool:
    return isinstance(module, QuantizedLayer)


def _put(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)
