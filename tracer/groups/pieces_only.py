"""Refuse work on pieces that would be other work on the whole: norms, say, and products.

An opaque method of an actor on a mesh runs on each rank with its pieces. An optimizer that works
element by element does there what it does to the whole tensors. A norm of a piece is not that of
the whole, and ranks would scale by different numbers. So in its first calls each operator is looked
at: what works element by element on pieces makes pieces, and nothing else may take them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...ir.layout import Layout
from ..actors.actor_state import collect
from ..actors.optimizer_state import kept_by_optimizers
from ..functions.error_translation import current_location
from ..functions.interface import Bodies, Body, RankBodies
from ..layouts.rules.pointwise import is_entrywise
from .group import Group, GroupActor
from .piece_memory import PieceMemory

_LOOKS = 3
"""In how many calls of an opaque method operators are looked at."""

_ATEN = torch.ops.aten

_NOT_ELEMENTWISE: tuple[type, ...] = (
    torch.optim.LBFGS,
    torch.optim.Adafactor,
    torch.optim.SparseAdam,
    *((torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()),
)

_LIKE = frozenset(
    {
        *("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("lift_fresh", "view_as_complex", "view_as_real", "_neg_view"),
    }
)
"""Operators whose results are pieces as their operands are, beside those that work on entries."""

_NEW = frozenset({"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"})
"""Operators that take no more than the element type and the device of a piece."""

_RESHAPING = frozenset(
    {
        *("_reshape_alias", "_unsafe_view", "expand", "slice", "squeeze", "view"),
    }
)
"""Operators that may be called on a piece if they give all of it, in its shape."""

_LEAVING: dict[Any, str] = {
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.__array__: "a NumPy function",
    torch.Tensor.__dlpack__: "Tensor.__dlpack__",
}
"""Functions whose results are no tensors of torch: nobody sees what becomes of them."""


def refuse_optimizers(trainers: Iterable[object], actor: str) -> None:
    """Refuse optimizers that do not work element by element.

    Raises:
        ValueError: there is one.
    """
    for trainer in trainers:
        if isinstance(trainer, _NOT_ELEMENTWISE):
            raise ValueError(
                f"{actor} trains pieces of tensors by {type(trainer).__name__}, which looks at "
                "whole tensors; take an optimizer that works element by element, such as AdamW, "
                "or leave the tensors whole"
            )


def watching_pieces(body: Bodies, group: Group, name: str) -> Bodies:
    """The body of an opaque method, for each rank that this process plays.

    In its first calls it raises a RuntimeError where an operator takes a piece, and does not work
    element by element.
    """
    actor = group.actor
    if actor is None or not group.has_layouts:
        return body
    bodies = {}
    for rank in actor.instances:
        own = body.at(rank) if isinstance(body, RankBodies) else body
        bodies[rank] = _watched(own, _Watched(actor, rank, name))
    return RankBodies.of(bodies)


@dataclass(frozen=True)
class _Watched:
    """An opaque method on a rank.

    Attributes:
        actor, rank: whose it is.
        name: of the function.
    """

    actor: GroupActor
    rank: int
    name: str

    def pieces(self) -> PieceMemory:
        """The pieces that are there when it is called."""
        memory = self.actor.memory.setdefault(self.rank, PieceMemory())
        memory.forget_freed()
        tensors = self.actor.tensors(self.rank)
        for path, layout in self.actor.layouts.items():
            tensor = tensors.get(path)
            if tensor is not None:
                memory.note(tensor, layout)
                if tensor.grad is not None:
                    memory.note(tensor.grad, layout)
        layouts = self.actor.layouts
        for kept in kept_by_optimizers(collect(self.actor.instances[self.rank])):
            if kept.parameter.path in layouts:
                memory.note(kept.tensor, layouts[kept.parameter.path])
        return memory


def _watched(body: Body, method: _Watched) -> Body:
    looks = _LOOKS

    @functools.wraps(body)
    def run(*inputs: Any) -> Sequence[Any]:
        nonlocal looks
        if not looks:
            return body(*inputs)
        looks -= 1
        with elementwise_alone(method.pieces(), method.name):
            return body(*inputs)

    return run


@contextmanager
def elementwise_alone(pieces: PieceMemory, name: str) -> Iterator[None]:
    """Inside the `with` block operators take pieces only if they work element by element.

    Args:
        pieces: those that are known; those that are made of them are added.
        name: of the function that runs there.
    """
    with _Leaving(pieces, name), _Operators(pieces, name):
        yield


class _Leaving(TorchFunctionMode):
    """Refuses functions that make of a piece what is no tensor."""

    def __init__(self, pieces: PieceMemory, name: str) -> None:
        super().__init__()
        self._pieces = pieces
        self._name = name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _LEAVING and self._pieces.layout(args[0]) is not None:
            raise _refusal(self._name, _LEAVING[func])
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that take pieces, and notes those that others make."""

    def __init__(self, pieces: PieceMemory, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pieces = pieces
        self._name = name

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if all(self._layout(value) is None for value in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        name = _name_of(func)
        if not (_may_take_pieces(func) or name in _RESHAPING or self._is_masked_fill(func, args)):
            with self:  # in inference mode torch has not taken an operator apart yet
                made = func.decompose(*args, **kwargs)
            if made is NotImplemented:
                raise _refusal(self._name, name)
            return made
        rows = [*_rows(func, args, kwargs)]
        layouts = [self._only_layout(row, name) for row in rows]
        result = func(*args, **kwargs)
        if name in _RESHAPING and result.shape != args[0].shape:
            raise _refusal(self._name, name)
        made = list(result) if isinstance(result, (list, tuple)) else [result]
        for index, (row, layout) in enumerate(zip(rows, layouts, strict=True)):
            for tensor in (*row.written, *(made[index : index + 1] if len(rows) > 1 else made)):
                if layout is not None and isinstance(tensor, torch.Tensor) and name not in _NEW:
                    self._pieces.note(tensor, layout)
        return result

    def _layout(self, value: object) -> Layout | None:
        return self._pieces.layout(value) if isinstance(value, torch.Tensor) else None

    def _only_layout(self, row: _Row, name: str) -> Layout | None:
        """The layout of the pieces that an operator combines; None if there are none."""
        found = {layout for value in row.taken if (layout := self._layout(value)) is not None}
        if len(found) > 1:
            raise _refusal(self._name, name, "with one that is cut otherwise")
        return next(iter(found), None)

    def _is_masked_fill(self, func: torch._ops.OpOverload, args: Any) -> bool:
        """Whether it is `x[mask] = number`, with a mask of all of x."""
        if func is not _ATEN.index_put_.default or len(args[1]) != 1:
            return False
        written, (mask,), value = args[:3]
        is_mask = mask is not None and mask.dtype == torch.bool and mask.shape == written.shape
        return is_mask and value.numel() == 1 and self._layout(value) is None


@dataclass(frozen=True)
class _Row:
    """The tensors that an operator combines; of one on lists, those of one index.

    Attributes:
        taken: all of them.
        written: those that it writes to.
    """

    taken: Sequence[object]
    written: Sequence[object]


def _rows(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Iterator[_Row]:
    schema = func._schema.arguments
    given = [(argument, value) for argument, value in zip(schema, args, strict=False)]
    given += [(argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs]
    writes = [argument.is_write for argument, _ in given]
    values = [value for _, value in given]
    count = max((len(v) for v in values if _is_list(v)), default=1)
    for index in range(count):
        row = [_at(value, index) for value in values]
        yield _Row(row, [value for value, is_write in zip(row, writes, strict=True) if is_write])


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value)


def _at(value: Any, index: int) -> object:
    """What an operator on lists takes of an argument for an index; lists may be left empty."""
    if not _is_list(value):
        return value
    return value[index] if index < len(value) else None


def _name_of(func: torch._ops.OpOverload) -> str:
    return func._schema.name.removeprefix("aten::")


def _may_take_pieces(func: torch._ops.OpOverload) -> bool:
    name = _name_of(func)
    return is_entrywise(func) or name in _LIKE or name in _NEW


def _refusal(method: str, operator: str, how: str = "") -> RuntimeError:
    loc, note = current_location()
    name = {"_local_scalar_dense": "item"}.get(operator, operator)
    at = f"\n  at {loc}" if loc is not None else ""
    return RuntimeError(
        f"the opaque method @{method} takes {name} of a piece of a tensor that is cut over ranks"
        f"{' ' if how else ''}{how}, which is not that of the whole{note}{at}\n  help: "
        "ranks may work on pieces element by element alone. Clip gradients in the step: "
        "cg.clip_grad_norm([actor], max_norm) before the update. Let a traced method compute "
        "what needs the whole tensor, and give it to this one as an argument; or leave the "
        "tensor whole"
    )
