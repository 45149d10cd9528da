"""Tracing a method by itself, and comparing what its bodies do with eager autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from cg.tracer.function.functions import Functions
from cg.tracer.values.interface import MethodTarget, TracedFunction, TracedVjp
from cg.tracer.values.specs import Leaf, Static, TensorSpec, Tree


def signature(*args: Any, **kwargs: Any) -> Tree:
    """The signature of a call: tensors are values, all else is static."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return Tree(tuple(map(_leaf, leaves)), spec)


def _leaf(value: Any) -> Leaf:
    if isinstance(value, torch.Tensor):
        return TensorSpec(value.dtype, tuple(value.shape), value.requires_grad)
    return Static(value)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(tree) if isinstance(v, torch.Tensor)]


def trace(actor: Any, method: str, *args: Any, **kwargs: Any) -> TracedFunction:
    target = MethodTarget("actor", actor, method)
    return Functions().trace(target, signature(*args, **kwargs), f"actor.{method}", None)


def trace_vjp(
    actor: Any,
    method: str,
    outputs: tuple[int, ...],
    inputs: tuple[int, ...],
    *args: Any,
    **kw: Any,
) -> TracedVjp:
    target = MethodTarget("actor", actor, method)
    name = f"actor.{method}.vjp"
    return Functions().trace_vjp(target, signature(*args, **kw), name, outputs, inputs, None)


def state_of(actor: Any) -> dict[str, torch.Tensor]:
    if isinstance(actor, torch.nn.Module):
        return {**dict(actor.named_parameters()), **dict(actor.named_buffers())}
    return {k: v for k, v in vars(actor).items() if isinstance(v, torch.Tensor)}


@dataclass
class Run:
    """The results of one call, with its backward."""

    outputs: list[torch.Tensor]
    input_grads: list[torch.Tensor | None]
    state: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor | None]


def _state(actor: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | None]]:
    state = state_of(actor)
    values = {k: v.detach().clone() for k, v in state.items()}
    return values, {k: v.grad if v.is_leaf else None for k, v in state.items()}


def run_eager(actor: Any, method: str, args: Any, kwargs: Any, seed: int) -> Run:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    sources = [v for v in leaves if isinstance(v, torch.Tensor) and v.requires_grad]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    torch.manual_seed(seed)
    outputs = tensors(getattr(actor, method)(*args, **kwargs))
    chosen = [o for o in outputs if o.requires_grad]
    if chosen:
        torch.autograd.backward(chosen, cotangents(chosen))
    grads = [s.grad for s in sources]
    for source in sources:
        source.grad = None
    values, state_grads = _state(actor)
    return Run([o.detach() for o in outputs], grads, values, state_grads)


def cotangents(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in outputs]


def run_traced(actor: Any, method: str, args: Any, kwargs: Any, seed: int) -> Run:
    traced = trace(actor, method, *args, **kwargs)
    return runs_of(traced, actor, method, args, kwargs)(seed)


def runs_of(
    traced: TracedFunction, actor: Any, method: str, args: Any, kwargs: Any
) -> Callable[[int], Run]:
    """Trace a call with its backward; what is returned runs the two, as often as it is called.

    Args:
        traced: the call alone, of an actor like this one.
    """
    specs = [traced.results.leaves[i] for i in traced.results.values]
    outputs = tuple(i for i, s in enumerate(specs) if isinstance(s, TensorSpec) and s.requires_grad)
    values = tensors((args, kwargs))
    inputs = tuple(i for i, v in enumerate(values) if v.requires_grad)
    vjp = trace_vjp(actor, method, outputs, inputs, *args, **kwargs)
    count = len(traced.declaration.outputs)

    def run(seed: int) -> Run:
        torch.manual_seed(seed)
        result = vjp.first.only_body(*(v.detach() for v in values))
        assert len(result) == len(vjp.first.declaration.outputs)
        chosen = [result[i] for i in outputs]
        grads = vjp.second.only_body(*result[count:], *cotangents(chosen))
        dependent = vjp.vjp.grad_inputs
        assert len(grads) == max(len(dependent), 1)  # a unit where there are none
        of_input = dict(zip(dependent, grads, strict=False))
        state, state_grads = _state(actor)
        return Run(list(result[:count]), [*map(of_input.get, inputs)], state, state_grads)

    return run


def assert_same_run(traced: Run, eager: Run, tolerance: float) -> None:
    assert_equal(traced.outputs, eager.outputs, tolerance)
    for ours, theirs in zip(traced.input_grads, eager.input_grads, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert_equal([ours], [theirs], tolerance)
    assert traced.state.keys() == eager.state.keys()
    for name, value in eager.state.items():
        assert_equal([traced.state[name]], [value], tolerance)
    for name, grad in eager.grads.items():
        ours = traced.grads[name]
        assert (ours is None) == (grad is None), name
        if ours is not None and grad is not None:
            assert_equal([ours], [grad], tolerance)
            assert ours.stride() == grad.stride(), name


def assert_equal(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def check_equal(
    actor: Any, method: str, *args: Any, seed: int = 3, tolerance: float = 0.0, **kwargs: Any
) -> None:
    """Check forward alone, and forward with backward (twice: gradients add up).

    A `tolerance` of 0 means bit for bit.
    """
    forward, twice, eager = (copy.deepcopy(actor) for _ in range(3))
    expected = run_eager(eager, method, args, kwargs, seed)
    traced = trace(forward, method, *args, **kwargs)
    torch.manual_seed(seed)
    values = [v.detach() for v in tensors((args, kwargs))]
    assert_equal(traced.body(*values), expected.outputs, tolerance)
    assert traced.guard is None or traced.guard() is None
    for name, value in expected.state.items():
        assert_equal([state_of(forward)[name].detach()], [value], tolerance)
    run = runs_of(traced, twice, method, args, kwargs)
    assert_same_run(run(seed), expected, tolerance)
    again = run_eager(eager, method, args, kwargs, seed + 1)
    assert_same_run(run(seed + 1), again, tolerance)
