"""A stage of a cut model, which runs a part of the model's own forward.

A part is the model, without the tensors and layers of other stages. In their place stand modules
that let in what stages before have made, and one that ends the run where the next stage goes on.
So no line of the model's code is changed, and what it computes around its layers, such as masks and
rotary tables, it computes from the inputs in each stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .analysis import Boundary
from .observation import GivenTensor, ModuleOutput

Moving: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""The tensors that go from a stage to the next one."""


class ModelPart(nn.Module):
    """Some layers of a model, and what it computes before or after them, if they are its ends.

    Its parameters and buffers have the names that they have in the model, behind `model.`.

    Attributes:
        model: the model, reduced to this part.
        borrowed: the names of parameters that it uses and another part has.
        lent: the names of its own parameters that others use.
        entering: how many tensors it takes from the part before.
    """

    def __init__(
        self,
        model: nn.Module,
        missing: Sequence[MissingParameter],
        borrowed: tuple[str, ...],
        lent: tuple[str, ...],
        passage: Passage,
    ) -> None:
        super().__init__()
        self.model = model
        self.borrowed, self.lent = borrowed, lent
        self.entering = passage.taken
        self._missing = tuple(missing)
        self._passage = passage

    def forward(
        self,
        entering: Moving | None,
        /,
        *args: Any,
        lent: Mapping[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the part.

        Args:
            entering: what the part before has returned; None for the first one.
            args, kwargs: the model's inputs, the same for all parts.
            lent: by name, what `lend` of other parts has returned of `borrowed`.

        Returns:
            The input of the next part; of the last one, the result of the model.

        Raises:
            ValueError: `entering` or `lent` are not what this part takes; or the model makes an
                auxiliary loss, of which a part knows a part alone.
        """
        self._check(entering, lent or {})
        self._passage.begin(_as_tuple(entering))
        try:
            with self._filled(lent or {}):
                return self._checked(self.model(*args, **kwargs))
        except _Leaves as leaving:
            moving = leaving.moving
            return moving[0] if len(moving) == 1 else moving
        finally:
            self._passage.end()

    def lend(self, rows: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """The parameters of this part that others use, by name; they are trained here alone.

        Args:
            rows: for each the numbers of all its rows, `torch.arange(len(parameter))`. On a mesh
                whose ranks share the batch they are cut along that axis, so that the gradient is a
                sum over these ranks, as that of the part's other methods is.
        """
        lent: dict[str, torch.Tensor]
        lent = {name: self.model.get_parameter(name) for name in self.lent}
        if rows is None:
            return lent
        return {name: nn.functional.embedding(rows[name], value) for name, value in lent.items()}

    def _checked(self, result: Any) -> Any:
        """Refuse a loss of routers, which the model has made from those of this part alone."""
        is_partial = self._passage.taken > 0 and isinstance(result, Mapping)
        if is_partial and result.get("aux_loss") is not None:
            raise ValueError(
                "the auxiliary loss of this part is of its own layers alone; give "
                "output_router_logits=False, and add up what cg.expert_choices notes in all parts"
            )
        return result

    def _check(self, entering: Moving | None, lent: Mapping[str, torch.Tensor]) -> None:
        expected = self._passage.taken
        count = 0 if entering is None else len(_as_tuple(entering) or ())
        if count != expected:
            expectation = (
                "the first part takes None"
                if not expected
                else f"this part takes {expected} tensors"
            )
            raise ValueError(f"{expectation} of the part before it, and was given {count}")
        lacking = [name for name in self.borrowed if name not in lent]
        if lacking:
            raise ValueError(
                f"this part uses {', '.join(lacking)} of another part; give it what that part's "
                "lend() returns, as lent={name: value}"
            )

    @contextmanager
    def _filled(self, lent: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside the `with` block no parameter is missing.

        Parameters that others lend are in their places. Zeros of one element stand in all other
        places: values computed from them do not reach what the part returns.
        """
        device = next(self.model.parameters(), torch.empty(0)).device
        slots = []
        for missing in self._missing:
            path, _, key = missing.path.rpartition(".")
            slots.append((self.model.get_submodule(path)._parameters, key))
            value = lent[missing.name] if missing.name in self.borrowed else missing.zeros(device)
            slots[-1][0][key] = value  # type: ignore[assignment]
        try:
            yield
        finally:
            for holder, key in slots:
                holder[key] = None


@dataclass(frozen=True)
class MissingParameter:
    """A place in a part's model whose parameter the part does not have.

    Attributes:
        path: of the place, from the model.
        name: of the parameter: the first of the paths that it has in the whole model.
        shape, dtype: of the parameter.
    """

    path: str
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def zeros(self, device: torch.device) -> torch.Tensor:
        """A tensor for the place, of one element in memory."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)


class Passage:
    """The tensors that enter a part, and those that leave it, while it runs.

    Args:
        entering: the boundary in front of the part; None for the first one.
        leaving: the boundary behind it; None for the last one.
    """

    def __init__(self, entering: Boundary | None, leaving: Boundary | None) -> None:
        before = entering.moving if entering else ()
        self._place = {tensor: place for place, tensor in enumerate(before)}
        self._leaving = leaving.moving if leaving else ()
        self.taken = len(before)
        self._entering: tuple[torch.Tensor, ...] | None = None
        self._kept: dict[GivenTensor, torch.Tensor] = {}
        self._zeros: dict[int, torch.Tensor] = {}

    def begin(self, entering: tuple[torch.Tensor, ...] | None) -> None:
        """Let tensors enter, as the part begins to run."""
        self._entering = entering

    def end(self) -> None:
        """Forget all tensors, as the run has ended."""
        self._entering = None
        self._kept.clear()
        self._zeros.clear()

    def stand_for(self, output: ModuleOutput, path: str) -> Callable[[], Any]:
        """A function that returns the output of a module of a part before.

        Of the leaves that do not enter, since nothing depends on them, those with the shape of a
        tensor that does are zeros, so that code that computes with them runs. Others are None.
        """
        leaves = [self._leaf(path, index, leaf) for index, leaf in enumerate(output.leaves)]
        return lambda: tree_unflatten([give() for give in leaves], output.structure)

    def _leaf(self, path: str, index: int, leaf: Any) -> Callable[[], Any]:
        if not isinstance(leaf, torch.Tensor):
            return lambda: leaf
        for tensor, place in self._place.items():
            if any((slot.path, slot.position) == (path, index) for slot in tensor.slots):
                return functools.partial(self._entered, place)
        for tensor, place in self._place.items():
            if (tensor.tensor.shape, tensor.tensor.dtype) == (leaf.shape, leaf.dtype):
                return functools.partial(self._zeros_like, place)
        return lambda: None

    def _entered(self, place: int) -> torch.Tensor:
        assert self._entering is not None
        return self._entering[place]

    def _zeros_like(self, place: int) -> torch.Tensor:
        if place not in self._zeros:
            self._zeros[place] = torch.zeros_like(self._entered(place))
        return self._zeros[place]

    def must_keep(self, behind: Boundary) -> Iterator[GivenTensor]:
        """Tensors of the part that leave it, and that the layer behind it is not given."""
        for tensor, taken in zip(behind.moving, behind.taken, strict=True):
            if taken is None and tensor not in self._place:
                yield tensor

    def leave(self, taken: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        """The tensors that leave, of those that the layer behind is given, or None for each."""
        return tuple(
            self._leaves(tensor) if value is None else value
            for tensor, value in zip(self._leaving, taken, strict=True)
        )

    def _leaves(self, tensor: GivenTensor) -> torch.Tensor:
        place = self._place.get(tensor)
        return self._kept[tensor] if place is None else self._entered(place)

    def keep(
        self, tensor: GivenTensor, position: int, module: nn.Module, args: Any, output: Any
    ) -> None:
        """A forward hook of a module that gives a tensor that leaves."""
        self._kept[tensor] = tree_flatten(output)[0][position]


class _Leaves(BaseException):  # not an Exception, which a model may catch
    """Ends a model's forward where the next part goes on."""

    def __init__(self, moving: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.moving = moving


class _Stand(nn.Module):
    """Stands in the place of a module, and has its attributes, since models read some.

    It also has stand-ins for the modules inside, which are no modules of the part's own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        attributes = vars(self)
        attributes["_inside"] = {name: _stand_for(m) for name, m in module.named_children()}
        for holder in (*_own_classes(type(module)), module):
            attributes.update(
                {
                    name: value
                    for name, value in vars(holder).items()
                    if name not in _OF_ANY_MODULE and _is_plain(value)
                }
            )

    def __getattr__(self, name: str) -> Any:
        inside = vars(self).get("_inside", {})
        if name in inside:
            return inside[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"the forward uses '{name}' of a module that is in another stage; if it changes "
                "that module, as by another kind of attention for short texts, let the model's "
                "configuration say so ahead of cg.cut_layers"
            ) from None


def _stand_for(module: nn.Module) -> nn.Module:
    """The stand-in for a module inside of another one that is left out."""
    if type(module) not in (nn.ModuleList, nn.ModuleDict, nn.Sequential):
        return _Stand(module)
    container = type(module)()
    for name, child in module.named_children():
        container.add_module(name, _stand_for(child))
    return container


_OF_ANY_MODULE = frozenset({*dir(nn.Module), *vars(nn.Module())})


def _own_classes(cls: type) -> Iterator[type]:
    """The classes between `nn.Module` and a class, which comes last."""
    return (base for base in reversed(cls.__mro__) if not issubclass(nn.Module, base))


class PartEntry(_Stand):
    """Stands for a module of a part before, and gives the tensors that have entered."""

    def __init__(self, module: nn.Module, give: Callable[[], Any]) -> None:
        super().__init__(module)
        self._give = give

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._give()


class PartExit(_Stand):
    """Stands for a layer behind the part's last one, and ends the run."""

    def __init__(self, layer: nn.Module, passage: Passage, boundary: Boundary) -> None:
        super().__init__(layer)
        self._passage, self._taken = passage, boundary.taken

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        raise _Leaves(
            self._passage.leave([None if at is None else leaves[at] for at in self._taken])
        )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _as_tuple(moving: Moving | None) -> tuple[torch.Tensor, ...] | None:
    return (moving,) if isinstance(moving, torch.Tensor) else moving
