"""How a trace, or a comparison with one, calls a function of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Run: TypeAlias = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""Takes a function of torch with its arguments, calls it or what stands for it, and gives the
result."""


def run_plainly(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function as it is."""
    return function(*args, **kwargs)
