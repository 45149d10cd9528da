"""Collectives over values of actors on different ranks.

Each collective is defined as a function of a list of plain tensors. If the values of a step are on
different single ranks, a collective op is recorded. Otherwise the torch functions of the
definition are recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....ir.attributes import ReduceOp
from ....ir.location import Location
from ....ir.ops import (
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
from ....ir.types import Place, TensorType, UnitType
from ...errors import TraceError
from ...source import caller_location
from ...values.interface import requires_grad
from ...values.specs import TensorSpec, show_type
from ...values.values import ObjectValue, Traced, TracedTensor
from ..actors.actors import ActorHandle
from ..session.session import Session, recording

Tensors = Sequence[torch.Tensor]


def all_reduce(values: Tensors, op: str = "sum") -> list[torch.Tensor]:
    """Combine tensors elementwise; each rank gets the result.

    Args:
        values: tensors of one dtype and shape, one for each rank of the group.
        op: "sum", "avg", "prod", "min" or "max".

    Returns:
        A tensor for each value, all equal: the i-th is for the rank of the i-th value.

    Raises:
        TraceError: there are no values; one is not a tensor; they differ in dtype or shape; `op`
            is not one of these, or is "avg" for integers.
    """
    group = _group("all_reduce", values)
    reduction = group.reduction(op)
    if group.is_local:
        total = group.combine(reduction)
        return [total.clone() for _ in values]
    (total,) = group.emit(AllReduce, group.shape, op=reduction)
    return group.copies(total, len(values))


def all_gather(values: Tensors, dim: int = 0) -> list[torch.Tensor]:
    """Concatenate tensors of one dtype and shape along `dim`; each rank gets the result.

    Args:
        values: tensors of one dtype and shape, one for each rank of the group.
        dim: the dimension along which they are concatenated.

    Returns:
        A tensor for each value, all equal: the i-th is for the rank of the i-th value.

    Raises:
        TraceError: there are no values; one is not a tensor; they differ in dtype or shape; they
            have no dimension `dim`.
    """
    group = _group("all_gather", values)
    dim = group.dimension(dim)
    if group.is_local:
        whole = torch.cat(list(values), dim)
        return [whole.clone() for _ in values]
    (whole,) = group.emit(AllGather, group.resized(dim, len(values)), dim=dim)
    return group.copies(whole, len(values))


def reduce_scatter(values: Tensors, op: str = "sum", dim: int = 0) -> list[torch.Tensor]:
    """Combine tensors elementwise, and give each rank its part along `dim`.

    Args:
        values: tensors of one dtype and shape, one for each rank of the group.
        op: as in `all_reduce`.
        dim: the dimension that is divided; its size is a multiple of the number of values.

    Returns:
        The parts in order: the i-th is for the rank of the i-th value.

    Raises:
        TraceError: as `all_reduce`; or `dim` cannot be divided among the ranks.
    """
    group = _group("reduce_scatter", values)
    reduction = group.reduction(op)
    dim = group.dimension(dim, len(values))
    if group.is_local:
        return _parts(group.combine(reduction), len(values), dim)
    shape = group.resized(dim, 1, len(values))
    return group.emit(ReduceScatter, shape, op=reduction, dim=dim)


def all_to_all(values: Tensors, dim: int = 0) -> list[torch.Tensor]:
    """Rank i gives the j-th part of its tensor to rank j, and concatenates the parts that it gets.

    Args:
        values: tensors of one dtype and shape, one for each rank of the group.
        dim: the dimension that is divided; its size is a multiple of the number of values.

    Returns:
        A tensor for each value, of the same shape: the i-th is for the rank of the i-th value.

    Raises:
        TraceError: as `all_gather`; or `dim` cannot be divided among the ranks.
    """
    group = _group("all_to_all", values)
    dim = group.dimension(dim, len(values))
    if group.is_local:
        cut = [_parts(value, len(values), dim) for value in values]
        return [torch.cat([parts[i] for parts in cut], dim) for i in range(len(values))]
    return group.emit(AllToAll, group.shape, dim=dim)


def broadcast(value: torch.Tensor, actors: Sequence[ActorHandle]) -> list[torch.Tensor]:
    """Give a tensor to the ranks of all `actors`.

    Args:
        value: a tensor of any dtype and shape.
        actors: the actors whose ranks get the tensor.

    Returns:
        A tensor for each actor, all equal: the i-th is for the rank of the i-th actor.

    Raises:
        TraceError: `value` is not a tensor, or `actors` is not a list of at least one actor.
    """
    _check_actors("broadcast", actors, f"{_AN_ACTOR}: cg.broadcast(value, [a, b])")
    group = _group("broadcast", [value])
    root, ranks = group.root, tuple(dict.fromkeys(actor.rank for actor in actors))
    if root is None or ranks == (root,):
        return [value.clone() for _ in actors]
    group.ranks = ranks if root in ranks else (root, *ranks)
    (result,) = group.emit(Broadcast, group.shape, root=root)
    return group.copies(result, len(actors))


def gather(values: Tensors, root: ActorHandle, dim: int = 0) -> torch.Tensor:
    """Concatenate tensors of one dtype and shape along `dim`, only on the rank of `root`.

    Args:
        values: tensors, one for each rank of the group.
        root: an actor on the rank that gets the result. If none of the tensors is on its rank,
            they are concatenated where the result is used.
        dim: the dimension along which they are concatenated.

    Returns:
        The concatenation; other ranks that use it get it from the root.

    Raises:
        TraceError: as `all_gather`; or `root` is not an actor.
    """
    _check_actors("gather", [root], "an actor: cg.gather(values, root=a)")
    group = _group("gather", values)
    dim = group.dimension(dim)
    if group.is_local or root.rank not in group.ranks:
        return torch.cat(list(values), dim)
    shape = group.resized(dim, len(values))
    (whole,) = group.emit(Gather, shape, root=root.rank, dim=dim)
    return whole


def scatter(value: torch.Tensor, actors: Sequence[ActorHandle], dim: int = 0) -> list[torch.Tensor]:
    """Give the ranks of `actors` equal parts of a tensor along `dim`.

    Args:
        value: a tensor on the rank of one of the actors, the root. If it is elsewhere, each part
            is cut there and sent to where it is used.
        actors: the actors whose ranks get the parts, in order.
        dim: the dimension that is divided; its size is a multiple of the number of actors.

    Returns:
        The parts in order: the i-th is for the rank of the i-th actor.

    Raises:
        TraceError: as `broadcast`; or `dim` cannot be divided among the actors.
    """
    _check_actors("scatter", actors, f"{_AN_ACTOR}: cg.scatter(value, [a, b])")
    group = _group("scatter", [value])
    dim = group.dimension(dim, len(actors))
    group.ranks = tuple(actor.rank for actor in actors)
    distinct = 1 < len(actors) == len(set(group.ranks))
    if group.root not in group.ranks or not distinct:
        return _parts(value, len(actors), dim)
    shape = group.resized(dim, 1, len(actors))
    return group.emit(Scatter, shape, root=group.root, dim=dim)


@dataclass
class _GroupedValues:
    """The values of a collective, and the trace to record it in.

    Attributes:
        name: the collective's name.
        values: the tensors, of one dtype and shape.
        shape: the shape of each tensor.
        session: the trace; None outside of a step.
        traced: the traced values; empty outside of a step.
        ranks: the ranks that take part; empty if the definition is used instead of an op.
        loc: the user's line.
    """

    name: str
    values: Tensors
    shape: tuple[int, ...]
    session: Session | None
    traced: list[Traced]
    ranks: tuple[int, ...]
    loc: Location | None

    @property
    def is_local(self) -> bool:
        """True if the definition of the collective is used instead of an op."""
        return not self.ranks

    @property
    def root(self) -> int | None:
        """The rank of the first value; None if it is not on a single rank."""
        if not self.traced or not self.traced[0].place.is_single:
            return None
        return self.traced[0].place.rank

    def resized(self, dim: int, times: int, parts: int = 1) -> tuple[int, ...]:
        """The shape of a value, with the size of `dim` times `times` and divided by `parts`."""
        shape = self.shape
        return (*shape[:dim], shape[dim] * times // parts, *shape[dim + 1 :])

    def reduction(self, op: str) -> ReduceOp:
        """The reduction that a user's `op` names.

        Raises:
            TraceError: there is none, or the tensors have no average.
        """
        try:
            reduction = ReduceOp(op)
        except ValueError:
            known = ", ".join(repr(reduction.value) for reduction in ReduceOp)
            raise TraceError(
                f"cg.{self.name} with op={op!r}", loc=self.loc, remedy=f"op is one of {known}"
            ) from None
        if reduction is ReduceOp.AVG and any(not v.is_floating_point() for v in self.values):
            raise TraceError(
                f"cg.{self.name} with op='avg' of tensors that are not floating",
                loc=self.loc,
                remedy="convert them, for example by .float(), or use op='sum'",
            )
        return reduction

    def dimension(self, dim: int, parts: int = 1) -> int:
        """The dimension `dim`, counted from the first.

        Raises:
            TraceError: the tensors do not have it, or its size is not a multiple of `parts`.
        """
        shape = self.shape
        if not -len(shape) <= dim < len(shape):
            raise TraceError(
                f"cg.{self.name} along dimension {dim} of a tensor with {len(shape)}",
                loc=self.loc,
                remedy="give a dimension that the tensors have",
            )
        dim %= len(shape)
        if shape[dim] % parts:
            raise TraceError(
                f"cg.{self.name} divides dimension {dim}, of size {shape[dim]}, among {parts} "
                "ranks",
                loc=self.loc,
                remedy=f"make its size a multiple of {parts}",
            )
        return dim

    def combine(self, op: ReduceOp) -> torch.Tensor:
        """All values, combined elementwise."""
        total = functools.reduce(_COMBINE[op], self.values)
        return total / len(self.values) if op is ReduceOp.AVG else total

    def emit(
        self, cls: type[Collective], shape: tuple[int, ...], **attributes: Any
    ) -> list[torch.Tensor]:
        """Record the op.

        Args:
            cls: the class of the op.
            shape: the shape of its results.
            attributes: the op's attributes.

        Returns:
            The results of the ranks that receive a tensor.
        """
        session, spec = self.session, self.traced[0].spec
        type_ = self.traced[0].value.type
        assert session is not None
        assert isinstance(spec, TensorSpec)
        assert isinstance(type_, TensorType)
        grad = torch.is_grad_enabled()
        needed = tuple(grad and requires_grad(traced.spec) for traced in self.traced)
        operands = tuple(traced.value for traced in self.traced)
        op = cls(operands, group=Place(self.ranks), loc=self.loc, mb=session.mb, **attributes)
        received: list[Value] = []
        results: list[Value] = []
        for place in op.result_places:
            gets = place.ranks[0] in op.exchange.receivers
            result = TensorType(type_.dtype, shape, place) if gets else UnitType(place)
            results.append(session.new_value(self.name, result))
            received += results[-1:] if gets else ()
        op.results = tuple(results)
        session.emit(op)
        session.tape.record(op, None, needed, session.last)
        result_spec = TensorSpec(spec.dtype, shape, any(needed))
        tensors = [session.hold(value, result_spec) for value in received]
        return [value for value in tensors if isinstance(value, TracedTensor)]

    def copies(self, result: torch.Tensor, count: int) -> list[torch.Tensor]:
        """The result as `count` tensors, each of which can be written to without the others."""
        assert self.session is not None
        assert isinstance(result, TracedTensor)
        copies: list[Any] = [result]
        for _ in range(count - 1):
            copies.append(self.session.hold(result.traced.value, result.traced.spec))
        return copies


def _check_actors(collective: str, actors: Sequence[object], example: str) -> None:
    """Return if `actors` holds actors only, and at least one.

    Raises:
        TraceError: it does not.
    """
    if not actors or not all(isinstance(actor, ActorHandle) for actor in actors):
        raise TraceError(
            f"cg.{collective} to something other than actors",
            loc=caller_location(3),
            remedy=f"give {example}",
        )


def _check_tensors(collective: str, values: Sequence[object]) -> None:
    """Return if all values are tensors.

    Raises:
        TraceError: one of them is something else.
    """
    for value in values:
        if isinstance(value, ObjectValue):
            raise TraceError(
                f"cg.{collective} of %{value.traced.value.name}, an object that is known only when "
                "the step runs; collectives are of tensors",
                loc=caller_location(3),
                remedy="if the method returns a tensor, say which by @cg.opaque(fake=...), as in "
                "@cg.opaque(fake=lambda self, x: torch.empty(4)); other objects are combined in an "
                "actor's method that takes them",
            )
        if not isinstance(value, torch.Tensor):
            raise TraceError(
                f"cg.{collective} of a {type(value).__name__}, which is not a tensor of the step",
                loc=caller_location(3),
                remedy=_GIVE_TENSORS,
            )


_AN_ACTOR = "a list of at least one actor"
_GIVE_TENSORS = "give it tensors that actors' methods returned"


def _group(collective: str, values: Tensors) -> _GroupedValues:
    """The group of a collective; local if the values are not on different single ranks.

    Raises:
        TraceError: there are no values, one is not a tensor, or they differ in dtype or shape.
    """
    session, loc = recording(f"cg.{collective}"), caller_location(3)
    if not values:
        raise TraceError(
            f"cg.{collective} of no values", loc=loc, remedy="give it at least one tensor"
        )
    _check_tensors(collective, values)
    first = values[0]
    for index, value in enumerate(values):
        if value.dtype is not first.dtype or value.shape != first.shape:
            raise TraceError(
                f"cg.{collective} of tensors that differ: value 0 is "
                f"{show_type(first.dtype, first.shape)}, value {index} is "
                f"{show_type(value.dtype, value.shape)}",
                loc=loc,
                remedy="give it tensors of one dtype and shape",
            )
    group = _GroupedValues(collective, values, tuple(first.shape), session, [], (), loc)
    if session is not None:
        group.traced = [
            session.use_tensor(value, f"cg.{collective}", loc, _GIVE_TENSORS) for value in values
        ]
        places = [traced.place for traced in group.traced]
        ranks = tuple(place.rank for place in places if place.is_single)
        if 1 < len(set(ranks)) == len(values):
            group.ranks = ranks
    return group


_COMBINE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PROD: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


def _parts(value: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    return [part.clone() for part in torch.split(value, value.shape[dim] // count, dim)]
