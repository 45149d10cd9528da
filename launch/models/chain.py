"""Find the chain of layers of a model: the modules of its lists, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LayerList:
    """A list of layers of a model.

    Attributes:
        path: of the list in the model; empty if the model is the list.
        layers: the modules, in order.
    """

    path: str
    layers: tuple[nn.Module, ...]

    def path_of(self, index: int) -> str:
        """The path of a layer in the model."""
        return f"{self.path}.{index}" if self.path else str(index)

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(map(_size, self.layers))


@dataclass(frozen=True)
class Chain:
    """The layers of a model.

    Attributes:
        lists: that have them.
        paths: of the layers, in the order in which the model runs them.
        layers: the modules, in that order.
    """

    lists: tuple[str, ...]
    paths: tuple[str, ...]
    layers: tuple[nn.Module, ...]

    @staticmethod
    def of(lists: Sequence[LayerList], order: Sequence[tuple[int, int]]) -> Chain:
        """The layers of lists.

        Args:
            order: the number of a list and of a layer in it, for each layer in the order of a run.
        """
        return Chain(
            tuple(layer_list.path for layer_list in lists),
            tuple(lists[number].path_of(index) for number, index in order),
            tuple(lists[number].layers[index] for number, index in order),
        )

    @property
    def name(self) -> str:
        """The paths of the lists, in words."""
        return " and ".join(self.lists) or "the model itself"


def find_lists(model: nn.Module, paths: str | Sequence[str] | None) -> list[LayerList]:
    """Find the lists that may have a model's layers.

    Without paths these are each `ModuleList` or `Sequential` that is in no other.

    Raises:
        ValueError: there is no such list.
    """
    if paths is not None:
        return [_list_at(model, path) for path in ([paths] if isinstance(paths, str) else paths)]
    lists = dict(_lists(model))
    inner = {
        id(descendant)
        for layer_list in lists.values()
        for descendant in layer_list.modules()
        if descendant is not layer_list
    }
    outer = [
        LayerList(name, tuple(layers)) for name, layers in lists.items() if id(layers) not in inner
    ]
    if not outer:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList or Sequential, so cg.cut_layers finds no "
            "layers to cut between"
        )
    return outer


def largest_lists(lists: Sequence[LayerList]) -> list[LayerList]:
    """The list with most parameters, and all others with at least as many as its smallest layer."""
    largest = max(lists, key=lambda layer_list: layer_list.size)  # the first of equals
    least = max(1, min(map(_size, largest.layers)))
    return [largest, *(other for other in lists if other is not largest and other.size >= least)]


def _list_at(model: nn.Module, path: str) -> LayerList:
    candidate = dict(model.named_modules()).get(path)
    if not isinstance(candidate, nn.ModuleList | nn.Sequential):
        kind = "nothing" if candidate is None else f"a {type(candidate).__name__}"
        raise ValueError(
            f"{type(model).__name__} has {kind} at '{path}', where cg.cut_layers looks for a "
            f"ModuleList or Sequential; there are {_names(_lists(model))}"
        )
    return LayerList(path, tuple(candidate))


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
