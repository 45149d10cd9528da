"""Compute some of torch's functions by operators of cg, while a method is traced.

Those are loops over time, which become one operator each, and on a mesh attention with dropout,
whose mask ranks have to be able to draw in parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ..dropout.dropout_calls import DROPOUT_ATTENTION_CALLS
from ..recurrence.whole_loops import WHOLE_LOOPS


class ReplacedFunctions(TorchFunctionMode):
    """Gives torch's functions those of cg in the table.

    Torch's own run for arguments that these do not take, and under the transforms of `torch.func`.

    Args:
        is_of_mesh: whether ranks of a mesh make the call. One rank has torch's kernels of attention
            with dropout, which are faster.
    """

    def __init__(self, is_of_mesh: bool) -> None:
        super().__init__()
        self._replacements = _ON_MESHES if is_of_mesh else _ON_ONE_RANK

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        replacement = self._replacements.get(func)
        if replacement is not None and not _is_transformed():
            arguments = replacement.arguments(args, kwargs or {})
            if arguments is not None:
                return replacement.function(**arguments)
        if func is torch.autograd.grad:  # runs code again, if there are checkpoints
            with _not_handled(), self:
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def _not_handled() -> Iterator[None]:
    """Let `torch.autograd.grad` run inside of modes, which handle what it calls, not itself."""
    names: dict[str, Any] = vars(torch.autograd)
    asks = names["has_torch_function"]
    names["has_torch_function"] = lambda tensors: False
    try:
        yield
    finally:
        names["has_torch_function"] = asks


def _is_transformed() -> bool:
    """True if a transform looks at operators, besides autograd."""
    is_functional = torch._C._functorch.peek_interpreter_stack() is not None
    return is_functional or forward_ad._current_level >= 0


class _Replacement:
    """A function of cg in the place of one of torch."""

    def __init__(self, function: Callable[..., Any], accepts: Callable[..., bool]) -> None:
        self.function = function
        self._accepts = accepts
        self._signature = inspect.signature(function)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call by name; None for a call that torch's own function takes."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        return bound.arguments if self._accepts(**bound.arguments) else None


_ON_ONE_RANK: Mapping[Any, _Replacement] = {
    function: _Replacement(*replacement) for function, replacement in WHOLE_LOOPS.items()
}
_ON_MESHES: Mapping[Any, _Replacement] = {
    **_ON_ONE_RANK,
    **{f: _Replacement(*replacement) for f, replacement in DROPOUT_ATTENTION_CALLS.items()},
}
