"""Check that layouts fit their places, and that only ops that know of layouts take them."""

from __future__ import annotations

import math

from ..attributes import ReduceOp
from ..layout import Layout
from ..ops import Op, Slice, Transfer, Value
from ..ops.module import Function, Module
from ..ops.rules import Problem, transferred
from ..phases import Phase, has_places
from ..types import Mesh, Place, TensorType, Type, promised


def laid_out(type_: Type) -> TensorType | None:
    """The type of a tensor with a layout, or of a promised one; None for all other types."""
    value = promised(type_)
    return value if isinstance(value, TensorType) and value.layout is not None else None


def check_value(value: Value, module: Module) -> None:
    """Check that a value's mesh is one of the module's, and that its layout fits its place.

    Raises:
        Problem: the mesh is not the module's, or the layout does not fit.
    """
    place = value.type.place
    if isinstance(place, Mesh) and module.meshes.get(place.name) != place:
        raise Problem(
            f"%{value.name} is at mesh {place}, which is not the one that the module declares",
            f"declare it: mesh {place} {{..., ranks = {{...}}}}",
            value,
        )
    type_ = laid_out(value.type)
    if type_ is None:
        return
    if not has_places(module.phase):
        raise Problem(
            f"the type of %{value.name} has a layout, in a scheduled program",
            "a scheduled program is of one rank, and its types are those of what the rank holds",
            value,
        )
    if problem := misfit(type_, place):
        raise Problem(f"the layout of %{value.name} {problem}", _FIT_HELP, value)


_FIT_HELP = "write f32[8/dp,64|+tp]@m, with axes of the mesh, or f32[8/*]@{0..3}; each axis once"


def check_mesh(name: str, mesh: Mesh, module: Module) -> str | None:
    """The problem with the declaration of a mesh, if there is one."""
    if name != mesh.name:
        return f"mesh {mesh} is in the table as @{name}"
    if not all(0 <= rank < module.world for rank in mesh.ranks):
        return f"mesh {mesh} has ranks {mesh.ranks}, the world has {module.world}"
    return None


def check_signature(function: Function, phase: Phase) -> str | None:
    """The problem with the layouts of a function's inputs and outputs, or with its ranks."""
    if function.ranks and has_places(phase):
        return f"function @{function.name} has ranks, in phase {phase}; its calls say where it runs"
    for type_ in (*function.inputs, *function.outputs):
        tensor = laid_out(type_)
        if tensor is None:
            continue
        if not has_places(phase):
            return f"function @{function.name} has a layout in its signature, in phase {phase}"
        if problem := misfit(tensor, None):
            return f"function @{function.name} has a layout that {problem}"
    return None


def misfit(type_: TensorType, place: Place | None) -> str | None:
    """The way in which a layout does not fit its shape and its place; None if it does.

    Args:
        type_: a tensor with a layout.
        place: its place; None if that is not known, as in a function's signature.
    """
    layout = type_.layout
    assert layout is not None, "a tensor with a layout"
    if len(layout.cuts) != len(type_.shape):
        return f"has {len(layout.cuts)} cuts, the shape {len(type_.shape)} dimensions"
    for cut, size in zip(layout.cuts, type_.shape, strict=True):
        if cut.blocks < 1 or cut.unit < 1 or size % (cut.blocks * cut.unit):
            return f"has {cut.blocks} blocks of units of {cut.unit} in a dimension of {size}"
        if not cut and (cut.zigzag or cut.shift):
            return "has an order of pieces in a dimension that is whole"
    if len(set(layout.axes)) != len(layout.axes):
        return f"uses an axis twice: {', '.join(layout.axes)}"
    if layout.reduce is ReduceOp.AVG:
        return "has averages among summands, which are wrong where pieces are uneven"
    return None if place is None else _unknown_axis(layout, place)


def _unknown_axis(layout: Layout, place: Place) -> str | None:
    names = [axis for axis, _ in place.axes]
    if unknown := [axis for axis in layout.axes if axis not in names]:
        return f"uses the axis {unknown[0]}; those of {place} are {', '.join(names)}"
    sizes = dict(place.axes)
    for cut in layout.cuts:
        if cut.shift and not cut.shift < (pieces := math.prod(sizes[axis] for axis in cut.axes)):
            return f"is shifted by {cut.shift}, and {cut} has {pieces} pieces"
    if sorted(layout.summands, key=names.index) != list(layout.summands):
        return f"has summands along {'.'.join(layout.summands)}, not in the order of {place}"
    return None


def check_op(op: Op, phase: Phase) -> None:
    """Check that an op with laid-out operands or results knows of layouts.

    Raises:
        Problem: it does not, or an operand is laid out over another place.
    """
    for value in (*op.operands, *op.results):
        type_ = laid_out(value.type)
        if type_ is None:
            continue
        assert type_.layout is not None, "a tensor with a layout"
        if op.takes_layouts and (op.takes_summands or not type_.layout.summands):
            continue
        noun = "summands" if op.takes_layouts else "a tensor that is laid out"
        raise Problem(
            f"{op.opcode} of {noun}, %{value.name}: {type_}", _remedy(value, type_), value
        )
    if isinstance(op, Transfer | Slice) or (op.brings_operands and phase is Phase.TRACED):
        return
    for value in op.operands:
        if laid_out(value.type) is not None and value.type.place != op.place:
            raise Problem(
                f"%{value.name} is laid out over {value.type.place}, but {op.opcode} runs at "
                f"{op.place}",
                "an operand that is laid out is at exactly the ranks of the op, on the same mesh; "
                "a transfer brings it there",
                value,
            )


def _remedy(value: Value, type_: TensorType) -> str:
    copies = TensorType(type_.dtype, type_.shape)
    return f"copies are what every op takes: {transferred(value, copies)}"
