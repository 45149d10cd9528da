"""Whether the arguments of a call fit its method, known before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..ir.location import Location
from .errors import TraceError
from .specs import Tree


def check_arguments(
    function: Callable[..., Any],
    signature: Tree,
    what: str,
    home: Location | None,
    loc: Location | None,
) -> None:
    """Return if the method can be called with so many arguments, by these names.

    A method whose signature cannot be asked for is called as it is asked to.

    Args:
        function: the bound method.
        signature: of the call, a pytree `(args, kwargs)`.
        what: the method, in words.
        home: where it is defined, if that is known.
        loc: the user's line of the call.

    Raises:
        TraceError: it cannot.
    """
    try:
        # A decorator may add arguments to what it wraps: what is called is what counts.
        parameters = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # of a builtin, say
    # By the shape of the call alone: leaves may stand for what cannot be made before it runs.
    args, kwargs = signature.spec.children()
    try:
        parameters.bind(*[None] * args.num_children, **dict.fromkeys(kwargs.context))
    except TypeError as error:
        at = "" if home is None else f", at {home}"
        raise TraceError(
            f"the arguments do not fit {what}{parameters}: {error}",
            loc=loc,
            remedy=f"pass what it takes, or change what it takes where it is defined{at}",
        ) from None
