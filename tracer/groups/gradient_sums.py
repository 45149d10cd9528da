"""Reduce the gradients of actors on meshes: once behind the last backward, in buckets.

A backward adds to `.grad` what a rank's own rows, or its own part of a product, give: along some
axes ranks hold summands of the gradient. They stay so over all microbatches. The first that works
on gradients, an optimizer say, finds them reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...ir.attributes import Effect, Symbol
from ...ir.layout import Cut, Layout, shape_of
from ...ir.location import Location
from ...ir.module import Function, FunctionKind, Program
from ...ir.names import Names
from ...ir.ops import Call, Return, Transfer, Value
from ...ir.types import DType, Mesh, TensorType, UnitType, relocate
from ..errors import TraceError
from ..functions.calls import PublicPart, agree, enter, public_part
from ..functions.interface import Body, RankBodies, TracedPart
from ..step.session import Session
from ..step.specs import ir_dtype
from .group import GroupActor

BUCKET = 25 << 20
"""Bytes of gradients that are reduced together, at most."""

LARGE = 1 << 20
"""Bytes of a rank's gradient that is reduced by itself, which saves a copy of it."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together, as one tensor.

    Attributes:
        paths: of their tensors.
        type: of all of them behind each other, or of the one gradient, if it is large or uneven.
        is_flat: whether they are behind each other.
    """

    paths: tuple[str, ...]
    type: TensorType
    is_flat: bool


def note_gradients(
    session: Session, actor: str, found: Mapping[str, Layout], loc: Location | None
) -> None:
    """Take note of what a backward is about to add to the gradients of an actor on a mesh.

    Raises:
        TraceError: another backward adds to one of them along other axes.
    """
    sums = any(layout.summands for layout in found.values())
    if sums and actor in session.reduced and actor not in session.unreduced:
        _record_begin(session, session.groups[actor], found, loc)
    pending = session.unreduced.setdefault(actor, {})
    for path, layout in found.items():
        if pending.setdefault(path, layout).summands != layout.summands:
            axes = [".".join(each.summands) or "no axis" for each in (pending[path], layout)]
            raise TraceError(
                f"the gradient of '{path}' of {actor} is a sum along {axes[0]} in one of its "
                f"methods, and along {axes[1]} in another",
                loc=loc,
                remedy="cut the batch along the same axes in all methods that a loss depends on; "
                "let one that takes no batch, as a penalty on weights, be a part of one that does",
            )


def reduce_gradients(session: Session, actor: str, loc: Location | None) -> None:
    """Record the reduction of what backwards have added since the last one, if they have."""
    pending = session.unreduced.pop(actor, None)
    if pending is None or not any(layout.summands for layout in pending.values()):
        return
    group = session.groups[actor]
    session.reduced.setdefault(actor, {}).update(pending)
    summands = {path: layout for path, layout in pending.items() if layout.summands}
    name = declared(session, group, f"{actor}.reduce_gradients", summands, _reduction, loc)
    session.emit(_call(session, group.mesh, name, loc))


def finish_gradients(session: Session) -> None:
    """Reduce what has not been reduced, and let the gradients of before count once."""
    for actor in sorted(session.unreduced):
        reduce_gradients(session, actor, None)
    for actor, found in sorted(session.reduced.items()):
        _record_begin(session, session.groups[actor], found, None, first=True)


def _record_begin(
    session: Session,
    group: GroupActor,
    found: Mapping[str, Layout],
    loc: Location | None,
    first: bool = False,
) -> None:
    """Record that gradients, of which ranks hold copies, become summands: one of them counts."""
    summands = {path: layout for path, layout in found.items() if layout.summands}
    name = declared(session, group, f"{group.name}.begin_gradients", summands, _beginning, loc)
    op = _call(session, group.mesh, name, loc)
    ops = session.module.program.ops
    ops.insert(0 if first else len(ops), op)


def _call(session: Session, mesh: Mesh, name: str, loc: Location | None) -> Call:
    done = session.new_value("done", relocate(UnitType(), mesh))
    return Call((), (done,), fn=Symbol(name), loc=loc)


Maker = Callable[[GroupActor, str, Mapping[str, Layout], Location | None], list[TracedPart]]


def declared(
    session: Session,
    group: GroupActor,
    base: str,
    layouts: Mapping[str, Layout],
    make: Maker,
    loc: Location | None,
) -> str:
    """The function of that kind for some gradients, which is made at first."""
    key = (base, tuple(sorted((path, str(layout)) for path, layout in layouts.items())))
    name = session.reductions.get(key)
    if name is None:
        session.refuse_new(base, loc)
        name = session.reductions[key] = session.function_names.fresh(base)
        fresh = name

        def made() -> tuple[list[TracedPart], list[PublicPart]]:
            parts = make(group, fresh, layouts, loc)
            return parts, list(map(public_part, parts))

        mine, parts = agree(
            session.peers, group.mesh.ranks, made, name, loc, parts_of=lambda public: public
        )
        enter(session, parts, [] if mine is None else [part.body for part in mine])
    return name


def _beginning(
    group: GroupActor, name: str, layouts: Mapping[str, Layout], loc: Location | None
) -> list[TracedPart]:
    bodies: dict[int, Body] = {}
    for rank in group.instances:
        position = group.mesh.position(rank)
        tensors = group.tensors(rank)
        cleared = [
            tensors[path]
            for path, layout in layouts.items()
            if any(position[axis][0] for axis in layout.summands)
        ]
        bodies[rank] = _Clearing(cleared)
    function = Function(name, (), (UnitType(),), effect=Effect.WRITE, actor=group.name, loc=loc)
    return [TracedPart(function, RankBodies.of(bodies))]


@dataclass(frozen=True)
class _Clearing:
    """Sets the gradients of some tensors to zero: the first ranks along their axes keep theirs.

    They stay the same tensors, as the graphs of a device need.
    """

    tensors: Sequence[torch.Tensor]

    def state(self) -> Sequence[torch.Tensor]:
        """Nothing: it reads no parameter."""
        return ()

    def trained(self) -> Sequence[torch.Tensor]:
        """The parameters whose gradients it clears."""
        return self.tensors

    def __call__(self) -> Sequence[Any]:
        for tensor in self.tensors:
            if tensor.grad is not None:
                tensor.grad.zero_()
        return (None,)


def _reduction(
    group: GroupActor, name: str, layouts: Mapping[str, Layout], loc: Location | None
) -> list[TracedPart]:
    buckets = list(_buckets(group, layouts))
    summands = tuple(bucket.type for bucket in buckets)
    reduced = tuple(_reduced(type_) for type_ in summands)
    common: dict[str, Any] = {"effect": Effect.WRITE, "actor": group.name, "loc": loc}
    program = Function(name, (), (UnitType(),), kind=FunctionKind.PROGRAM, **common)
    read = Function(f"{name}.read", (), summands, **common)
    writes = [
        Function(f"{name}.write{index}", (type_,), (UnitType(),), **common)
        for index, type_ in enumerate(reduced)
    ]
    reading: dict[int, Body] = {}
    writing: list[dict[int, Body]] = [{} for _ in buckets]
    for rank in group.instances:
        tensors = group.tensors(rank)
        held = [_Held([tensors[path] for path in b.paths], b.is_flat) for b in buckets]
        reading[rank] = _Reading(held)
        for bodies, bucket in zip(writing, held, strict=True):
            bodies[rank] = _Writing([bucket])
    return [
        TracedPart(program, None, _program(read, writes)),
        TracedPart(read, RankBodies.of(reading)),
        *(TracedPart(f, RankBodies.of(b)) for f, b in zip(writes, writing, strict=True)),
    ]


def _program(read: Function, writes: Sequence[Function]) -> Program:
    """The body of a reduction: it reads gradients, transfers them, and writes each bucket back.

    A bucket is written when it has come, while others are under way, and its memory is free then.
    """
    names = Names()
    sums = tuple(Value(names.fresh("sum"), type_) for type_ in read.outputs)
    transfers, calls = list[Transfer](), list[Call]()
    for one, write in zip(sums, writes, strict=True):
        total = Value(names.fresh("total"), *write.inputs)
        done = Value(names.fresh("done"), UnitType())
        transfers.append(Transfer((one,), (total,)))
        calls.append(Call((total,), (done,), fn=Symbol(write.name)))
    ops = [
        Call((), sums, fn=Symbol(read.name)),
        *transfers,
        *calls,
        Return(calls[-1].results, ()),
    ]
    return Program(read.name.rpartition(".")[0], [], ops)


def _buckets(group: GroupActor, layouts: Mapping[str, Layout]) -> Iterator[Bucket]:
    """Gradients in buckets, those of the last tensors first: a backward has them first."""
    open_: dict[tuple[DType, frozenset[str], tuple[str, ...]], list[str]] = {}
    sizes: dict[tuple[DType, frozenset[str], tuple[str, ...]], int] = {}
    axes = dict(group.mesh.grid)
    tensors = group.tensors(group.first)
    for path in reversed(list(tensors)):
        if path not in layouts:
            continue
        layout, shape = layouts[path], group.shape(path, tensors[path])
        dtype = ir_dtype(tensors[path].dtype)
        cut = tuple(axis for each in layout.cuts for axis in each.axes)
        nbytes = math.prod(shape) // math.prod(axes[axis] for axis in cut) * dtype.itemsize
        if nbytes >= LARGE or not _is_even(layout, shape, group.mesh):
            yield Bucket((path,), TensorType(dtype, shape, None, layout), is_flat=False)
            continue
        key = (dtype, frozenset(cut), layout.summands)
        if key in open_ and sizes[key] + nbytes > BUCKET:
            yield _flat(open_.pop(key), key, sizes.pop(key), group.mesh)
        open_.setdefault(key, []).append(path)
        sizes[key] = sizes.get(key, 0) + nbytes
    for key, paths in open_.items():
        yield _flat(paths, key, sizes[key], group.mesh)


def _flat(
    paths: Sequence[str],
    key: tuple[DType, frozenset[str], tuple[str, ...]],
    nbytes: int,
    mesh: Mesh,
) -> Bucket:
    """Gradients of equal pieces as one tensor: each rank has a piece of it, or a summand."""
    dtype, cut, summands = key
    axes = tuple(axis for axis, _ in mesh.grid if axis in cut)
    count = nbytes // dtype.itemsize * math.prod(dict(mesh.grid)[axis] for axis in axes)
    type_ = TensorType(dtype, (count,), None, Layout((Cut(axes),), summands))
    return Bucket(tuple(paths), type_, is_flat=True)


def _is_even(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """True if all ranks have as many elements."""
    pieces = {
        math.prod(shape_of(layout.region(shape, position))) for position in mesh.positions.values()
    }
    return len(pieces) == 1


def _reduced(type_: TensorType) -> TensorType:
    assert type_.layout is not None
    return TensorType(type_.dtype, type_.shape, None, Layout.of(type_.layout.cuts))


@dataclass(frozen=True)
class _Held:
    """A rank's tensors of a bucket."""

    tensors: Sequence[torch.Tensor]
    is_flat: bool

    def read(self) -> torch.Tensor:
        """Their gradients. One that is by itself is not copied: nothing writes to it meanwhile."""
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in self.tensors]
        if self.is_flat:
            return torch.cat([grad.reshape(-1) for grad in grads])
        return grads[0].contiguous()

    def write(self, value: torch.Tensor) -> None:
        """Put gradients in the place of theirs."""
        parts = torch.split(value.view(-1), [tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            if tensor.grad is None:
                tensor.grad = torch.empty_like(tensor)
            tensor.grad.copy_(part.view(tensor.shape))


@dataclass(frozen=True)
class _Buckets:
    """Works on the gradients of some buckets."""

    buckets: Sequence[_Held]

    def state(self) -> Sequence[torch.Tensor]:
        """Nothing: it reads no parameter."""
        return ()

    def trained(self) -> Sequence[torch.Tensor]:
        """The parameters whose gradients it reads or writes."""
        return [tensor for bucket in self.buckets for tensor in bucket.tensors]


class _Reading(_Buckets):
    """Gives the gradients of some buckets."""

    def __call__(self) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return tuple(bucket.read() for bucket in self.buckets)


class _Writing(_Buckets):
    """Puts back what has become of the gradients of some buckets."""

    def __call__(self, *values: torch.Tensor) -> Sequence[Any]:
        with torch.no_grad():
            for bucket, value in zip(self.buckets, values, strict=True):
                bucket.write(value)
        return (None,)
