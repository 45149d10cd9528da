"""Trace a function into a graph by make_fx, without replacing methods of `nn.Module` meanwhile.

`torch.fx.Tracer.trace` replaces `__call__` and `__getattr__`, to see modules and parameters. The
tracer of make_fx looks at neither, but each replacement visits all classes derived from
`nn.Module`, graph modules included, and makes Python forget where their attributes are: that is a
twentieth of the time of a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

_MARK = "__fx_already_patched"
"""By this attribute of a method fx sees that it need not replace it."""


def trace_graph(function: Callable[..., Any], *args: Any, **options: Any) -> fx.GraphModule:
    """The graph module that make_fx makes of a function, which may itself trace others by fx.

    Args:
        function: is called once.
        args: what it is called with.
        options: of make_fx.
    """
    with ExitStack() as marks:

        @functools.wraps(function)
        def traced(*args: Any) -> Any:
            marks.close()  # fx has begun, and what the function traces is another trace
            return function(*args)

        marks.enter_context(_marked())
        made: fx.GraphModule = make_fx(traced, **options)(*args)
        return made


@contextmanager
def _marked() -> Iterator[None]:
    """Inside the `with` block, a trace of fx that begins leaves `nn.Module` as it is."""
    methods = (nn.Module.__call__, nn.Module.__getattr__)
    for method in methods:
        setattr(method, _MARK, True)
    try:
        yield
    finally:
        for method in methods:
            if hasattr(method, _MARK):
                delattr(method, _MARK)
