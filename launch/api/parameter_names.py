"""Tell the names of a step's parameters from those of cg's own methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_unflatten

from ...tracer.errors import TraceError
from ...tracer.method.binding import definition
from ...tracer.record.session.inputs import InputSpec

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_keywords(
    step: Callable[..., Any], inputs: InputSpec, execute: Callable[..., Any]
) -> None:
    """Return if every argument of a step may be given to `execute` by its name.

    Raises:
        TraceError: a parameter of the step is also one of `execute`, which would take it.
    """
    parameters = inspect.signature(execute).parameters.values()
    keywords = {
        parameter.name
        for parameter in parameters
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for name in _names_of(inputs):
        if name in keywords:
            raise TraceError(
                f"step {inputs.step} is driven from one rank and has a parameter {name}, but "
                f"execute() takes {name}= for itself and could not pass it on",
                loc=definition(step),
                remedy=f"give the parameter {name} another name",
            )


def check_executions(inputs: InputSpec, method: str) -> None:
    """Return if `executions=` can only be meant for a method of `Compiled`.

    Raises:
        TypeError: it may be an argument of the step.
    """
    if "executions" in _names_of(inputs):
        raise TypeError(
            f"{method}(executions=...): step {inputs.step} has a parameter executions, too; write "
            f"compiled.repeated(n).{method}(...) to say how often it runs, with the arguments of "
            "the step alone in the second call"
        )


def _names_of(inputs: InputSpec) -> list[str]:
    """The names by which the arguments of a step are or may be given."""
    parameter_names = [
        parameter.name
        for parameter in inputs.signature.parameters.values()
        if parameter.kind in _BY_NAME
    ]
    _, by_name = tree_unflatten(list(inputs.names), inputs.tree.spec)
    return [*parameter_names, *by_name]
