"""Keeps the parameters of steps apart from the keywords that `execute` takes for itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_unflatten

from ..tracer.errors import TraceError
from ..tracer.step import definition
from ..tracer.trace import InputSpec

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_keywords(
    step: Callable[..., Any], inputs: InputSpec, execute: Callable[..., Any]
) -> None:
    """Return if every argument of a step may be given to `execute` by its name.

    Raises:
        TraceError: a parameter of the step is also one of `execute`, which would take it.
    """
    parameters = inspect.signature(execute).parameters.values()
    own = {each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    theirs = [each.name for each in inputs.signature.parameters.values() if each.kind in _BY_NAME]
    _, by_name = tree_unflatten(list(inputs.names), inputs.tree.spec)
    for name in (*theirs, *by_name):
        if name in own:
            raise TraceError(
                f"step {inputs.step} is driven from one rank and has a parameter {name}, but "
                f"execute() takes {name}= for itself and could not pass it on",
                loc=definition(step),
                remedy=f"give the parameter {name} another name",
            )
