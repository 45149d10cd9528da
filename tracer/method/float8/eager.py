"""Run plain Python with the linear layers of an actor in float8, as its traced methods run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from ...function_runs import run_plainly
from ...values.actor_state import collect
from ...values.float8_layers import Float8Use
from .linear import in_float8


@contextmanager
def computing_in_float8(instance: Any, use: Float8Use | None) -> Iterator[None]:
    """Compute the layers of an instance in float8 inside the `with` block.

    Args:
        instance: the actor's object.
        use: its layers, if any.
    """
    if use is None:
        yield
        return
    tensors = collect(instance).tensors
    recipes = use.recipes(tensors)
    weights = {
        id(tensor.tensor): (tensor.path, recipes[tensor.path])
        for tensor in tensors
        if tensor.path in recipes
    }
    with _Substitution(in_float8(run_plainly, weights, use)):
        yield


class _Substitution(TorchFunctionMode):
    """Runs torch functions by another function."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._run(func, args, kwargs or {})
