"""Operators of torch in methods of an actor on a mesh, with a tensor that is cut.

    python -m tests.tracer.cut_operators [--only NAME] [--share 0/2] [--record FILE]

The tensors of one shape in a sample are cut along each of their dimensions in turn, forward and
backward, on two ranks that one process plays. Results and gradients are those of eager PyTorch for
the whole tensors, or the trace ends with an error.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.checkpoints.held import held
from cg.launch.world.world import use_world
from cg.tracer.errors import TraceError
from cg.tracer.values.actor_state import collect

from .function_tools import tensors
from .operators import (
    SAMPLES,
    UNDEFINED,
    Method,
    Outcome,
    main,
    methods,
    name_of,
    reason_of,
)

Argument: TypeAlias = "torch.Tensor | None"
RANKS = 2
TOLERANCE = 1e-4
"""Of float64, float32 and complex128: sums over ranks are taken in another order."""


class Parted(nn.Module):
    """Calls a method of `operators`; what may have a gradient is a parameter of it."""

    def __init__(self, method: Method, values: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.method = method
        self.trained = nn.ParameterList(v.detach().clone() for v in values if v.requires_grad)
        self.order = [v.requires_grad for v in values]

    def forward(self, *given: torch.Tensor) -> list[torch.Tensor]:
        parameters, arguments = iter(self.trained), iter(given)
        values = [next(parameters if trained else arguments) for trained in self.order]
        # Writing to what it is given is another matter.
        return self.method.forward(*(v.clone() for v in values))

    def loss(
        self, a: Argument = None, b: Argument = None, c: Argument = None, d: Argument = None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        results = self.forward(*(each for each in (a, b, c, d) if each is not None))
        terms = [_weighed(r) for r in results if r.requires_grad]
        return results, sum(terms[1:], terms[0]) if terms else None


def _weighed(result: torch.Tensor) -> torch.Tensor:
    """A sum in which each element has another weight."""
    flat = result.reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return (flat * torch.linspace(0.5, 1.5, flat.numel(), dtype=flat.dtype)).sum()


def outcome_of(operator: Any, count: int = SAMPLES) -> Outcome:
    """Try an operator, as `operators.outcome_of` does on one rank."""
    outcome = Outcome()
    if name_of(operator).partition(".")[0] in UNDEFINED:
        return outcome
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method, values in methods(operator, count):
            if not method.is_turned and sum(not v.requires_grad for v in values) <= 4:
                for plan in _plans(values):
                    _try(outcome, method, values, plan)
    return outcome


def _plans(values: Sequence[torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Plans that cut the tensors of one shape along one dimension; names are those of `Parted`."""
    counts = {True: itertools.count(), False: itertools.count()}
    by_shape: dict[torch.Size, list[str]] = {}
    for value in values:
        number = next(counts[value.requires_grad])
        name = f"trained.{number}" if value.requires_grad else f"loss({'abcd'[number]})"
        by_shape.setdefault(value.shape, []).append(name)
    for shape, names in by_shape.items():
        for dim, size in enumerate(shape):
            if size >= RANKS:
                yield dict.fromkeys(names, cg.cut(dim, "tp"))


def _try(
    outcome: Outcome, method: Method, values: Sequence[torch.Tensor], plan: dict[str, Any]
) -> None:
    given = [value.detach().clone() for value in values if not value.requires_grad]
    whole = Parted(method, values)
    try:
        torch.manual_seed(3)
        expected, loss = whole.loss(*given)
        if loss is not None:
            loss.backward()
    except Exception:
        return  # eager PyTorch cannot do it
    if not expected:
        return
    outcome.tried += 1
    try:
        with use_world(VirtualWorld(RANKS)):
            mesh = cg.mesh(range(RANKS), tp=RANKS)
            actor = cg.actor(Parted).on(mesh, plan=cg.plan(plan))(method, values)
            found = _run(actor, given)
            _compare(found, expected, is_random(method, values))
            _compare_gradients(actor, whole, is_random(method, values))
    except TraceError as error:
        outcome.refused[reason_of(error)] += 1
    except Exception as error:
        outcome.wrong.append(f"{plan}: {type(error).__name__}: {str(error).strip()[:400]}")
    else:
        outcome.equal += 1


def _run(actor: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    @cg.trace
    def step(*given: torch.Tensor) -> Any:
        results, loss = actor.loss(*given)
        if loss is not None:
            cg.backward(loss)
        return results

    torch.manual_seed(3)
    return tensors(step(*given))


class _Draws(TorchDispatchMode):
    """Notes whether an operator draws random numbers."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any = self.any or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **kwargs or {})


def is_random(method: Method, values: Sequence[torch.Tensor]) -> bool:
    """Whether an operator draws random numbers, which are others on a mesh."""
    with torch.no_grad(), _Draws() as draws:
        method.forward(*(v.detach().clone() for v in values))
    return draws.any


def _compare(ours: Sequence[Any], theirs: Sequence[Any], by_kind: bool) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if by_kind:
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        else:
            near = {"rtol": TOLERANCE, "atol": TOLERANCE, "equal_nan": True}
            torch.testing.assert_close(a.detach(), b.detach(), **near)


def _compare_gradients(actor: Any, whole: nn.Module, by_kind: bool) -> None:
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for rank, instance in actor.instances.items():
        for state in collect(instance).tensors:
            gradient = wanted.get(state.path)
            mine = state.tensor.grad
            assert (mine is None) == (gradient is None), f"{state.path}.grad on rank {rank}"
            if mine is None or gradient is None:
                continue
            _, region = held(state, actor._member.group, rank)
            part = gradient
            for axis, intervals in enumerate(region):
                part = torch.cat([part.narrow(axis, a, b - a) for a, b in intervals], axis)
            _compare([mine], [part], by_kind)


if __name__ == "__main__":
    raise SystemExit(main(outcome_of))
