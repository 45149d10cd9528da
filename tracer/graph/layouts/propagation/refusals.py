"""Errors of layouts that are none, or contradict each other, in words of the user's plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from .....ir.layout import Layout
from .....ir.location import Location
from .....ir.types import Place
from ....values.operators import written_values
from ..cases import Answer, Case, LayoutError
from ..change import Change
from ..versions import Version, text_of, text_of_cuts

_SORTS = (torch.ops.aten.sort.default, torch.ops.aten.sort.stable)
_OF_EXPERTS = (
    "if a model of transformers sorts the experts of tokens there, take it in one part, "
    "cg.cut_layers(model, 1).part(0), which computes them without a sort"
)
_WORK = {Change.GATHER: "gathered", Change.RESHARD: "moved between ranks"}
"""The changes that may be refused, in words."""


def check_given(layout: Layout, rank: int, place: Place, name: str, loc: Location | None) -> None:
    """Refuse a layout that a value cannot have.

    Args:
        layout: the layout that the caller gives.
        rank: the number of the value's dimensions.
        place: the ranks.
        name, loc: the value's name and line, for messages.

    Raises:
        LayoutError: it names other axes, or one twice, or has cuts of other dimensions.
    """
    sizes = dict(place.axes)
    unknown = [axis for axis in layout.axes if axis not in sizes]
    if len(layout.cuts) == rank and not unknown and len(set(layout.axes)) == len(layout.axes):
        return
    if unknown:
        reason = f"names the axis {unknown[0]}, and {place} has {', '.join(sizes)}"
    elif len(layout.cuts) != rank:
        reason = f"has cuts of {len(layout.cuts)} dimensions, and the tensor has {rank}"
    else:
        reason = "names an axis twice"
    raise LayoutError(
        f"the layout that is given for %{name} {reason}",
        loc=loc,
        remedy="give each dimension one cut, along axes of the mesh, each of them once",
    )


def check_in_place(
    case: Case, answer: Answer, versions: Mapping[fx.Node, Sequence[Version]]
) -> None:
    """Refuse a write in place to a value that is transferred first: it would be lost.

    Raises:
        LayoutError: an op writes so.
    """
    written = {id(v) for v in written_values(case.target, [*case.arguments.values()], {})}
    for operand, layout in zip(case.operands, answer.wanted, strict=True):
        if id(operand) in written and (layout != operand.layout or len(versions[operand.node]) > 1):
            raise case.error(
                f"it writes in place to %{operand.node.name}, which is not laid out as the op "
                "needs it",
                "use the form of the op that makes a new tensor",
            )


def refusal(
    before: Version,
    after: Version,
    change: Change,
    user: fx.Node | None,
    reason: str,
    loc: Location | None,
    sequence: Collection[str] = (),
) -> LayoutError:
    """The error that an op, or the result of a method, needs a value in another layout.

    Args:
        before, after: the value as it is, and as it is needed.
        change: the work that this would take.
        user: the op; None: the result.
        reason: why the op cannot take the value as it is; may be empty.
        loc: the user's line.
        sequence: axes that cut tokens between layers whose weights they cut.
    """
    leave = "leave out sequence= in the plan, or " if {*before.layout.axes} & {*sequence} else ""
    if user is not None and user.target in _SORTS:
        leave = f"{_OF_EXPERTS}; or {leave}"
    who = str(user.target).removesuffix(".default") if user is not None else "the result"
    because = f": {reason}" if reason else ""
    return LayoutError(
        f"{who} needs {text_of(after)}, but it is {text_of(before)}, and would have to be "
        f"{_WORK[change]}{because}",
        loc=loc,
        remedy=_last_axis(before.layout, after.layout)
        or f"{leave}cut another dimension, or leave it whole; or ask for the layout that is needed "
        "in front of that line, as by x = cg.layout(x, cg.whole), which gathers it there",
    )


def _last_axis(before: Layout, after: Layout) -> str:
    """The remedy for a sum over an axis that does not cut a dimension last; empty for other values.

    A sum is reduced to pieces of what its ranks have. These are the pieces that are needed only if
    the axis of the sum is the last one of the cut, as that of experts for tokens.
    """
    for number, (has, needs) in enumerate(zip(before.cuts, after.cuts, strict=True)):
        summed = [axis for axis in needs.axes if axis in before.summands]
        others = [axis for axis in needs.axes if axis not in summed]
        if summed and others == [*has.axes] and needs.axes != (*others, *summed):
            axes = ", ".join(f'"{axis}"' for axis in (*others, *summed))
            return (
                f"cut dimension {number} along {' and '.join(summed)} last, in the plan and in "
                f"arguments: cg.cut({number}, {axes})"
            )
    return ""


def gradient_refusal(
    path: str, before: Version, after: Version, change: Change, loc: Location | None
) -> LayoutError:
    """The error that a parameter is cut otherwise than its gradient; the plan can change it.

    Args:
        path: that of the parameter.
        before, after: its gradient as the backward makes it, and as the parameter is cut.
        change: the work that would lead from one to the other.
        loc: the user's line.
    """
    type_, cuts = text_of(after).partition(" ")[2], text_of_cuts(before.layout)
    return LayoutError(
        f"the backward makes the gradient of '{path}' as {text_of(before)}, but '{path}' is "
        f"{type_}, and its gradient would have to be {_WORK[change]}",
        loc=loc,
        remedy=f'cut it in the plan as its gradient is: "{path}": {cuts}',
    )


def draws_late(node: fx.Node, locations: Mapping[fx.Node, Location]) -> LayoutError:
    """The error that two parts draw random numbers: one key seeds all draws of a call."""
    return LayoutError(
        f"{node.target} draws random numbers behind an exchange, where others have been drawn "
        "before it; so it would not draw what one rank draws",
        loc=locations.get(node),
        remedy="draw the numbers without the values that are exchanged, as by torch.rand_like "
        "or dropout, and use them there; or draw in a method of its own",
    )
