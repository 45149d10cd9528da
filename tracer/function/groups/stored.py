"""Functions that gather an actor's stored parameters or fetch them, and reduce their gradients.

A parameter that `store=` cuts is gathered before it is used, and its gradient is reduced to the
pieces. Both travel flat: each rank's piece is padded with zeros to the size of the largest piece,
so that one collective serves uneven pieces, too. Each parameter has four functions that make the
flat tensors, and use what arrives. Each takes or gives one flat tensor, so that passes can let
several travel together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ....ir.attributes import Effect
from ....ir.layout import Cut, Layout, Region, shape_of, volume, within
from ....ir.location import Location
from ....ir.ops.module import Function
from ....ir.types import DType, Mesh, TensorType, UnitType
from ...graph.codegen.accumulate import accumulate
from ...values.gradient_buckets import buckets_of
from ...values.group import GroupActor
from ...values.interface import Body, RankBodies, TracedPart
from ...values.optimizer_state import RestingState
from ...values.pieces import LogicalTensor, piece, put
from ...values.specs import ir_dtype


@dataclass(frozen=True)
class Stored:
    """The stored parameters of an actor.

    Attributes:
        group: the actor.
        loc: the user's line that calls the actor.
        buckets: the buckets of the gradients that are reduced, by path.
        resting: the parameters that rest on the host, by rank.
    """

    group: GroupActor
    loc: Location | None = None
    buckets: Mapping[str, int] = field(default_factory=dict)
    resting: Mapping[int, RestingState] = field(default_factory=dict)

    def __contains__(self, path: str) -> bool:
        return path in self.group.gathered

    def gathers(self, path: str) -> ParameterGather:
        """What comes before each use of a parameter: its gather, its fetch from the host, or both.

        Without a gather, the second function takes what the first gives.
        """
        tensors = self._held(path)
        one = next(iter(tensors.values()))
        logical = self.group.logical.get(path)
        if logical is None:  # it was not there when the actor was made, or the actor is on one rank
            logical = LogicalTensor(path, tuple(one.shape), None, None)
        flat = FlatParameter.of(logical, self.group.mesh)
        dtype = ir_dtype(one.dtype)
        rest, full = flat.type(dtype, True), flat.type(dtype, False)
        used = TensorType(dtype, logical.shape, None, logical.used)
        name = f"{self.group.name}.{path}"
        rests = any(path in state.paths for state in self.resting.values())
        read = Function(
            f"{name}.rest",
            (),
            (rest,),
            effect=Effect.READ,
            actor=self.group.name,
            loc=self.loc,
            parameter=path,
            resting=flat.numel * one.element_size() if rests else 0,
        )
        reading: dict[int, Body] = {
            rank: RestingReader(self.resting[rank], path)
            if rests
            else _PieceReader(tensor, flat.numel)
            for rank, tensor in tensors.items()
        }
        making = whole_of(name, self.group, flat, full, used, path, self.loc)
        return ParameterGather(_part(read, reading), making)

    def reduces(self, path: str, before: Layout, after: Layout) -> GradientReduction | None:
        """The reduction of a gradient to pieces; None if the layouts ask for something else.

        Args:
            path: the path of the parameter.
            before, after: the layouts in which the gradient is computed, and added to `.grad`.
        """
        logical = self.group.logical[path]
        flat = FlatParameter.of(logical, self.group.mesh)
        used = logical.used.cuts if logical.used is not None else None
        cuts = before.cuts if any(before.cuts) else None
        remaining_axes = tuple(axis for axis in before.summands if axis not in flat.gathered)
        if cuts != used or not set(flat.gathered) <= set(before.summands):
            return None
        if after != Layout(logical.layout.cuts if logical.layout else (), remaining_axes):
            return None
        tensors = self._held(path)
        dtype = ir_dtype(next(iter(tensors.values())).dtype)
        gradient = TensorType(dtype, logical.shape, None, before)
        terms = flat.type(dtype, False, before.summands)
        total = flat.type(dtype, True, remaining_axes)
        name = f"{self.group.name}.{path}"
        axes = "_".join(before.summands)
        lay = Function(
            f"{name}.gradient.{axes}",
            (gradient,),
            (terms,),
            actor=self.group.name,
            loc=self.loc,
            parameter=path,
            aliases=((0, 0),) if flat.is_dense else (),
        )
        add = Function(
            f"{name}.add.{axes}",
            (total,),
            (UnitType(),),
            effect=Effect.ACCUMULATE,
            actor=self.group.name,
            loc=self.loc,
            parameter=path,
            buckets=buckets_of([path], self.buckets),
        )
        laying = {rank: _Laying(flat.at(rank)) for rank in tensors}
        adding = {rank: _Adding(tensor) for rank, tensor in tensors.items()}
        return GradientReduction(_part(lay, laying), _part(add, adding))

    @cached_property
    def _tensors(self) -> dict[int, dict[str, Tensor]]:
        """The tensors of each rank that this process plays, by rank and path.

        They are cached, since each look-up walks the whole instance.
        """
        return {rank: self.group.tensors(rank) for rank in self.group.instances}

    def _held(self, path: str) -> dict[int, Tensor]:
        """The tensor at a path, by rank, for the ranks that this process plays."""
        return {rank: tensors[path] for rank, tensors in self._tensors.items()}


@dataclass(frozen=True)
class ParameterGather:
    """The gather of one parameter.

    Attributes:
        read: the function that gives the flat piece.
        make: the function that makes the parameter from the gathered tensor.
    """

    read: TracedPart
    make: TracedPart


@dataclass(frozen=True)
class GradientReduction:
    """The reduction of one gradient.

    Attributes:
        lay: the function that makes the gradient flat.
        add: the function that adds the flat piece to `.grad`.
    """

    lay: TracedPart
    add: TracedPart


def whole_of(
    name: str,
    group: GroupActor,
    flat: FlatParameter,
    full: TensorType,
    used: TensorType,
    path: str,
    loc: Location | None,
) -> TracedPart:
    """The function `name.whole`, which makes a parameter of its gathered pieces.

    Args:
        name: see above.
        group: the actor.
        flat: the flat form of the parameter.
        full, used: the types of the gathered pieces, and of the parameter.
        path: the path of the parameter.
        loc: the user's line that calls the actor.
    """
    function = Function(
        f"{name}.whole",
        (full,),
        (used,),
        actor=group.name,
        loc=loc,
        parameter=path,
        aliases=((0, 0),) if flat.is_dense else (),
    )
    return _part(function, {rank: _Making(flat.at(rank)) for rank in group.instances})


def _part(function: Function, bodies: Mapping[int, Body]) -> TracedPart:
    return TracedPart(function, RankBodies.of(bodies))


@dataclass(frozen=True)
class PiecePlaces:
    """The pieces that a rank gathers, and where they lie in the tensor that it uses.

    Attributes:
        shape: the shape of the tensor that the rank uses.
        regions: the region of each piece in that tensor, in the order of the gather.
        numel: the number of elements of each piece in the flat tensor.
        is_dense: whether the gathered tensor, reshaped, is the tensor that the rank uses.
    """

    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    numel: int
    is_dense: bool


@dataclass(frozen=True)
class FlatParameter:
    """The flat form of a parameter.

    Attributes:
        logical: the parameter.
        mesh: the ranks.
        kept: the axes that cut the parameter where it is used, in the order of the mesh.
        gathered: the axes along which the parameter is gathered, in the order of the mesh.
        numel: the number of elements of the largest piece.
    """

    logical: LogicalTensor
    mesh: Mesh
    kept: tuple[str, ...]
    gathered: tuple[str, ...]
    numel: int

    @staticmethod
    def of(logical: LogicalTensor, mesh: Mesh) -> FlatParameter:
        """The flat form of a parameter, which may be cut further where it rests."""
        layout = logical.layout or Layout((Cut(),) * len(logical.shape))
        used = () if logical.used is None else logical.used.axes
        kept_axes = tuple(axis for axis, _ in mesh.grid if axis in used)
        rest = set(layout.axes).difference(used)
        gathered = tuple(axis for axis, _ in mesh.grid if axis in rest)
        regions = (layout.region(logical.shape, at) for at in mesh.positions.values())
        return FlatParameter(logical, mesh, kept_axes, gathered, max(map(volume, regions)))

    def type(self, dtype: DType, is_piece: bool, summands: tuple[str, ...] = ()) -> TensorType:
        """The type of the flat tensor: its global shape is (elements of all pieces,).

        Args:
            dtype: the dtype of the parameter.
            is_piece: whether the tensor is cut to pieces, or gathered.
            summands: the axes along which ranks hold summands.
        """
        sizes = dict(self.mesh.grid)
        count = self.numel
        for axis in (*self.kept, *self.gathered):
            count *= sizes[axis]
        cut = Cut((*self.kept, *self.gathered) if is_piece else self.kept)
        layout = Layout.of((cut,), summands)
        return TensorType(dtype, (count,), None, layout if cut.axes or summands else None)

    @property
    def is_dense(self) -> bool:
        """Whether `PiecePlaces.is_dense` holds on every rank: gathered tensors need no copy."""
        return all(self.at(rank).is_dense for rank in self.mesh.ranks)

    def at(self, rank: int) -> PiecePlaces:
        """The pieces that a rank gathers."""
        logical, sizes = self.logical, dict(self.mesh.grid)
        position = self.mesh.position(rank)
        uncut = Layout((Cut(),) * len(logical.shape))
        used, layout = logical.used or uncut, logical.layout or uncut
        whole = used.region(logical.shape, position)
        regions = []
        for along in itertools.product(*(range(sizes[axis]) for axis in self.gathered)):
            gathered_position = {
                axis: (k, sizes[axis]) for axis, k in zip(self.gathered, along, strict=True)
            }
            regions.append(
                within(layout.region(logical.shape, {**position, **gathered_position}), whole)
            )
        shape = shape_of(whole)
        is_full = all(volume(region) == self.numel for region in regions)
        is_dense = is_full and _are_rows(regions, shape)
        return PiecePlaces(shape, tuple(regions), self.numel, is_dense)


def _are_rows(regions: Sequence[Region], shape: tuple[int, ...]) -> bool:
    """Whether the regions are consecutive rows of a tensor, and cover it."""
    if not shape:
        return len(regions) == 1
    at = 0
    for region in regions:
        rows, *others = region
        whole = [((0, size),) if size else () for size in shape[1:]]
        if others != whole or len(rows) != 1 or rows[0][0] != at:
            return False
        at = rows[0][1]
    return at == shape[0]


@dataclass(frozen=True)
class _PieceReader:
    """Gives a copy of a piece, flat and padded with zeros."""

    tensor: Tensor
    numel: int

    def state(self) -> Sequence[Tensor]:
        """The parameter that the function reads."""
        return (self.tensor,)

    def trained(self) -> Sequence[Tensor]:
        """Nothing, as the function changes no gradient."""
        return ()

    def __call__(self) -> Sequence[Tensor]:
        with torch.no_grad():
            return (filled_up(self.tensor.detach(), self.numel),)


@dataclass(frozen=True)
class RestingReader:
    """Gives the memory of the host in which a piece rests, flat, with room for the largest piece.

    That memory stays where it is, so a device's graph may copy from it.
    """

    resting: RestingState
    path: str

    def state(self) -> Sequence[Tensor]:
        """The parameter at rest."""
        return (self.resting.paths[self.path],)

    def trained(self) -> Sequence[Tensor]:
        """Nothing, as the function changes no gradient."""
        return ()

    def __call__(self) -> Sequence[Tensor]:
        return (self.resting.flat(self.path),)


def filled_up(tensor: Tensor, numel: int) -> Tensor:
    """A flat copy of a tensor, padded with zeros to `numel` elements."""
    if tensor.numel() == numel:
        return tensor.clone(memory_format=torch.contiguous_format).view(-1)
    flat = tensor.new_zeros(numel)
    flat[: tensor.numel()].copy_(tensor.reshape(-1))
    return flat


@dataclass(frozen=True)
class _Making:
    """Makes a parameter from its gathered pieces: a view of them if they are dense."""

    pieces: PiecePlaces

    def __call__(self, flat: Tensor) -> Sequence[Tensor]:
        pieces = self.pieces
        if pieces.is_dense:
            return (flat.view(pieces.shape),)
        parameter = flat.new_empty(pieces.shape)
        for index, region in enumerate(pieces.regions):
            shape = shape_of(region)
            at = index * pieces.numel
            put(parameter, region, flat[at : at + volume(region)].view(shape))
        return (parameter,)


@dataclass(frozen=True)
class _Laying:
    """Makes a gradient flat: its pieces, one after the other."""

    pieces: PiecePlaces

    def __call__(self, gradient: Tensor) -> Sequence[Tensor]:
        pieces = self.pieces
        if pieces.is_dense:
            return (gradient.reshape(-1),)
        parts = [filled_up(piece(gradient, region), pieces.numel) for region in pieces.regions]
        return (torch.cat(parts),)


@dataclass(frozen=True)
class _Adding:
    """Adds a flat piece to the gradient of a tensor."""

    tensor: Tensor

    def state(self) -> Sequence[Tensor]:
        """Nothing, as the function reads no parameter."""
        return ()

    def trained(self) -> Sequence[Tensor]:
        """The parameter whose gradient the function adds to."""
        return (self.tensor,)

    def __call__(self, flat: Tensor) -> Sequence[None]:
        with torch.no_grad():
            gradient = flat[: self.tensor.numel()].view(self.tensor.shape)
            accumulate([self.tensor], [gradient], (False,), {})
        return (None,)
