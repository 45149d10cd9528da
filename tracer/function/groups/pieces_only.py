"""Refuse opaque methods on a mesh that would compute something else in one process.

An opaque method of an actor on a mesh runs on each rank with its pieces. An optimizer that works
element by element gives the same there as on whole tensors. But the norm of a piece is not the norm
of the whole, and ranks would scale by different numbers. So each operator is checked: only
elementwise operators may take pieces, and their results are pieces. Operators that draw random
numbers need a generator that ranks seed alike.

An AdamW step of 100 small tensors takes 0.6 ms (fused), 2 ms (foreach) or 4 ms, and 5 to 70 ms more
while it is checked. A mode that does nothing would still add 30 to 300 %. So only some calls are
checked.
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

from ....ir.layout import Layout
from ...error_translation import current_location
from ...graph.layouts.rules.pointwise import is_entrywise
from ...sampled import until_next
from ...values.actor_state import collect
from ...values.group import Group, GroupActor
from ...values.interface import Bodies, Body, RankBodies
from ...values.operators import is_random
from ...values.optimizer_state import kept_by_optimizers
from ...values.pieces import PieceMemory
from .draws import GENERATOR_REMEDY, PIECE_REMEDY, Drawn, takes_own_generator

_WHOLE_REMEDY = (
    "ranks may work on pieces element by element alone. Clip gradients in the step: "
    "cg.clip_grad_norm([actor], max_norm) before the update. Let a traced method compute what "
    "needs the whole tensor, and give it to this one as an argument; or leave the tensor whole"
)

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
"""Operators that give pieces for pieces, beside the elementwise ones."""

_NEW = frozenset({"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"})
"""Operators that use only the dtype and the device of a piece."""

_RESHAPING = frozenset(
    {
        *("_reshape_alias", "_unsafe_view", "expand", "slice", "squeeze", "view"),
    }
)
"""Operators that may take a piece if their result has its shape, and so all of its entries."""

_LEAVING: dict[Any, str] = {
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.__array__: "a NumPy function",
    torch.Tensor.__dlpack__: "Tensor.__dlpack__",
}
"""Functions whose results are not torch tensors, so that later work on them cannot be checked."""


def refuse_optimizers(trainers: Iterable[object], actor: str) -> None:
    """Refuse optimizers that do not work element by element.

    Args:
        trainers: the optimizers and schedulers of an actor.
        actor: the actor's name, for messages.

    Raises:
        ValueError: one of the trainers does not work element by element.
    """
    for trainer in trainers:
        if isinstance(trainer, _NOT_ELEMENTWISE):
            raise ValueError(
                f"{actor} trains pieces of tensors by {type(trainer).__name__}, which looks at "
                "whole tensors; take an optimizer that works element by element, such as AdamW, "
                "or leave the tensors whole"
            )


class OperatorWatch:
    """Checks the operators in some calls of an opaque method of an actor on a mesh.

    In these calls, the wrapped bodies raise a RuntimeError if an operator takes a piece and is not
    elementwise, or draws other numbers on each rank.

    Args:
        group: the ranks that call the method.
        name: the function's name.
    """

    def __init__(self, group: Group, name: str) -> None:
        actor = group.actor
        watched = () if actor is None or len(group.place.ranks) == 1 else actor.instances
        self._methods = {
            rank: _WatchedMethod(actor, rank, name) for rank in watched if actor is not None
        }

    def around(self, body: Bodies) -> Bodies:
        """Wrap a body, for each rank that this process plays.

        All bodies that one `OperatorWatch` wraps share one count of calls for each rank.
        """
        if not self._methods:
            return body
        bodies = {}
        for rank, method in self._methods.items():
            own = body.at(rank) if isinstance(body, RankBodies) else body
            bodies[rank] = _watched(own, method)
        return RankBodies.of(bodies)


class _WatchedMethod:
    """An opaque method on a rank, and the choice of the calls that are checked.

    Args:
        actor: the actor on a mesh.
        rank: the rank.
        name: the function's name.
    """

    def __init__(self, actor: GroupActor, rank: int, name: str) -> None:
        self.actor = actor
        self.rank = rank
        self.name = name
        self._calls = 0
        self._next = 0
        self._last = 0

    def begin(self) -> str | None:
        """Count a call, and decide whether to check it.

        Returns:
            None if the call is not checked. Otherwise a text for errors about the unchecked calls
            before it; empty if there are none.
        """
        number = self._calls
        self._calls += 1
        if number != self._next:
            return None
        last, self._last = self._last, number
        self._next = number + until_next(number)
        if number <= last + 1:
            return ""
        return (
            f"\n  this is call {number + 1} of the method. Call {last + 1} was the last that was "
            "looked at, and those since may have computed other numbers already: go back to a "
            "checkpoint from before"
        )

    def pieces(self) -> PieceMemory:
        """The memory of the pieces that exist when the method is called."""
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
        for optimizer_tensor in kept_by_optimizers(collect(self.actor.instances[self.rank])):
            if optimizer_tensor.parameter.path in layouts:
                memory.note(optimizer_tensor.tensor, layouts[optimizer_tensor.parameter.path])
        return memory


def _watched(body: Body, method: _WatchedMethod) -> Body:
    @functools.wraps(body)
    def run(*inputs: Any) -> Sequence[Any]:
        since = method.begin()
        if since is None:
            return body(*inputs)
        with as_in_one_process(method.pieces(), method.name, since):
            return body(*inputs)

    return run


@contextmanager
def as_in_one_process(pieces: PieceMemory, name: str, since: str = "") -> Iterator[None]:
    """Refuse operators in the `with` block that take pieces and are not elementwise.

    Operators that draw from the process's own generator, or for pieces, are refused as well.

    Args:
        pieces: the known pieces; those that operators make of them are added.
        name: the name of the function that runs in the block.
        since: a text that errors append.

    Raises:
        RuntimeError: the block calls such an operator.
    """
    method = _Method(name, since)
    with _Leaving(pieces, method), _Operators(pieces, method):
        yield


@dataclass(frozen=True)
class _Method:
    """An opaque method, as errors name it.

    Attributes:
        name: the function's name.
        since: a text that errors append.
    """

    name: str
    since: str

    def not_elementwise(self, operator: str, how: str = "") -> RuntimeError:
        """The error for an operator that takes pieces and is not elementwise."""
        name = {"_local_scalar_dense": "item"}.get(operator, operator)
        return self._refusal(
            f"takes {name} of a piece of a tensor that is cut over ranks{' ' if how else ''}{how}, "
            "which is not that of the whole",
            _WHOLE_REMEDY,
        )

    def draws(self, operator: str) -> RuntimeError:
        """The error for an operator that draws other numbers on each rank."""
        return self._refusal(
            f"draws numbers by {operator} from its process's own generator, which gives each rank "
            "of the mesh other ones",
            GENERATOR_REMEDY,
        )

    def draws_for_piece(self, operator: str) -> RuntimeError:
        """The error for an operator that draws for a piece, or uses drawn numbers for one."""
        return self._refusal(
            f"takes {operator} of a piece of a tensor that is cut over ranks with numbers that it "
            "draws: ranks draw other numbers, or the same for different pieces, and never those "
            "that one process draws for the whole",
            PIECE_REMEDY,
        )

    def _refusal(self, violation: str, remedy: str) -> RuntimeError:
        loc, note = current_location()
        at = f"\n  at {loc}" if loc is not None else ""
        return RuntimeError(
            f"the opaque method @{self.name} {violation}{note}{at}{self.since}\n  help: {remedy}"
        )


class _Leaving(TorchFunctionMode):
    """Refuses functions that turn a piece into something other than a tensor."""

    def __init__(self, pieces: PieceMemory, method: _Method) -> None:
        super().__init__()
        self._pieces = pieces
        self._method = method

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _LEAVING and self._pieces.layout(args[0]) is not None:
            raise self._method.not_elementwise(_LEAVING[func])
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators as `as_in_one_process` says, and notes the pieces that others make."""

    def __init__(self, pieces: PieceMemory, method: _Method) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pieces = pieces
        self._method = method
        self._drawn = Drawn()

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_random(func, args, kwargs):
            return self._draw(func, args, kwargs)
        if not self._takes_pieces(args, kwargs):
            result = func(*args, **kwargs)
            self._drawn.follow(func, args, kwargs, result)
            return result
        name = _name_of(func)
        if not (_may_take_pieces(func) or name in _RESHAPING or self._is_masked_fill(func, args)):
            with self:  # in inference mode torch has not decomposed the operator yet
                outputs = func.decompose(*args, **kwargs)
            if outputs is NotImplemented:
                raise self._method.not_elementwise(name)
            return outputs
        rows = [*_rows(func, args, kwargs)]
        layouts = [self._only_layout(row, name) for row in rows]
        result = func(*args, **kwargs)
        if name in _RESHAPING and result.shape != args[0].shape:
            raise self._method.not_elementwise(name)
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        for index, (row, layout) in enumerate(zip(rows, layouts, strict=True)):
            for tensor in (
                *row.written,
                *(outputs[index : index + 1] if len(rows) > 1 else outputs),
            ):
                if layout is not None and isinstance(tensor, torch.Tensor) and name not in _NEW:
                    self._pieces.note(tensor, layout)
        return result

    def _draw(self, func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        if self._takes_pieces(args, kwargs):
            raise self._method.draws_for_piece(_name_of(func))
        if not takes_own_generator(args, kwargs):
            raise self._method.draws(_name_of(func))
        result = func(*args, **kwargs)
        self._drawn.note(result)
        return result

    def _takes_pieces(self, args: Any, kwargs: Any) -> bool:
        return any(self._layout(value) is not None for value in tree_leaves((args, kwargs)))

    def _layout(self, value: object) -> Layout | None:
        return self._pieces.layout(value) if isinstance(value, torch.Tensor) else None

    def _only_layout(self, row: _CombinedTensors, name: str) -> Layout | None:
        """The layout of the pieces that an operator combines; None if there are none."""
        layouts = {layout for value in row.taken if (layout := self._layout(value)) is not None}
        if len(layouts) > 1:
            raise self._method.not_elementwise(name, "with one that is cut otherwise")
        layout = next(iter(layouts), None)
        if layout is not None and any(self._drawn.differ(value, layout) for value in row.taken):
            raise self._method.draws_for_piece(name)
        return layout

    def _is_masked_fill(self, func: torch._ops.OpOverload, args: Any) -> bool:
        """Whether a call is `x[mask] = number`, where the mask has the shape of `x`."""
        if func is not _ATEN.index_put_.default or len(args[1]) != 1:
            return False
        written, (mask,), value = args[:3]
        is_mask = mask is not None and mask.dtype == torch.bool and mask.shape == written.shape
        return is_mask and value.numel() == 1 and self._layout(value) is None


@dataclass(frozen=True)
class _CombinedTensors:
    """The operands that an operator combines; an operator on lists has a row for each index.

    Attributes:
        taken: all operands.
        written: the operands that the operator writes to.
    """

    taken: Sequence[object]
    written: Sequence[object]


def _rows(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Iterator[_CombinedTensors]:
    schema = func._schema.arguments
    arguments = [(argument, value) for argument, value in zip(schema, args, strict=False)]
    arguments += [
        (argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs
    ]
    writes = [argument.is_write for argument, _ in arguments]
    values = [value for _, value in arguments]
    count = max((len(v) for v in values if _is_list(v)), default=1)
    for index in range(count):
        row = [_at(value, index) for value in values]
        yield _CombinedTensors(
            row, [value for value, is_write in zip(row, writes, strict=True) if is_write]
        )


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value)


def _at(value: Any, index: int) -> object:
    """The element of an argument at an index; the argument itself if it is not a list of tensors.

    None if the list is too short: operators on lists take empty lists for unused arguments.
    """
    if not _is_list(value):
        return value
    return value[index] if index < len(value) else None


def _name_of(func: torch._ops.OpOverload) -> str:
    return func._schema.name.removeprefix("aten::")


def _may_take_pieces(func: torch._ops.OpOverload) -> bool:
    name = _name_of(func)
    return is_entrywise(func) or name in _LIKE or name in _NEW
