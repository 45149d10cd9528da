"""Find the chain of layers of a model: the list of modules that it runs one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Chain:
    """The layers of a model.

    Attributes:
        path: of the list in the model; empty if the model is the list.
        layers: the modules, in order.
    """

    path: str
    layers: tuple[nn.Module, ...]

    def path_of(self, index: int) -> str:
        """The path of a layer in the model."""
        return f"{self.path}.{index}" if self.path else str(index)


def find_chain(model: nn.Module, path: str | None) -> Chain:
    """Find the layers of a model.

    Without a path it is the `ModuleList` or `Sequential` with most parameters, among those that are
    in no other.

    Args:
        path: of the list, to choose another one.

    Raises:
        ValueError: there is no such list.
    """
    if path is not None:
        candidate = dict(model.named_modules()).get(path)
        if not isinstance(candidate, nn.ModuleList | nn.Sequential):
            kind = "nothing" if candidate is None else f"a {type(candidate).__name__}"
            raise ValueError(
                f"{type(model).__name__} has {kind} at '{path}', where cg.cut_layers looks for a "
                f"ModuleList or Sequential; there are {_names(_lists(model))}"
            )
        return Chain(path, tuple(candidate))
    lists = dict(_lists(model))
    inner = {
        id(descendant)
        for layer_list in lists.values()
        for descendant in layer_list.modules()
        if descendant is not layer_list
    }
    outer = [
        (name, layer_list) for name, layer_list in lists.items() if id(layer_list) not in inner
    ]
    if not outer:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList or Sequential, so cg.cut_layers finds no "
            "layers to cut between"
        )
    name, chosen = max(outer, key=lambda entry: _size(entry[1]))  # the first of equals
    return Chain(name, tuple(chosen))


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
            yield name, module


def _names(lists: Iterator[tuple[str, nn.Module]]) -> str:
    names = [f"'{name}'" for name, _ in lists]
    listing = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return listing or "none at all"


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
