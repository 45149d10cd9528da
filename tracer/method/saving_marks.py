"""What a method says about values that its backward may need: keep, recompute or offload them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ...ir.location import Location
from ..errors import TraceError
from ..source import caller_location
from ..values.values import TracedTensor
from .reuse.saving_functions import KEEP, META, OFFLOAD, RECOMPUTE, SavingMark, noted
from .reuse.templates import node_of


def keep(value: torch.Tensor) -> torch.Tensor:
    """Save a value of a method for the backward, if the backward needs it or what follows from it.

    With `compile(memory=...)`, and under `cg.remat`, the backward computes some values again.
    It never computes this one, and so nothing of what only this one is computed from.

    Args:
        value: a tensor that a method of an actor has computed.

    Returns:
        The same tensor. Outside of a trace, the call does nothing else.

    Raises:
        TypeError: `value` is no tensor, or a tensor of the step's own Python.
        ValueError: the method has not computed it from its arguments or its actor's state.
    """
    return _marked(value, KEEP)


def recompute(value: torch.Tensor) -> torch.Tensor:
    """Compute a value of a method again in the backward that needs it, and never save it.

    Its operands are saved, if nothing else is said of them. The second value has the same
    bits as the first.

    Args:
        value: a tensor that a method of an actor has computed. The trace of the step refuses values
            that are drawn at random or written in place.

    Returns:
        The same tensor. Outside of a trace, the call does nothing else.

    Raises:
        TypeError, ValueError: as in `cg.keep`.
    """
    return _marked(value, RECOMPUTE)


def offload(value: torch.Tensor) -> torch.Tensor:
    """Save a value of a method for the backward in the memory of the host, beside a device.

    The device copies it there behind its last use in the forward, and back ahead of its use in the
    backward, if another call of the rank's program runs in between. The bits stay. As with
    `cg.keep`, the value is never computed again.

    Args:
        value: a tensor that a method of an actor has computed.

    Returns:
        The same tensor. Outside of a trace, the call does nothing else. `compile` refuses it for
        ranks without a device, and for steps that one rank drives.

    Raises:
        TypeError, ValueError: as in `cg.keep`.
    """
    return _marked(value, OFFLOAD)


def mark_of(node: fx.Node) -> str | None:
    """The mark of a node: `KEEP`, `RECOMPUTE`, `OFFLOAD` or None."""
    mark: str | None = node.meta.get(META)
    return mark


def pass_marks(
    replaced: Mapping[fx.Node, fx.Node], locations: Mapping[str, Location | None]
) -> None:
    """Give the mark of each node to its replacement.

    Args:
        replaced: the replacement of each node that was removed.
        locations: the source lines of nodes, by name.

    Raises:
        TraceError: the two have different marks.
    """
    for node, replacement in replaced.items():
        mark = mark_of(node)
        if mark is not None and replacement.meta.setdefault(META, mark) != mark:
            raise TraceError(
                f"cg.{mark} and cg.{mark_of(replacement)} are given one value, once as a view that "
                "changes nothing",
                loc=locations.get(node.name) or locations.get(replacement.name),
                remedy="give it to one of them",
            )


def _marked(value: torch.Tensor, mark: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or isinstance(value, TracedTensor):
        shown = "a tensor of the step itself" if isinstance(value, TracedTensor) else repr(value)
        raise TypeError(
            f"cg.{mark} takes a tensor that a method of an actor has computed, inside of the "
            f"method, and not {shown}"
        )
    return noted(SavingMark(mark, partial(_mark_node, mark)), value)


def _mark_node(mark: str, value: torch.Tensor) -> torch.Tensor:
    if get_proxy_mode() is None:
        return value
    node = node_of(value)
    if node is None:
        raise ValueError(
            f"cg.{mark} is given a tensor that the method does not compute from its arguments or "
            "its actor's state"
        )
    if node.meta.get(META, mark) != mark:
        other = node.meta[META]
        raise TraceError(
            f"a value is given to cg.{other} and to cg.{mark}",
            loc=caller_location(),
            remedy="leave cg.keep out: what cg.offload marks is saved, and never computed again"
            if {mark, other} == {KEEP, OFFLOAD}
            else "give it to one of them",
        )
    node.meta[META] = mark
    return value
