"""A stage of a cut model, which runs a part of the model's own forward.

A part is the model, without the tensors and layers of other stages. In their place stand layers
that let in what the stage before has made, and one that ends the run where the next stage goes on.
So no line of the model's code is changed, and what it computes around its layers, such as masks and
rotary tables, it computes from the inputs in each stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .analysis import Boundary

Moving: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""The tensors that go from a stage to the next one; several only if the layers give several."""


class ModelPart(nn.Module):
    """Some layers of a model, and what it computes before or after them, if they are its ends.

    Its parameters and buffers have the names that they have in the model, behind `model.`.

    Attributes:
        model: the model, reduced to this part.
        borrowed: the names of parameters that it uses and another part has.
        lent: the names of its own parameters that others use.
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
        self._passage.entering = _as_tuple(entering)
        try:
            with self._filled(lent or {}):
                return self._checked(self.model(*args, **kwargs))
        except _Leaves as leaving:
            moving = leaving.moving
            return moving[0] if len(moving) == 1 else moving
        finally:
            self._passage.entering = None

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
        is_partial = self._passage.boundary is not None and isinstance(result, Mapping)
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
    """The tensors that enter a part, while it runs.

    Args:
        boundary: the tensors that the part before gives; None for the first part.
    """

    def __init__(self, boundary: Boundary | None) -> None:
        self.boundary = boundary
        self.entering: tuple[torch.Tensor, ...] | None = None

    @property
    def taken(self) -> int:
        return 0 if self.boundary is None else len(self.boundary.moving)

    def give(self) -> Any:
        """Return the tensors that have entered, as the output of the layer in front."""
        assert self.boundary is not None
        assert self.entering is not None
        leaves = list(self.boundary.leaves)
        for (position, _), tensor in zip(self.boundary.moving, self.entering, strict=True):
            leaves[position] = tensor
        return tree_unflatten(leaves, self.boundary.structure)


class _Leaves(BaseException):  # not an Exception, which a model may catch
    """Ends a model's forward where the next part goes on."""

    def __init__(self, moving: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.moving = moving


class _Stand(nn.Module):
    """Stands in the place of a layer, and has its attributes, since models read some."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        attributes = vars(self)
        attributes.update(
            {k: v for k, v in vars(layer).items() if k not in attributes and _is_plain(v)}
        )


class PartEntry(_Stand):
    """Stands for a layer before the part's own, and gives the tensors that have entered."""

    def __init__(self, layer: nn.Module, passage: Passage) -> None:
        super().__init__(layer)
        self._passage = passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._passage.give()


class PartExit(_Stand):
    """Stands for the layer behind the part's last one, and ends the run with its own inputs."""

    def __init__(self, layer: nn.Module, boundary: Boundary) -> None:
        super().__init__(layer)
        self._taken = tuple(position for _, position in boundary.moving)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        raise _Leaves(tuple(leaves[position] for position in self._taken))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _as_tuple(moving: Moving | None) -> tuple[torch.Tensor, ...] | None:
    return (moving,) if isinstance(moving, torch.Tensor) else moving
