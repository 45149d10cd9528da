"""Let `torch.utils.checkpoint` do in a trace what it does in eager code.

While torch makes a graph, selective policies keep every value, and leave marks for the partitioner
of `torch.compile`. A trace runs the backward itself. So there a policy saves what it says, and the
backward computes the rest again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
