"""Let `torch.utils.checkpoint` do in a trace what it does in eager code.

Where it sees a graph being made, its selective policies keep every value, and leave marks that the
partitioner of `torch.compile` goes by. A trace runs the backward itself, so what a policy saves is
taken from the forward, and the rest is computed again right there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint


@contextmanager
def checkpoints_as_eager() -> Iterator[None]:
    """Inside the `with` block, policies of checkpoints choose what is saved."""
    names: dict[str, Any] = vars(torch.utils.checkpoint)
    asks = names["_is_compiling"]
    names["_is_compiling"] = lambda function, args, kwargs: False
    try:
        yield
    finally:
        names["_is_compiling"] = asks
