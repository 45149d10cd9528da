"""The actors of `executions_job.py`, and what they raise and send."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cg


class Boom(Exception):
    """A user's exception, whose constructor does not take its `args`."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} ({code})")
        self.code = code


class Unloadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return (_refuse, ())


def _refuse() -> None:
    raise LookupError("not here")


@cg.actor
class Worker:
    """Takes any object."""

    def __init__(self, tag: str = "") -> None:
        self.tag = tag
        self.total = 0
        self.seen: list[Any] = []

    def echo(self, x: Any) -> Any:
        return x

    def add(self, x: int) -> int:
        self.total += x
        return self.total

    def keep(self, x: Any) -> int:
        self.seen.append(x)
        return len(self.seen)

    def sums(self, nothing: Any) -> list[float]:
        return [float(np.sum(x)) for x in self.seen]

    def fail(self, x: Any) -> Any:
        if x == "boom":
            raise Boom(f"{self.tag} got {x!r}", 7)
        return x

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def wait(self, what: float | str) -> float | str:
        """Waits so many seconds, or until a file of that name appears."""
        if isinstance(what, str):
            until = time.monotonic() + 60
            while not Path(what).exists():
                if time.monotonic() > until:
                    raise TimeoutError(f"nobody has made {what}")
                time.sleep(0.001)
        else:
            time.sleep(what)
        return what

    def leave_sign(self, folder: str, x: tuple[int, bool]) -> tuple[int, bool]:
        """Says that this execution, the first part of `x`, has come here."""
        Path(folder, str(x[0])).touch()
        return x

    def await_sign(self, folder: str, x: tuple[int, bool]) -> int:
        """Waits until the next execution has come to `leave_sign`, if the second part says so."""
        execution, waits = x
        until = time.monotonic() + 20
        while waits and not Path(folder, str(execution + 1)).exists():
            if time.monotonic() > until:
                raise TimeoutError(f"execution {execution + 1} has not begun beside {execution}")
            time.sleep(0.001)
        return execution

    def cpu(self, nothing: Any) -> float:
        return time.process_time()

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def shaped(self, x: torch.Tensor) -> torch.Tensor:
        if (x < 0).any():
            raise ValueError("negative")
        return x * 2


@cg.actor
class Scale(torch.nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.full((), by), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def workers() -> list[Worker]:
    """One on each rank but the driver's."""
    return [Worker.on(rank)(f"w{rank}") for rank in range(1, cg.world_size())]
