"""Work on gradients in a step's own Python: it would be done once, while that is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import TraceError
from ..source import caller_location
from .session import current

REMEDY = (
    "call it in an actor's method, which the step calls after cg.backward(loss): def update(self): "
    "self.opt.step(); self.opt.zero_grad(). Gradients of several actors are clipped together by "
    "cg.clip_grad_norm(actors, max_norm)"
)


@contextmanager
def training_refused() -> Iterator[None]:
    """Inside the `with` block, refuse an optimizer's step that the step which is traced makes."""
    handle = register_optimizer_step_pre_hook(_refuse)
    try:
        yield
    finally:
        handle.remove()


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Other threads' optimizers come by here as well, and those of methods that are being traced.
    session = current()
    if session is None or session.paused is not None:
        return
    raise TraceError(
        f"{type(optimizer).__name__}.step() in a step, whose Python runs only while it is traced: "
        "parameters would never change",
        loc=caller_location(),
        remedy=REMEDY,
    )
