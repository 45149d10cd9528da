"""Reduce the gradients of actors on meshes: each bucket once, after the last addition to it.

A backward adds to `.grad` the gradient from a rank's own rows, or from its own part of a product.
So along some axes ranks hold summands of the gradient, over all microbatches. The reduction is
recorded before the first call that works on gradients, such as an optimizer's step. It is ordered
only after the additions to its bucket, so it may run between two parts of the last backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ....ir.attributes import Effect, Symbol, Traffic
from ....ir.layout import Layout, shape_of
from ....ir.location import Location
from ....ir.ops import Call, Return, Transfer, Value
from ....ir.ops.module import Function, FunctionKind, Program
from ....ir.ops.names import Names
from ....ir.packing import LARGE, numel_at_rank, packed
from ....ir.types import DType, Mesh, TensorType, UnitType, relocate
from ...errors import TraceError
from ...values.gradient_buckets import GradientLayout, set_gradient
from ...values.group import GroupActor
from ...values.interface import Body, RankBodies, TracedPart
from ...values.specs import ir_dtype
from ..session.calls import PublicPart, agree, enter, public_part, text_of_parts
from ..session.session import Session


@dataclass(frozen=True)
class GradientMessage:
    """Gradients of a bucket that are reduced as one tensor.

    Attributes:
        paths: the paths of the tensors whose gradients these are.
        type: the type of the gradients, flat and concatenated, or of a single gradient.
        is_flat: whether the gradients are flat and concatenated.
    """

    paths: tuple[str, ...]
    type: TensorType
    is_flat: bool

    @property
    def reduced(self) -> TensorType:
        """The type of the reduced tensor."""
        assert self.type.layout is not None
        return TensorType(self.type.dtype, self.type.shape, None, Layout.of(self.type.layout.cuts))


def note_gradients(
    session: Session, actor: str, gradients: Mapping[str, GradientLayout], loc: Location | None
) -> None:
    """Note the gradients that a backward adds to `.grad` of an actor on a mesh.

    Args:
        session: the trace.
        actor: the actor's name.
        gradients: the layouts and buckets of the gradients, by path.
        loc: the user's line.

    Raises:
        TraceError: another backward adds to one of the gradients along other axes.
    """
    pending = session.unreduced.setdefault(actor, {})
    reduced = session.reduced.get(actor, {})
    again = {
        path: gradient
        for path, gradient in gradients.items()
        if path in reduced and path not in pending
    }
    if _summed(again):
        _record_begin(session, session.groups[actor], again, loc)
    for path, gradient in gradients.items():
        both = pending.setdefault(path, gradient).layout.summands, gradient.layout.summands
        if both[0] != both[1]:
            axes = [".".join(summands) or "no axis" for summands in both]
            raise TraceError(
                f"the gradient of '{path}' of {actor} is a sum along {axes[0]} in one of its "
                f"methods, and along {axes[1]} in another",
                loc=loc,
                remedy="cut the batch along the same axes in all methods that a loss depends on; "
                "let one that takes no batch, as a penalty on weights, be a part of one that does",
            )


def reduce_gradients(session: Session, actor: str, loc: Location | None) -> None:
    """Record the reduction of the gradients that backwards have added since the last reduction."""
    pending = session.unreduced.pop(actor, {})
    summed = _summed(pending)
    if not summed:
        return
    group = session.groups[actor]
    session.reduced.setdefault(actor, {}).update(pending)
    name = declared(session, group, f"{actor}.reduce_gradients", summed, _reduction, loc)
    session.emit(_call(session, group.mesh, name, loc))


def _summed(gradients: Mapping[str, GradientLayout]) -> dict[str, GradientLayout]:
    """The gradients that ranks hold summands of, and that have to be reduced."""
    return {path: gradient for path, gradient in gradients.items() if gradient.layout.summands}


def finish_gradients(session: Session) -> None:
    """Record the last reductions, and let the gradients of earlier executions count once.

    At the start of an execution ranks hold copies of reduced gradients, which become summands.
    """
    for actor in sorted(session.unreduced):
        reduce_gradients(session, actor, None)
    for actor, gradients in sorted(session.reduced.items()):
        _record_begin(session, session.groups[actor], gradients, None, first=True)


def _record_begin(
    session: Session,
    group: GroupActor,
    gradients: Mapping[str, GradientLayout],
    loc: Location | None,
    first: bool = False,
) -> None:
    """Record that copies of gradients become summands: only the first rank's copy counts.

    The op is recorded at the start of the program if `first`, and otherwise at the end.
    """
    name = f"{group.name}.begin_gradients"
    name = declared(session, group, name, _summed(gradients), _beginning, loc)
    op = _call(session, group.mesh, name, loc)
    ops = session.module.program.ops
    ops.insert(0 if first else len(ops), op)


def _call(session: Session, mesh: Mesh, name: str, loc: Location | None) -> Call:
    done = session.new_value("done", relocate(UnitType(), mesh))
    return Call((), (done,), fn=Symbol(name), loc=loc)


Gradients: TypeAlias = Mapping[str, GradientLayout]

Maker = Callable[[GroupActor, str, Gradients, Location | None], list[TracedPart]]


def declared(
    session: Session,
    group: GroupActor,
    base: str,
    gradients: Gradients,
    make: Maker,
    loc: Location | None,
) -> str:
    """The name of the function that `make` makes for some gradients, made on the first request.

    Args:
        session: the trace.
        group: the actor.
        base: the function's name, before it is made unique.
        gradients: the layouts and buckets of gradients, by path.
        make: makes the function, and the functions that it calls.
        loc: the user's line.
    """
    key = (base, tuple(sorted((path, str(gradient)) for path, gradient in gradients.items())))
    name = session.reductions.get(key)
    if name is None:
        session.refuse_new(base, loc)
        name = session.reductions[key] = session.function_names.fresh(base)
        fresh = name

        def make_parts() -> tuple[list[TracedPart], list[PublicPart]]:
            parts = make(group, fresh, gradients, loc)
            return parts, list(map(public_part, parts))

        own_parts, parts = agree(
            session.peers,
            group.mesh.ranks,
            make_parts,
            name,
            loc,
            text_of=lambda own, public: text_of_parts(public),
        )
        enter(session, parts, own_parts or ())
    return name


def _beginning(
    group: GroupActor, name: str, gradients: Gradients, loc: Location | None
) -> list[TracedPart]:
    bodies: dict[int, Body] = {}
    for rank in group.instances:
        position = group.mesh.position(rank)
        tensors = group.tensors(rank)
        cleared = [
            tensors[path]
            for path, gradient in gradients.items()
            if any(position[axis][0] for axis in gradient.layout.summands)
        ]
        bodies[rank] = _Clearing(cleared)
    function = Function(name, (), (UnitType(),), effect=Effect.WRITE, actor=group.name, loc=loc)
    return [TracedPart(function, RankBodies.of(bodies))]


@dataclass(frozen=True)
class _Clearing:
    """Sets the gradients of some tensors to zero, on all ranks but the first along their axes.

    The gradients stay the same tensors, since device graphs refer to their memory.
    """

    tensors: Sequence[torch.Tensor]

    def state(self) -> Sequence[torch.Tensor]:
        """Nothing, as the function reads no parameter."""
        return ()

    def trained(self) -> Sequence[torch.Tensor]:
        """The parameters whose gradients the function clears."""
        return self.tensors

    def __call__(self) -> Sequence[Any]:
        for tensor in self.tensors:
            if tensor.grad is not None:
                tensor.grad.zero_()
        return (None,)


def _reduction(
    group: GroupActor, name: str, gradients: Gradients, loc: Location | None
) -> list[TracedPart]:
    numbers = sorted({gradient.bucket for gradient in gradients.values()})
    write: dict[str, Any] = {"actor": group.name, "loc": loc, "effect": Effect.WRITE}
    buckets: list[_Bucket] = []
    for number in numbers:
        layouts = {
            path: gradient.layout
            for path, gradient in gradients.items()
            if gradient.bucket == number
        }
        messages = tuple(_messages(group, layouts))
        base, common = name, write
        if len(numbers) > 1:  # a single bucket has nothing to overlap with
            base = f"{name}.{number}"
            common = write | {"effect": Effect.REDUCE, "buckets": (number,)}
        read = Function(f"{base}.read", (), tuple(message.type for message in messages), **common)
        writes = tuple(
            Function(f"{base}.write{index}", (message.reduced,), (UnitType(),), **common)
            for index, message in enumerate(messages)
        )
        buckets.append(_Bucket(messages, read, writes))
    program = Function(name, (), (UnitType(),), kind=FunctionKind.PROGRAM, **write)
    functions = [part for bucket in buckets for part in bucket.functions(group)]
    return [TracedPart(program, None, _program(name, buckets)), *functions]


@dataclass(frozen=True)
class _Bucket:
    """The functions that reduce one bucket.

    Attributes:
        messages: the messages that carry the bucket's gradients.
        read: the function that gives the tensors of the messages.
        writes: the functions that put the reduced gradients back, one for each message.
    """

    messages: tuple[GradientMessage, ...]
    read: Function
    writes: tuple[Function, ...]

    def functions(self, group: GroupActor) -> Iterator[TracedPart]:
        """The bucket's functions with their bodies."""
        messages: dict[int, list[_MessageTensors]] = {}
        for rank in group.instances:
            tensors = group.tensors(rank)
            messages[rank] = [
                _MessageTensors([tensors[p] for p in m.paths], m.is_flat, group.device)
                for m in self.messages
            ]
        reading = {rank: _GradientReader(rank_messages) for rank, rank_messages in messages.items()}
        yield TracedPart(self.read, RankBodies.of(reading))
        for index, write in enumerate(self.writes):
            writing = {
                rank: _Writing([rank_messages[index]]) for rank, rank_messages in messages.items()
            }
            yield TracedPart(write, RankBodies.of(writing))


def _program(name: str, buckets: Sequence[_Bucket]) -> Program:
    """The body of a reduction: it reads each bucket, transfers its gradients, and puts them back.

    Gradients are put back when they arrive, while others travel, and their memory is free then. If
    there are several buckets, the first ones travel while the backward computes the others. So
    reductions have their own traffic, which does not queue with the transfers of the backward.
    """
    names = Names()
    traffic = Traffic.REDUCE if len(buckets) > 1 else None
    travel, back = list[Call | Transfer](), list[Call]()
    for bucket in buckets:
        sums = tuple(Value(names.fresh("sum"), type_) for type_ in bucket.read.outputs)
        travel.append(Call((), sums, fn=Symbol(bucket.read.name)))
        for partial_sum, write in zip(sums, bucket.writes, strict=True):
            total = Value(names.fresh("total"), *write.inputs)
            done = Value(names.fresh("done"), UnitType())
            travel.append(Transfer((partial_sum,), (total,), traffic=traffic, donated=True))
            back.append(Call((total,), (done,), fn=Symbol(write.name)))
    return Program(name, [], [*travel, *back, Return(back[-1].results, ())])


def _messages(group: GroupActor, layouts: Mapping[str, Layout]) -> Iterator[GradientMessage]:
    """The messages of a bucket, from the last tensor to the first; small gradients share one."""
    together: dict[tuple[DType, frozenset[str], tuple[str, ...]], dict[str, TensorType]] = {}
    tensors = group.tensors(group.first)
    for path in reversed(list(tensors)):
        if path not in layouts:
            continue
        layout, shape = layouts[path], group.shape(path, tensors[path])
        dtype = ir_dtype(tensors[path].dtype)
        type_ = TensorType(dtype, shape, None, layout)
        nbytes = numel_at_rank(shape, layout, group.mesh) * dtype.itemsize
        if nbytes >= LARGE or not _is_even(layout, shape, group.mesh):
            yield GradientMessage((path,), type_, is_flat=False)
            continue
        key = dtype, frozenset(axis for cut in layout.cuts for axis in cut.axes), layout.summands
        together.setdefault(key, {})[path] = type_
    for types in together.values():
        paths, several = tuple(types), len(types) > 1
        type_ = packed([*types.values()], group.mesh) if several else types[paths[0]]
        yield GradientMessage(paths, type_, is_flat=several)


def _is_even(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """True if all ranks have pieces of the same number of elements."""
    pieces = {
        math.prod(shape_of(layout.region(shape, position))) for position in mesh.positions.values()
    }
    return len(pieces) == 1


@dataclass(frozen=True)
class _MessageTensors:
    """The tensors of a message on one rank."""

    tensors: Sequence[torch.Tensor]
    is_flat: bool
    device: torch.device | None

    def read(self) -> torch.Tensor:
        """The gradients as one tensor; a single gradient is not copied if it is contiguous."""
        grads = [
            torch.zeros_like(t, device=self.device) if t.grad is None else t.grad
            for t in self.tensors
        ]
        if self.is_flat:
            return torch.cat([grad.reshape(-1) for grad in grads])
        return grads[0].contiguous()

    def write(self, value: torch.Tensor) -> None:
        """Copy reduced gradients into `.grad`, unless the reduction was done in place."""
        first = self.tensors[0].grad
        if first is not None and not self.is_flat and first.data_ptr() == value.data_ptr():
            return
        parts = torch.split(value.view(-1), [tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            gradient = tensor.grad
            if gradient is None:
                gradient = torch.empty_like(tensor, device=self.device, requires_grad=False)
                set_gradient(tensor, gradient)
            gradient.copy_(part.view(tensor.shape))


@dataclass(frozen=True)
class _Gradients:
    """A function that works on the gradients of some messages."""

    messages: Sequence[_MessageTensors]

    def state(self) -> Sequence[torch.Tensor]:
        """Nothing, as the function reads no parameter."""
        return ()

    def trained(self) -> Sequence[torch.Tensor]:
        """The parameters whose gradients the function reads or writes."""
        return [tensor for message in self.messages for tensor in message.tensors]


class _GradientReader(_Gradients):
    """Gives the gradients of some messages."""

    def __call__(self) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return tuple(message.read() for message in self.messages)


class _Writing(_Gradients):
    """Puts the reduced gradients of some messages back."""

    def __call__(self, *values: torch.Tensor) -> Sequence[Any]:
        with torch.no_grad():
            for message, value in zip(self.messages, values, strict=True):
                message.write(value)
        return (None,)
