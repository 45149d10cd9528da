"""Actors and worlds for the tests of executions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import cg
from cg.backends.driven.executions import Executions
from cg.backends.virtual.virtual_executions import virtual_executions
from cg.backends.virtual.world import VirtualWorld
from cg.launch.runtime.driven_graphs import use_executions
from cg.launch.world.world import use_world


@contextmanager
def world(size: int, shuffle: int | None = None) -> Iterator[Executions]:
    """A virtual world whose executions take turns in a random order, if `shuffle` seeds one."""
    made = VirtualWorld(size)
    source = None if shuffle is None else random.Random(shuffle)
    executions = virtual_executions(size, source)
    use_executions(made, executions)
    with use_world(made):
        yield executions


class Boom(Exception):
    """A user's exception, whose constructor does not take its `args`."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} ({code})")
        self.code = code


@cg.actor
class Worker:
    """Takes any object; keeps a log of what it was asked for."""

    def __init__(self, tag: str = "") -> None:
        self.tag = tag
        self.log: list[Any] = []
        self.total = 0

    def echo(self, x: Any) -> Any:
        return x

    @cg.opaque
    def note(self, x: Any) -> Any:
        """Adds to the log, and says how long it is."""
        self.log.append(x)
        return len(self.log)

    def add(self, x: int) -> int:
        self.total += x
        return self.total

    def join(self, *parts: Any, **named: Any) -> Any:
        return (self.tag, parts, named)

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def renewed(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def fail_on(self, x: Any, what: Any) -> Any:
        """Raises where `x` is one of `what`."""
        self.log.append(x)
        if x in what:
            raise Boom(f"{self.tag} got {x!r}", 7)
        return x

    def divide(self, x: int) -> float:
        return 1 / x

    @cg.opaque(returns=2)
    def two(self, x: Any) -> Any:
        return (x, [x]) if x != "three" else (x, x, x)

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def shaped(self, x: torch.Tensor) -> torch.Tensor:
        """Doubles; returns another shape for tensors of zeros, and fails for negative ones."""
        if (x < 0).any():
            raise ValueError("negative")
        return x * 2 if x.any() else torch.ones(7)


@cg.actor
class Scale(torch.nn.Module):
    """A traced actor with state."""

    def __init__(self, by: float = 2.0) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.full((), by), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by

    def count(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape)


def chain_of(count: int, **options: Any) -> tuple[Any, list[Any]]:
    """A graph through workers on ranks 1, 2, ..., and the workers."""
    workers = [Worker.on(rank)(f"w{rank}") for rank in range(1, count + 1)]

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def chain(x):
        for worker in workers:
            x = worker.echo(x)
        return x

    return chain.lower(cg.object).compile(**options), workers
