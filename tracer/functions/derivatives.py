"""Refuse derivatives that no graph has: of opaque functions, changing state, gradient hooks."""

from __future__ import annotations

from collections.abc import Sequence

from ..autodiff.subgraphs import Piece
from ..autodiff.version_counters import CHANGE_AFTER, changed_between
from ..errors import TraceError
from ..methods.dispatch_modes import storage_key
from ..methods.joint import Joint
from .effects import Effects
from .interface import Call, Write


def refuse_remat(call: Call, joint: Joint) -> None:
    """Refuse to compute a call again in the backward that is not the same then."""
    if joint.recorder.draws:
        does = "draws random numbers, which would not be the same again"
    elif joint.written or joint.rebinds:
        does = "changes the actor's state, which would happen twice"
    else:
        return
    raise TraceError(
        f"{call.what} cannot be computed again in the backward: it {does}",
        loc=call.loc,
        remedy="call it without cg.remat, or move that part into a method of its own",
    )


def no_derivative(call: Call) -> TraceError:
    """Make the error for a derivative of an opaque function."""
    return TraceError(
        f"{call.what} is opaque, so it has no derivative, but a loss depends on its result",
        loc=call.loc,
        remedy="remove @cg.opaque, so that the method is traced; or detach its result",
    )


def refuse_history(call: Call, piece: Piece) -> None:
    """Refuse state that carries gradient history from outside of the step."""
    for state in piece.state:
        if state.tensor.requires_grad and not state.tensor.is_leaf:
            raise call.refusal(
                f"it uses '{state.path}', which carries gradient history from outside the step",
                "keep x.detach() in the attribute, or an nn.Parameter",
            )


def refuse_written(call: Call, backward: Piece, effects: Effects, between: Sequence[Write]) -> None:
    """Refuse a backward whose state a call in between writes to."""
    for write in between:
        memory = effects.written_by(write)
        paths = [f"'{s.path}'" for s in backward.state if storage_key(s.tensor) in memory]
        if paths:
            raise TraceError(
                changed_between(call.what, paths, [write]), loc=call.loc, remedy=CHANGE_AFTER
            )


def refuse_hooks(call: Call) -> None:
    """Refuse parameters with gradient hooks."""
    for state in call.state.tensors:
        tensor = state.tensor
        if state.is_trained and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
            raise TraceError(
                f"{call.what} cannot be differentiated: '{state.path}' has a gradient hook, which "
                "would see the gradient of each call instead of their sum",
                loc=call.blame,
                remedy="do the hook's work in the method that uses the optimizer",
            )
