"""Norms of gradients of actors on meshes: a piece counts once, however many ranks hold it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from ...ir.attributes import Effect, ReduceOp, Symbol
from ...ir.layout import WHOLE, Layout
from ...ir.location import Location
from ...ir.module import Function, FunctionKind, Program
from ...ir.names import Names
from ...ir.ops import Call, Op, Return, Transfer, Value
from ...ir.types import TensorType, relocate
from ..actors.actor_state import StateTensor
from ..functions.interface import Body, RankBodies, TracedPart
from ..layouts.values.accumulation import accumulation_type
from ..step.session import Session
from ..step.specs import TensorSpec, ir_dtype, torch_dtype
from ..step.values import TracedTensor
from .gradient_sums import Gradients, declared, reduce_gradients
from .group import GroupActor


def gradient_norms(
    session: Session, group: GroupActor, norm_type: float, loc: Location | None
) -> torch.Tensor:
    """Record the norms of the gradients of an actor's parameters, [parameters].

    Each rank has a copy. A gradient that is not there counts as zeros. An actor that trains nothing
    has no norm.
    """
    session.module.meshes.setdefault(group.mesh.name, group.mesh)
    session.groups[group.name] = group
    reduce_gradients(session, group.name, loc)
    base = f"{group.name}.gradient_norms.{norm_type}"
    make = functools.partial(_norms, norm_type)
    name = declared(session, group, base, {}, make, loc)
    type_ = session.module.functions[name].outputs[0]
    assert isinstance(type_, TensorType)
    value = session.new_value("norms", relocate(type_, group.mesh))
    op = session.emit(Call((), (value,), fn=Symbol(name), loc=loc, mb=session.mb))
    norms = session.hold(op.result, TensorSpec(torch_dtype(type_.dtype), type_.shape))
    assert isinstance(norms, TracedTensor)
    return norms


_OWN_POWERS = (0.0, 1.0, math.inf)
"""Norms that need no root: a count, a sum, an extreme."""


def _common_type(tensors: Sequence[StateTensor]) -> torch.dtype:
    """The type of the norms: what the trained tensors' types are promoted to."""
    dtypes = [each.tensor.dtype for each in tensors] or [torch.float32]
    return reduce(torch.promote_types, dtypes).to_real()


def _norms(
    norm_type: float,
    group: GroupActor,
    name: str,
    gradients: Gradients,
    loc: Location | None,
) -> list[TracedPart]:
    bodies: dict[int, Body] = {}
    trained = [each for each in group.state(group.first).tensors if each.is_trained]
    common = _common_type(trained)
    wide = accumulation_type(common)
    for rank in group.instances:
        own = [each for each in group.state(rank).tensors if each.is_trained]
        bodies[rank] = _Powers([_counted(group, each, rank) for each in own], norm_type, wide)
    axes = tuple(axis for axis, size in group.mesh.grid if size > 1)
    combine = ReduceOp.MAX if math.isinf(norm_type) else ReduceOp.SUM
    layout = Layout.of((WHOLE,), axes, combine) if trained else None
    local = TensorType(ir_dtype(wide), (len(trained),), None, layout)
    whole = TensorType(ir_dtype(wide), (len(trained),))
    norms = TensorType(ir_dtype(common), (len(trained),))
    write: dict[str, Any] = {"effect": Effect.WRITE, "actor": group.name, "loc": loc}
    function = Function(name, (), (norms,), kind=FunctionKind.PROGRAM, **write)
    read = Function(f"{name}.read", (), (local,), **write)
    root = Function(f"{name}.root", (whole,), (norms,), loc=loc)
    roots = {rank: _Roots(norm_type, common) for rank in group.instances}
    return [
        TracedPart(function, None, _program(name, read, root)),
        TracedPart(read, RankBodies.of(bodies)),
        TracedPart(root, RankBodies.of(roots)),
    ]


def _program(name: str, read: Function, root: Function) -> Program:
    names = Names()
    (local,), (whole,), (type_,) = read.outputs, root.inputs, root.outputs
    terms, total = Value(names.fresh("terms"), local), Value(names.fresh("total"), whole)
    norms = Value(names.fresh("norms"), type_)
    ops: list[Op] = [Call((), (terms,), fn=Symbol(read.name))]
    if local == whole:  # the mesh has one rank, or nothing is trained
        total = terms
    else:
        ops.append(Transfer((terms,), (total,)))
    ops += [Call((total,), (norms,), fn=Symbol(root.name)), Return((norms,), ())]
    return Program(name, [], ops)


def _counted(group: GroupActor, state: StateTensor, rank: int) -> tuple[torch.Tensor, bool]:
    """A tensor, and whether this rank's piece of it counts: the first ranks' copies do."""
    logical = group.logical.get(state.path)
    layout = None if logical is None else logical.layout
    cutting = () if layout is None else layout.axes
    position = group.mesh.position(rank)
    counts = all(position[axis][0] == 0 for axis, _ in group.mesh.grid if axis not in cutting)
    return state.tensor, counts


@dataclass(frozen=True)
class _Powers:
    """Gives what a rank's pieces add to the powers of the norms.

    Powers are summed up in `wide`, the type in which torch adds up: the square of a float16 norm
    above 256 is no float16 number.
    """

    tensors: Sequence[tuple[torch.Tensor, bool]]
    norm_type: float
    wide: torch.dtype

    def state(self) -> Sequence[torch.Tensor]:
        """Nothing: it reads no parameter."""
        return ()

    def trained(self) -> Sequence[torch.Tensor]:
        """The parameters whose gradients it reads."""
        return [tensor for tensor, _ in self.tensors]

    def __call__(self) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            powers = [self._power(*each) for each in self.tensors]
            return (torch.stack(powers) if powers else torch.zeros(0, dtype=self.wide),)

    def _power(self, tensor: torch.Tensor, counts: bool) -> torch.Tensor:
        gradient = tensor.grad
        if gradient is None or not counts or not gradient.numel():
            return torch.zeros((), dtype=self.wide, device=tensor.device)
        wide = self.wide.to_complex() if gradient.is_complex() else self.wide
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, self.norm_type, dtype=wide)
        return norm if self.norm_type in _OWN_POWERS else norm.pow(self.norm_type)


@dataclass(frozen=True)
class _Roots:
    """Makes norms of their powers, in the type of the parameters.

    It is a function of the module, since a process without pieces knows no parameters.
    """

    norm_type: float
    dtype: torch.dtype

    def state(self) -> Sequence[torch.Tensor]:
        """Nothing."""
        return ()

    def trained(self) -> Sequence[torch.Tensor]:
        """Nothing."""
        return ()

    def __call__(self, powers: torch.Tensor) -> Sequence[torch.Tensor]:
        is_norm = self.norm_type in _OWN_POWERS
        norms = powers if is_norm else powers.pow(1.0 / self.norm_type)
        return (norms.to(self.dtype),)
