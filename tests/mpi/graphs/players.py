"""The actors of the graphs whose behaviours are looked at: of plain Python, and traced."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

import torch

import cg

SECONDS = 60
"""That a result may take."""


class Boom(Exception):
    """A user's exception, whose constructor does not take its `args`."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} ({code})")
        self.code = code


class Halt(BaseException):
    """A user's own, for a framework that catches every `Exception`."""


async def _cancelled() -> None:
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    await task


@cg.actor
class Player:
    """Keeps a log of what it was asked for."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.kept: list[Any] = []

    def echo(self, x: Any) -> Any:
        return x

    @cg.opaque
    def note(self, *what: Any, **named: Any) -> Any:
        """Logs its arguments; returns how many notes there are."""
        self.log.append((*what, named) if named else what)
        return len(self.log)

    def pack(self, *parts: Any, **named: Any) -> Any:
        return (list(parts), named)

    def read_log(self, nothing: Any) -> list[Any]:
        return self.log

    @cg.opaque(returns=2)
    def split(self, x: Any) -> Any:
        return (x[0], x[1:]) if len(x) > 1 else (x,)

    def fail(self, x: Any) -> Any:
        self.log.append(x)
        if x == "boom":
            raise Boom("refused", 3)
        return x

    def give_up(self, how: str) -> str:
        """Raises what is no `Exception`, if it is asked to."""
        if how == "cancelled":
            asyncio.run(_cancelled())
        if how == "closed":
            raise GeneratorExit
        if how == "halt":
            raise Halt("enough")
        return how

    def nap(self, x: Any) -> Any:
        time.sleep(x)
        return x

    def jitter(self, x: Any) -> Any:
        """Gives back what it gets, sooner or later."""
        time.sleep(random.random() * 0.002)
        return x

    def keep(self, x: Any) -> float:
        """Keeps what it gets, and writes to it."""
        self.kept.append(x)
        x[0] = -1.0
        return float(x[1])

    def kept_sums(self, nothing: Any) -> list[float]:
        return [float(x[1:].sum()) for x in self.kept]

    def memory(self, nothing: Any) -> int:
        """Resident bytes of its process."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def odd_shape(self, x: torch.Tensor) -> torch.Tensor:
        return x if x[0] > 0 else torch.ones(7)


@cg.actor
class Net(torch.nn.Module):
    """Traced methods."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.full((), by), requires_grad=False)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return x[:1] * self.by

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def players() -> list[Any]:
    return [Player.on(rank)() for rank in range(1, cg.world_size())]
