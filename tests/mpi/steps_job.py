"""Steps whose own Python does too much, on two ranks: every rank refuses them, and goes on.

mpiexec -n 2 python -m tests.mpi.steps_job
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import cg
from cg.tracer.errors import TraceError
from cg.tracer.record.session.inputs import InputError
from tests.launch.test_steps_python import SwallowingStage


@cg.actor
class ComplexStage(SwallowingStage):
    """A stage with methods of complex numbers."""

    def conjugate(self, z: Any) -> Any:
        return z.conj()

    def imaginary(self, z: Any) -> Any:
        return torch.view_as_real(z)[..., 1]


first, last = ComplexStage.on(0)(), ComplexStage.on(1)()
plain = nn.Linear(4, 4)
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def refuse(step: Callable[[Any], Any], reason: str) -> None:
    try:
        cg.trace(step)(X)
    except TraceError as error:
        assert reason in error.reason, error
    else:
        raise AssertionError(f"{reason}: nothing was refused")


def effects() -> None:
    """Refusals by each rank for itself, and by the owner of an actor for all."""
    seen: list[int] = []
    numbers = itertools.count()

    def appends(x: Any) -> Any:
        seen.append(1)
        return last.forward(first.forward(x))

    def counts(x: Any) -> Any:
        return last.forward(first.forward(x) * next(numbers))

    def draws(x: Any) -> Any:
        return last.forward(first.forward(x)) if random.random() < 2 else x

    def forgets(x: Any) -> Any:
        cg.backward(last.loss(first.forward(x)))
        plain.zero_grad()

    def swallowed(x: Any) -> Any:
        try:
            return last.swallows(first.forward(x))
        except TraceError:
            return x

    refuse(appends, "'seen'")
    refuse(counts, "is not the same when it is traced a second time")
    refuse(draws, "Python's random module")
    refuse(forgets, "zero_grad()")
    refuse(swallowed, "float(tensor)")


def modes() -> None:
    """Autocast around a later call, another default dtype, inference mode around the first call."""

    @cg.trace
    def step(x: Any) -> Any:
        return last.forward(first.forward(x))

    expected = step(X)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step(X)
    except InputError as error:
        assert "torch.autocast" in str(error), error
    else:
        raise AssertionError("autocast was dropped")

    @cg.trace
    def again(x: Any) -> Any:
        return last.forward(first.forward(x))

    with torch.inference_mode():
        compiled = again.lower(X).compile()
        assert torch.equal(again(X), expected)
        assert torch.equal(compiled(X), expected)
    assert torch.equal(again(X), expected)
    assert torch.equal(compiled(X), expected)

    @cg.trace
    def halved(numbers: Any) -> Any:
        return torch.ones(4) + last.imaginary(torch.complex(numbers / 2, numbers / 2))

    numbers = torch.arange(4)
    assert halved(numbers).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    assert torch.equal(halved(numbers), 1 + numbers / 2)
    torch.set_default_dtype(torch.float32)
    assert torch.equal(step(X), expected)


def conjugates() -> None:
    """Lazy conjugates, from the caller and from methods, on their way to another rank."""
    z = torch.complex(X[0], X[1])

    @cg.trace
    def step(z: Any) -> Any:
        return last.imaginary(z.conj()), last.imaginary(first.conjugate(z))

    for given in (z, z.conj()):
        for value in step(given):
            assert torch.equal(value, given.conj().imag)


def fallback() -> None:
    """`auto`, where all forwards have to come first."""

    def step(x: Any) -> Any:
        parts = [last.forward(first.forward(part)) for part in cg.microbatches(x, 4)]
        loss = last.loss(torch.cat(parts))
        cg.backward(loss)
        return loss

    lowered = cg.trace(step).lower(X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = lowered.compile(schedule=cg.schedules.auto())
    assert any("with the schedule 'gpipe' instead" in str(each.message) for each in caught)
    module = ComplexStage()
    torch.testing.assert_close(compiled(X), module.loss(module(module(X))))


if __name__ == "__main__":
    for part in (effects, modes, conjugates, fallback):
        part()
    print(f"rank {cg.rank()}: steps are eager Python, or say why not", flush=True)
