"""Helpers of programs that drive graphs from rank 0."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cg
from cg.launch.world.world import use_world, world


@contextlib.contextmanager
def on_machines(nodes: str = "") -> Iterator[None]:
    """A world in which rank i pretends to be on machine `nodes[i]`, if there are several."""
    with contextlib.ExitStack() as stack:
        if set(nodes) - {"0"}:
            from cpu_world import TestWorld

            stack.enter_context(use_world(TestWorld(world().comm, [int(n) for n in nodes])))
        yield


def graph_of(function: Any, *args: Any, **options: Any) -> Any:
    step = cg.trace(inputs=cg.on(0), outputs=cg.on(0))(function)
    return step.lower(*(args or (cg.object,))).compile(**options)


@contextlib.contextmanager
def a_sign() -> Iterator[Path]:
    """The name of a file that `Worker.wait` waits for; whoever makes it decides when that ends."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "sign")


def chain_of(actors: list[Any], method: str = "echo", **options: Any) -> Any:
    def chain(x):
        for actor in actors:
            x = getattr(actor, method)(x)
        return x

    return graph_of(chain, **options)


@contextlib.contextmanager
def raises(kind: type[BaseException], text: str = "") -> Any:
    caught: list[BaseException] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"no {kind.__name__} was raised"
    assert text in str(caught[0]), caught[0]
