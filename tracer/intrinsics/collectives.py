"""Collectives over values of actors on different ranks.

Each is defined by what it does to a list of plain tensors. In a step, where the values are on
different single ranks, it is recorded as a collective op; otherwise its definition is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...ir.attributes import ReduceOp
from ...ir.location import Location
from ...ir.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    ReduceScatter,
    Scatter,
    Value,
)
from ...ir.types import Place, TensorType, UnitType
from ..actors.actors import ActorHandle
from ..errors import TraceError
from ..source import caller_location
from ..step.session import Session, recording
from ..step.specs import TensorSpec
from ..step.values import ObjectValue, Traced, TracedTensor

Tensors = Sequence[torch.Tensor]


def all_reduce(values: Tensors, op: str = "sum") -> list[torch.Tensor]:
    """Combine tensors elementwise; each rank gets the result.

    Args:
        values: tensors of one dtype and shape, one for each rank of the group.
        op: "sum", "avg", "prod", "min" or "max".

    Returns:
        The result as often as there are values: the i-th is for the rank of the i-th value.
    """
    _check_tensors("all_reduce", values)
    reduction = _reduction("all_reduce", op, values)
    group = _group("all_reduce", values)
    if group is None:
        total = _combine(values, reduction)
        return [total.clone() for _ in values]
    return group.copies(*group.emit(AllReduce, group.shape, op=reduction))


def all_gather(values: Tensors, dim: int = 0) -> list[torch.Tensor]:
    """Concatenate tensors of one dtype and shape along `dim`; each rank gets the result.

    Returns:
        The result as often as there are values: the i-th is for the rank of the i-th value.
    """
    _check_tensors("all_gather", values)
    dim = _dimension("all_gather", values, dim)
    group = _group("all_gather", values)
    if group is None:
        whole = torch.cat(list(values), dim)
        return [whole.clone() for _ in values]
    shape = _resized(group.shape, dim, group.shape[dim] * len(values))
    return group.copies(*group.emit(AllGather, shape, dim=dim))


def reduce_scatter(values: Tensors, op: str = "sum", dim: int = 0) -> list[torch.Tensor]:
    """Combine tensors elementwise, and give each rank its part along `dim`.

    Args:
        values: tensors of one dtype and shape, one for each rank of the group.
        op: as in `all_reduce`.
        dim: the dimension that is divided; its size is a multiple of the number of values.

    Returns:
        The parts in order: the i-th is for the rank of the i-th value.
    """
    _check_tensors("reduce_scatter", values)
    reduction = _reduction("reduce_scatter", op, values)
    dim = _dimension("reduce_scatter", values, dim, len(values))
    group = _group("reduce_scatter", values)
    if group is None:
        return _parts(_combine(values, reduction), len(values), dim)
    shape = _resized(group.shape, dim, group.shape[dim] // len(values))
    return group.emit(ReduceScatter, shape, op=reduction, dim=dim)


def all_to_all(values: Tensors, dim: int = 0) -> list[torch.Tensor]:
    """Rank i gives the j-th part of its tensor to rank j, and concatenates what it gets.

    Args:
        values: tensors of one dtype and shape, one for each rank of the group.
        dim: the dimension that is divided; its size is a multiple of the number of values.

    Returns:
        One tensor for the rank of each value, of the same shape.
    """
    _check_tensors("all_to_all", values)
    dim = _dimension("all_to_all", values, dim, len(values))
    group = _group("all_to_all", values)
    if group is None:
        cut = [_parts(value, len(values), dim) for value in values]
        return [torch.cat([parts[i] for parts in cut], dim) for i in range(len(values))]
    return group.emit(AllToAll, group.shape, dim=dim)


def broadcast(value: torch.Tensor, actors: Sequence[ActorHandle]) -> list[torch.Tensor]:
    """Give a tensor to the ranks of all `actors`.

    Returns:
        The tensor as often as there are actors: the i-th is for the rank of the i-th actor.
    """
    what, loc = "broadcast", caller_location(2)
    session = recording(f"cg.{what}")
    _check_actors(what, actors, f"{_AN_ACTOR}: cg.broadcast(value, [a, b])")
    if session is None:
        return [value.clone() for _ in actors]
    _check_tensors(what, [value])
    root = _traced(session, value, what, loc)
    at = root.value.type.place
    assert at is not None
    ranks = dict.fromkeys(actor.rank for actor in actors)
    if not at.is_single or set(ranks) <= set(at.ranks):
        return [value.clone() for _ in actors]
    members = tuple(ranks) if at.rank in ranks else (at.rank, *ranks)
    group = _Group(session, what, Place(members), [root], loc)
    (result,) = group.emit(Broadcast, group.shape, root=at.rank)
    return [result, *(group.again(result) for _ in actors[1:])]


def gather(values: Tensors, root: ActorHandle, dim: int = 0) -> torch.Tensor:
    """Concatenate tensors of one dtype and shape along `dim`, on the rank of `root` alone.

    Args:
        values: tensors, one for each rank of the group.
        root: an actor on the rank that gets them. Where none of the tensors is on its rank, they
            are concatenated where the result is used.
        dim: the dimension along which they are concatenated.

    Returns:
        The concatenation; other ranks that use it get it from the root.
    """
    _check_actors("gather", [root], "an actor: cg.gather(values, root=a)")
    _check_tensors("gather", values)
    dim = _dimension("gather", values, dim)
    group = _group("gather", values)
    if group is None or root.rank not in group.ranks:
        return torch.cat(list(values), dim)
    shape = _resized(group.shape, dim, group.shape[dim] * len(values))
    (whole,) = group.emit(Gather, shape, root=root.rank, dim=dim)
    return whole


def scatter(value: torch.Tensor, actors: Sequence[ActorHandle], dim: int = 0) -> list[torch.Tensor]:
    """Give the ranks of `actors` equal parts of a tensor along `dim`.

    Args:
        value: a tensor on the rank of one of the actors, the root; from elsewhere, each part
            travels to where it is used.
        actors: those that get the parts, in order.
        dim: the dimension that is divided; its size is a multiple of the number of actors.

    Returns:
        The parts in order: the i-th is for the rank of the i-th actor.
    """
    _check_actors("scatter", actors, f"{_AN_ACTOR}: cg.scatter(value, [a, b])")
    _check_tensors("scatter", [value])
    dim = _dimension("scatter", [value], dim, len(actors))
    session, loc = recording("cg.scatter"), caller_location(2)
    if session is None:
        return _parts(value, len(actors), dim)
    root = _traced(session, value, "scatter", loc)
    at, ranks = root.value.type.place, tuple(actor.rank for actor in actors)
    distinct = 1 < len(actors) == len(set(ranks))
    if at is None or not at.is_single or at.rank not in ranks or not distinct:
        return _parts(value, len(actors), dim)
    group = _Group(session, "scatter", Place(ranks), [root], loc)
    shape = _resized(group.shape, dim, group.shape[dim] // len(actors))
    return group.emit(Scatter, shape, root=at.rank, dim=dim)


class _Group:
    """The values of a collective on the ranks `ranks`, and the trace to record it in."""

    def __init__(
        self,
        session: Session,
        what: str,
        ranks: Place,
        values: Sequence[Traced],
        loc: Location | None,
    ) -> None:
        self._session = session
        self._what = what
        self.ranks = ranks
        self._values = values
        self._loc = loc

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each value."""
        spec = self._values[0].spec
        assert isinstance(spec, TensorSpec)
        return spec.shape

    def emit(
        self, cls: type[Collective], shape: tuple[int, ...], **attributes: Any
    ) -> list[torch.Tensor]:
        """Record the op; the tensors, of one shape, that it gives to those who receive any."""
        session, spec = self._session, self._values[0].spec
        type_ = self._values[0].value.type
        assert isinstance(spec, TensorSpec)
        assert isinstance(type_, TensorType)
        needed = tuple(_requires_grad(traced) for traced in self._values)
        operands = tuple(traced.value for traced in self._values)
        op = cls(operands, group=self.ranks, loc=self._loc, mb=session.mb, **attributes)
        given: list[Value] = []
        results: list[Value] = []
        for place in op.result_places:
            gets = place.ranks[0] in op.exchange.receivers
            result = TensorType(type_.dtype, shape, place) if gets else UnitType(place)
            results.append(session.new_value(self._what, result))
            given += results[-1:] if gets else ()
        op.results = tuple(results)
        session.emit(op)
        session.tape.record(op, None, needed, session.last)
        made = TensorSpec(spec.dtype, shape, any(needed))
        held = [session.hold(value, made) for value in given]
        return [value for value in held if isinstance(value, TracedTensor)]

    def copies(self, result: torch.Tensor) -> list[torch.Tensor]:
        """The result once for each rank, as tensors that can be written to one by one."""
        return [result, *(self.again(result) for _ in self.ranks.ranks[1:])]

    def again(self, result: torch.Tensor) -> torch.Tensor:
        """Another tensor that stands for the same value."""
        assert isinstance(result, TracedTensor)
        traced = result.traced
        held = self._session.hold(traced.value, traced.spec)
        assert isinstance(held, TracedTensor)
        return held


def _check_actors(what: str, actors: Sequence[object], example: str) -> None:
    """Raise unless there are actors, and nothing else."""
    if not actors or not all(isinstance(actor, ActorHandle) for actor in actors):
        raise TraceError(
            f"cg.{what} to something other than actors",
            loc=caller_location(3),
            remedy=f"give {example}",
        )


def _check_tensors(what: str, values: Sequence[object]) -> None:
    """Return if all values are tensors.

    Raises:
        TraceError: one of them is something else.
    """
    for value in values:
        if isinstance(value, ObjectValue):
            raise TraceError(
                f"cg.{what} of %{value.traced.value.name}, an object that is known only when the "
                "step runs; collectives are of tensors",
                loc=caller_location(3),
                remedy="if the method returns a tensor, say which by @cg.opaque(fake=...), as in "
                "@cg.opaque(fake=lambda self, x: torch.empty(4)); other objects are combined in an "
                "actor's method that takes them",
            )
        if not isinstance(value, torch.Tensor):
            raise TraceError(
                f"cg.{what} of a {type(value).__name__}, which is not a tensor of the step",
                loc=caller_location(3),
                remedy=_GIVE_TENSORS,
            )


_AN_ACTOR = "a list of at least one actor"
_GIVE_TENSORS = "give it tensors that actors' methods returned"


def _group(what: str, values: Tensors) -> _Group | None:
    """The group of a collective that is to be recorded; None where its definition will do."""
    session = recording(f"cg.{what}")
    loc = caller_location(3)
    if not values:
        raise TraceError(f"cg.{what} of no values", loc=loc, remedy="give it at least one tensor")
    first = values[0]
    for index, value in enumerate(values):
        if value.dtype is not first.dtype or value.shape != first.shape:
            raise TraceError(
                f"cg.{what} of tensors that differ: value 0 is {_described(first)}, value "
                f"{index} is {_described(value)}",
                loc=loc,
                remedy="give it tensors of one dtype and shape",
            )
    if session is None:
        return None
    traced = [_traced(session, value, what, loc) for value in values]
    places = [value.value.type.place for value in traced]
    ranks = {place.rank for place in places if place is not None and place.is_single}
    if len(values) == 1 or len(ranks) < len(values):
        return None
    members = tuple(place.rank for place in places if place is not None)
    return _Group(session, what, Place(members), traced, loc)


def _traced(session: Session, value: object, what: str, loc: Location | None) -> Traced:
    if not isinstance(value, TracedTensor):
        raise TraceError(
            f"cg.{what} of a {type(value).__name__}, which is not a tensor of the step",
            loc=loc,
            remedy=_GIVE_TENSORS,
        )
    with torch._C.DisableTorchFunction():
        return session.use(value)


def _requires_grad(traced: Traced) -> bool:
    spec = traced.spec
    return isinstance(spec, TensorSpec) and spec.requires_grad and torch.is_grad_enabled()


def _reduction(what: str, op: str, values: Tensors) -> ReduceOp:
    try:
        reduction = ReduceOp(op)
    except ValueError:
        known = ", ".join(repr(reduction.value) for reduction in ReduceOp)
        raise TraceError(
            f"cg.{what} with op={op!r}", loc=caller_location(3), remedy=f"op is one of {known}"
        ) from None
    if reduction is ReduceOp.AVG and any(not value.is_floating_point() for value in values):
        raise TraceError(
            f"cg.{what} with op='avg' of tensors that are not floating",
            loc=caller_location(3),
            remedy="convert them, for example by .float(), or use op='sum'",
        )
    return reduction


def _dimension(what: str, values: Tensors, dim: int, parts: int = 1) -> int:
    """The dimension, counted from the first; it can be divided into as many parts."""
    if not values:
        return 0  # `_group` says what is wrong
    shape = values[0].shape
    if not -len(shape) <= dim < len(shape):
        raise TraceError(
            f"cg.{what} along dimension {dim} of a tensor with {len(shape)}",
            loc=caller_location(3),
            remedy="give a dimension that the tensors have",
        )
    dim %= len(shape)
    if shape[dim] % parts:
        raise TraceError(
            f"cg.{what} divides dimension {dim}, of size {shape[dim]}, among {parts} ranks",
            loc=caller_location(3),
            remedy=f"make its size a multiple of {parts}",
        )
    return dim


_COMBINE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PROD: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


def _combine(values: Tensors, op: ReduceOp) -> torch.Tensor:
    total = functools.reduce(_COMBINE[op], values)
    return total / len(values) if op is ReduceOp.AVG else total


def _parts(value: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    return [part.clone() for part in torch.split(value, value.shape[dim] // count, dim)]


def _resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _described(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return f"{name}[{','.join(map(str, tensor.shape))}]"
