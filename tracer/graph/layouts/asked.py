"""`cg.layout`: the op by which a method asks for a layout, and its rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....ir.layout import WHOLE, Cut, Layout
from .cases import Answer, Case, LocalOp, Operand, Rule


@torch.library.custom_op("cg::layout", mutates_args=())
def asked_layout(value: torch.Tensor, cuts: str) -> torch.Tensor:
    """A copy of a tensor; on a mesh, it is cut by `cuts`, a text of `text_of_cuts`."""
    return value.clone()


@asked_layout.register_fake
def _(value: torch.Tensor, cuts: str) -> torch.Tensor:
    return torch.empty_like(value)


def _backward(_: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient, None


asked_layout.register_autograd(_backward)


def text_of_cuts(cuts: Sequence[tuple[int, Cut]]) -> str:
    """The text for cuts of dimensions that the op takes, such as `0:dp.tp:1:1:0:0;-1:ep:3:1:0:0`.

    Dimensions that are whole are left out. The numbers are the fields of `Cut`.
    """
    return ";".join(
        f"{dim}:{cut}:{cut.blocks}:{cut.unit}:{int(cut.zigzag)}:{cut.shift}"
        for dim, cut in cuts
        if cut
    )


def _cuts_of(text: str) -> list[tuple[int, Cut]]:
    cuts = []
    for part in text.split(";") if text else ():
        dim, axes, blocks, unit, zigzag, shift = part.split(":")
        own = Cut(tuple(axes.split(".")), int(blocks), int(unit), zigzag == "1", int(shift))
        cuts.append((int(dim), own))
    return cuts


def _asked(case: Case) -> Answer:
    """The layout that the method asks for: any transfer may make it."""
    operand = case["value"]
    assert isinstance(operand, Operand)
    rank = len(operand.shape)
    dim_cuts, used = [WHOLE] * rank, set[str]()
    for dim, cut in _cuts_of(case["cuts"]):
        axes = tuple(axis for axis in cut.axes if case.sizes.get(axis) != 1)
        reason = None
        if not -rank <= dim < rank:
            reason = f"%{operand.node.name} has {rank} dimensions, and dimension {dim} is to be cut"
        elif unknown := [axis for axis in cut.axes if axis not in case.sizes]:
            reason = f"the mesh has no axis '{unknown[0]}', but {', '.join(case.sizes)}"
        elif used.intersection(axes) or len(set(axes)) < len(axes):
            reason = f"an axis of {', '.join(axes)} cuts %{operand.node.name} twice"
        elif dim_cuts[dim]:
            reason = f"dimension {dim} of %{operand.node.name} is to be cut twice"
        elif operand.shape[dim] % cut.blocks:
            reason = f"{operand.shape[dim]} entries are not {cut.blocks} blocks of equal size"
        if reason is not None:
            raise case.error(reason, "correct what cg.layout is given there")
        used.update(axes)
        dim_cuts[dim] = replace(cut, axes=axes) if axes else WHOLE
    layout = Layout(tuple(dim_cuts))
    return Answer((layout,), (layout,), local=_local, is_asked=True)


def _local(op: LocalOp) -> Any:
    return op.emit(torch.ops.aten.clone.default, op.arguments["value"])


ASKED = torch.ops.cg.layout.default
"""The operator, as it stands in graphs."""

RULES: Mapping[object, Rule] = {ASKED: _asked}
