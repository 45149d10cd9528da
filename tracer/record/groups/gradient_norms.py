"""Norms of the gradients of actors on meshes: each piece counts once, even if ranks hold copies."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from ....ir.attributes import Effect, ReduceOp, Symbol
from ....ir.layout import WHOLE, Layout
from ....ir.location import Location
from ....ir.ops import Call, Op, Return, Transfer, Value
from ....ir.ops.module import Function, FunctionKind, Program
from ....ir.ops.names import Names
from ....ir.types import TensorType, relocate
from ...graph.layouts.values.accumulation import accumulation_type
from ...values.actor_state import StateTensor
from ...values.group import GroupActor
from ...values.interface import Body, RankBodies, TracedPart
from ...values.specs import TensorSpec, ir_dtype, torch_dtype
from ...values.values import TracedTensor
from ..session.session import Session
from .gradient_sums import Gradients, declared, reduce_gradients


def gradient_norms(
    session: Session, group: GroupActor, norm_type: float, loc: Location | None
) -> torch.Tensor:
    """Record the norms of the gradients of an actor's parameters.

    Args:
        session: the trace.
        group: the actor.
        norm_type: the order of the norm, from 0.
        loc: the user's line.

    Returns:
        A tensor of shape (trained parameters,), of the type to which the parameters' dtypes are
        promoted; each rank has a copy. A parameter without a gradient has norm 0. An actor that
        trains nothing has no norm.
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
"""The orders of norms that need no root: a count, a sum, a maximum."""


def _common_type(tensors: Sequence[StateTensor]) -> torch.dtype:
    """The dtype of the norms: the real type to which the trained tensors' dtypes are promoted."""
    dtypes = [state.tensor.dtype for state in tensors] or [torch.float32]
    return reduce(torch.promote_types, dtypes).to_real()


def _norms(
    norm_type: float,
    group: GroupActor,
    name: str,
    gradients: Gradients,
    loc: Location | None,
) -> list[TracedPart]:
    bodies: dict[int, Body] = {}
    trained = [state for state in group.state(group.first).tensors if state.is_trained]
    common = _common_type(trained)
    wide = accumulation_type(common)
    for rank in group.instances:
        own = [state for state in group.state(rank).tensors if state.is_trained]
        counted = [_counted(group, state, rank) for state in own]
        bodies[rank] = _Powers(counted, norm_type, wide, group.device)
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
    """A tensor, and whether this rank's piece counts; of copies, the first rank's counts."""
    logical = group.logical.get(state.path)
    layout = None if logical is None else logical.layout
    cutting = () if layout is None else layout.axes
    position = group.mesh.position(rank)
    counts = all(position[axis][0] == 0 for axis, _ in group.mesh.grid if axis not in cutting)
    return state.tensor, counts


@dataclass(frozen=True)
class _Powers:
    """Gives the contributions of a rank's pieces to the powers of the norms, (parameters,).

    The powers are summed in `wide`, torch's accumulation type: the square of a float16 norm above
    256 overflows float16.
    """

    tensors: Sequence[tuple[torch.Tensor, bool]]
    norm_type: float
    wide: torch.dtype
    device: torch.device | None

    def state(self) -> Sequence[torch.Tensor]:
        """Nothing, as the function reads no parameter."""
        return ()

    def trained(self) -> Sequence[torch.Tensor]:
        """The parameters whose gradients the function reads."""
        return [tensor for tensor, _ in self.tensors]

    def __call__(self) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            powers = [self._power(*counted) for counted in self.tensors]
            return (torch.stack(powers) if powers else torch.zeros(0, dtype=self.wide),)

    def _power(self, tensor: torch.Tensor, counts: bool) -> torch.Tensor:
        gradient = tensor.grad
        if gradient is None or not counts or not gradient.numel():
            return torch.zeros((), dtype=self.wide, device=self.device)
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
