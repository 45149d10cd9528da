"""Let parts of torch do in a trace what they do in eager code.

While torch makes a graph, selective policies of `torch.utils.checkpoint` keep every value, and
leave marks for the partitioner of `torch.compile`. A trace runs the backward itself. So there a
policy saves what it says, and the backward computes the rest again.

A function of `torch.compile` computes what the function does that it was made from. So a trace
looks into that one, and `compile(fuse=...)` of a step makes fused kernels of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint


@contextmanager
def checkpoints_as_eager() -> Iterator[None]:
    """Let policies of checkpoints choose what is saved inside the `with` block."""
    names: dict[str, Any] = vars(torch.utils.checkpoint)
    asks = names["_is_compiling"]
    names["_is_compiling"] = lambda function, args, kwargs: False
    try:
        yield
    finally:
        names["_is_compiling"] = asks


@contextmanager
def compiled_as_eager() -> Iterator[None]:
    """Let functions of `torch.compile` run as they were before, inside the `with` block."""
    # Sympy comes with it, which makes 0.4 s of the time that a process takes to import cg.
    config: Any = importlib.import_module("torch._dynamo.config")
    compiler: Any = torch.compiler
    with config.patch(error_on_nested_fx_trace=False), compiler.set_stance("force_eager"):
        yield
