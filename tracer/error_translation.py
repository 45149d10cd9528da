"""Turn what goes wrong inside a traced call into an error that names the user's line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ..ir.location import Location
from .errors import TraceError, UnknownRowsError
from .source import is_installed, is_user_file

OPAQUE_REMEDY = (
    "make what it depends on a static (plain Python) value; or, where no gradient flows through "
    "the method, mark it with @cg.opaque to call it as it is"
)

_VALUE_OPS = {
    "aten._local_scalar_dense.default": "the value of a tensor becomes a Python value",
    "aten.equal.default": "torch.equal compares the values of tensors",
    "aten.allclose.default": "torch.allclose compares the values of tensors",
    "aten.is_nonzero.default": "a Python condition depends on the value of a tensor",
}
_SHAPE_OPS = {
    "aten.nonzero.default": (
        "the shape of a result depends on the values of a tensor (nonzero, a boolean mask as "
        "index, or torch.where with one argument)"
    ),
}
_MASKED = (
    "keep all elements: torch.where(mask, x, 0) instead of x[mask], and divide a mean by mask.sum()"
)
_STATIC_FORMS = {
    "aten.nonzero.default": f"{_MASKED}; or torch.nonzero_static(mask, size=n)",
    "aten.masked_select.default": _MASKED,
    "aten.bincount.default": (
        "torch.zeros(n, dtype=torch.int64).scatter_add(0, x, torch.ones_like(x)) counts n classes"
    ),
    "aten.repeat_interleave.Tensor": "say how many there are in all by output_size=n",
    "aten._ctc_loss.Tensor": (
        "pad the targets, [rows, longest], and give the lengths as tensors [rows] or as tuples of "
        "integers"
    ),
    "aten._pack_padded_sequence.default": (
        "run over padded sequences, and leave out by torch.where what is beyond their ends"
    ),
}
"""For each operator, what does the same with static shapes."""

_OWN_OPERATOR = (
    "make it an operator of your own, torch.library.custom_op with register_fake and "
    "register_autograd, whose results have shapes that do not depend on values"
)

_OR_OPAQUE = (
    "or, where no gradient flows through the method, mark it with @cg.opaque to call it as it is"
)
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        "Mixing fake modes",
        "it uses a tensor that another trace has left behind, or a copy of a module of the actor, "
        "which copy.deepcopy has made",
        "make copies in the constructor; keep no tensors outside of the actor; or mark the method "
        "with @cg.opaque",
    ),
    (
        "TorchScript",
        "it calls a function or module of TorchScript, which a trace cannot look into",
        f"use the Python module that it was made from; {_OR_OPAQUE}",
    ),
    (
        "HigherOrderOperator",
        "it uses a control flow operator of torch (torch.cond and the like)",
        "compute both sides and choose by torch.where, or decide by a static (plain Python) "
        f"value; {_OR_OPAQUE}",
    ),
)
"""Messages of torch, the meaning of each ("" if it says it), and the remedy."""


def best_location(places: Iterable[tuple[CodeType, int]]) -> tuple[Location | None, str]:
    """The line to blame, and a note about the library line beneath it.

    The user's own innermost line is better than a line of an installed package; the latter is
    better than none, and is added in words where both exist.

    Args:
        places: code and line of each frame, innermost first.
    """
    library: Location | None = None
    for code, line in places:
        file = code.co_filename
        if not is_user_file(file):
            continue
        where = Location(file, line, code.co_name)
        if not is_installed(file):
            return where, f" (in {library})" if library else ""
        library = library or where
    return library, ""


def call_user(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the user's code. Lines are looked for beneath this frame."""
    return function(*args, **kwargs)


def current_location() -> tuple[Location | None, str]:
    """`best_location` of the frames that run now, beneath `call_user`."""
    return best_location(_live(sys._getframe(1)))


def refusal_here(shown: str, reason: str, remedy: str) -> TraceError:
    """The error for something that a traced call, named `shown`, is doing."""
    loc, note = current_location()
    return TraceError(f"{shown} cannot be traced: {reason}{note}", loc=loc, remedy=remedy)


def _live(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    until = call_user.__code__
    while frame is not None and frame.f_code is not until:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def _raised(tb: TracebackType | None) -> list[tuple[CodeType, int]]:
    """The frames of a traceback beneath `call_user`, innermost first."""
    frames: list[tuple[CodeType, int]] = []
    for frame, line in traceback.walk_tb(tb):
        if frame.f_code is call_user.__code__:
            frames.clear()
        else:
            frames.append((frame.f_code, line))
    return frames[::-1]


def translate(error: Exception, shown: str, error_loc: Location | None) -> TraceError:
    """The `TraceError` for an exception that a traced call has raised.

    Args:
        shown: the call in words, such as `Stage.forward`.
        error_loc: the line to name for an exception without a line of the method's body.
    """
    if isinstance(error, TraceError):
        if error.loc is not None or error_loc is None:
            return error
        return type(error)(error.reason, loc=error_loc, remedy=error.remedy)
    loc, note = best_location(_raised(error.__traceback__))
    reason, remedy = _explain(error)
    return TraceError(
        f"{shown} cannot be traced: {reason}{note}", loc=loc or error_loc, remedy=remedy
    )


def _explain(error: Exception) -> tuple[str, str]:
    if isinstance(error, UnknownRowsError):
        return error.reason, error.remedy
    if isinstance(error, DataDependentOutputException):
        op = str(error.func)
        reason = _VALUE_OPS.get(op, f"{op} needs the value of a tensor")
        return f"{reason}, which is not known while tracing", OPAQUE_REMEDY
    if isinstance(error, DynamicOutputShapeException):
        op = str(error.func)
        reason = _SHAPE_OPS.get(op, f"the shape of the result of {op} depends on values")
        form = _STATIC_FORMS.get(op, _OWN_OPERATOR)
        return reason, (
            f"shapes are static in a step: {form}. Where no gradient flows through the method, "
            "@cg.opaque calls it as it is"
        )
    message = str(error).strip() or "no message"
    raised = f"it raised {type(error).__name__}: {message}"
    for sign, meaning, remedy in _KNOWN:
        if sign in message:
            return meaning or raised, remedy
    if isinstance(error, ZeroDivisionError):
        return raised, (
            "where it is a mean over no elements, as of an empty batch, do not call the step "
            "for one, or divide a sum by max(x.numel(), 1)"
        )
    return raised, ""
