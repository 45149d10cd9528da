"""Functions that are called without a trace: opaque methods, and methods that use gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import TraceError, Verbatim
from ..values.actor_state import reach
from ..values.interface import (
    Body,
    MethodTarget,
    Target,
    TracedCall,
    result_spec,
)
from ..values.opaque import OpaqueMark
from ..values.optimizer_state import StepCounts, optimizers_of
from ..values.specs import Leaf, ObjectSpec, TensorSpec, Tree, filler, show_type


def opaque_results(mark: OpaqueMark, instance: Any, call: TracedCall) -> Tree:
    """The pytree of specs of an opaque call's results, as its mark describes them.

    Args:
        mark: the mark of the method.
        instance: the actor's instance; None for a function.
        call: the call, with its arguments.

    Raises:
        TraceError: the mark's `fake` raises, or returns a tensor that is not fake.
    """
    if mark.fake is None:
        leaf = ObjectSpec()
        leaves, spec = pytree.tree_flatten(leaf if mark.returns is None else (leaf,) * mark.returns)
        return Tree(tuple(leaves), spec)
    signature = call.signature
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=None), torch.no_grad():
        values = [_stand_in(signature.leaves[i], call.device) for i in signature.values]
        args, kwargs = signature.fill(values)
        try:
            result = mark.fake(instance, *args, **kwargs)
        except Exception as error:
            raise TraceError(
                f"the fake of the opaque {call.shown} raised {type(error).__name__}: {error}",
                loc=call.error_loc,
                remedy="it gets the method's arguments, self included, with fake tensors, and "
                "returns fake tensors of the right shapes and dtypes",
            ) from error
    leaves, spec = pytree.tree_flatten(result)
    return Tree(tuple(_promised(leaf, call) for leaf in leaves), spec)


def refuse_tensors(target: Target, call: TracedCall, results: Tree) -> None:
    """Refuse an opaque method that takes or returns pieces, since nobody knows their layout.

    Raises:
        TraceError: the plan cuts an argument, or the method returns tensors.
    """
    if target.group is None or not target.group.has_layouts:
        return
    if any(layout is not None for layout in target.group.inputs):
        raise TraceError(
            f"{call.shown} is opaque, and the plan of {target.actor} cuts what it takes",
            loc=call.loc,
            remedy="name the argument cg.whole in the plan, so that each rank gets all of it; or "
            "let a traced method compute what this one needs",
        )
    if any(isinstance(leaf, TensorSpec) for leaf in results.leaves):
        raise TraceError(
            f"{call.shown} is opaque and returns tensors, and each rank of {target.actor} calls it "
            "with pieces of its own, so nothing says what the whole result is",
            loc=call.loc,
            remedy="let a traced method compute what the step goes on with; an opaque method of an "
            "actor on a mesh may change state, and return objects",
        )


def calls_of_ranks(target: Target, call: TracedCall) -> dict[int, TracedCall]:
    """The call on the instance of each rank that this process plays, by rank."""
    actor = target.group.actor if target.group is not None else None
    if actor is None or not isinstance(target, MethodTarget):
        return {0: call}
    of_rank = {
        rank: replace(target, instance=instance).callable
        for rank, instance in actor.instances.items()
    }
    return {rank: replace(call, function=function) for rank, function in of_rank.items()}


def _promised(leaf: Any, call: TracedCall) -> Leaf:
    if isinstance(leaf, torch.Tensor):
        return result_spec(leaf, call)
    return ObjectSpec()


def _stand_in(leaf: Leaf, device: torch.device) -> Any:
    if isinstance(leaf, TensorSpec):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    return leaf


def with_counts_on_host(call: TracedCall) -> TracedCall:
    """The same call, which leaves on the host what optimizers of its actor count."""
    function = call.function
    if not isinstance(function, MethodType):
        return call
    optimizers = optimizers_of(reach(function.__self__))
    if not optimizers:
        return call
    counts = StepCounts(optimizers)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        counts.bring_to_host()
        return result

    return replace(call, function=counted)


def strictly(call: TracedCall) -> TracedCall:
    """The same call where a loss depends on its result, so that no gradient may be lost.

    Raises (when it runs):
        RuntimeError: the function returns a tensor that requires a gradient.
    """
    function = call.function

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise RuntimeError(
                    f"a loss depends on what {call.shown} returns, which requires a gradient; but "
                    "the method is opaque, and no gradient flows through it. If none should, "
                    "return it detached, x.detach(), or compute it under torch.no_grad(); else "
                    "remove @cg.opaque, so that the method is traced"
                )
        return result

    return replace(call, function=checked)


def opaque_body(call: TracedCall, mark: OpaqueMark, results: Tree) -> Body:
    """A body that fills values into the call's signature, and calls the function.

    Gradients are enabled during the call. Like all bodies, it returns a unit (None) if the
    function has no results.

    Args:
        call: the call.
        mark: the mark of the method.
        results: the specs of the results, which the body checks if the mark has a `fake`.

    Raises (when it runs):
        TypeError: the function returns something other than its mark says.
    """
    function, is_flat, fill = call.function, _is_flat(call.signature), filler(call.signature)
    shown = call.shown if call.home is None else f"{call.shown} ({call.home})"
    is_grad_enabled = torch.is_grad_enabled

    def run(*inputs: Any) -> Any:
        with torch.enable_grad():
            if is_flat:
                return function(*inputs)
            args, kwargs = fill(inputs)
            return function(*args, **kwargs)

    def one(*inputs: Any) -> Sequence[Any]:
        # Enabling gradients takes longer than a short method.
        return (function(*inputs),) if is_flat and is_grad_enabled() else (run(*inputs),)

    def several(*inputs: Any) -> Sequence[Any]:
        result = run(*inputs)
        if not isinstance(result, (tuple, list)) or len(result) != mark.returns:
            raise TypeError(
                f"{shown} is marked @cg.opaque(returns={mark.returns}), but it returned "
                f"{_words(result)}"
            )
        return tuple(result) or (None,)

    def typed(*inputs: Any) -> Sequence[Any]:
        return _checked(run(*inputs), results, shown) or (None,)

    return typed if mark.fake is not None else one if mark.returns is None else several


def _words(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {len(result)}"
    return f"a value of type {type(result).__name__}"


def _is_flat(signature: Tree) -> bool:
    """True if the values are positional arguments, and there are no other arguments."""
    args, kwargs = pytree.tree_unflatten(range(len(signature.leaves)), signature.spec)
    flat = not kwargs and all(type(i) is int for i in args)
    return flat and len(signature.values) == len(signature.leaves)


def _checked(result: Any, results: Tree, shown: str) -> Sequence[Any]:
    """The leaves of a result.

    Raises:
        TypeError: the result is not what the fake has promised.
    """
    leaves, spec = pytree.tree_flatten(result)
    if spec != results.spec or not all(map(_is_promised, leaves, results.leaves)):
        returned = pytree.tree_map(_outline, result)
        promised = pytree.tree_unflatten(map(_promise, results.leaves), results.spec)
        raise TypeError(
            f"{shown} returned {returned!r}, but its fake promised {promised!r}. Types are fixed "
            "when a step is compiled: return on every call what the fake says, or correct the fake"
        )
    return tuple(
        _plain(value, shown) if isinstance(leaf, TensorSpec) else value
        for value, leaf in zip(leaves, results.leaves, strict=True)
    )


def _is_promised(value: Any, leaf: Leaf) -> bool:
    if not isinstance(leaf, TensorSpec):
        return True
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is leaf.dtype
        and tuple(value.shape) == leaf.shape
    )


def _outline(value: Any) -> Verbatim:
    if isinstance(value, torch.Tensor):
        return Verbatim(show_type(value.dtype, value.shape))
    return Verbatim("None" if value is None else type(value).__name__)


def _promise(leaf: Leaf) -> Verbatim:
    if isinstance(leaf, TensorSpec):
        return Verbatim(show_type(leaf.dtype, leaf.shape))
    return Verbatim("object")


def _plain(value: torch.Tensor, shown: str) -> torch.Tensor:
    """A tensor as ranks send it: detached, contiguous, and without a lazy conjugate.

    Raises:
        TypeError: the tensor is not dense, or is on the meta device.
    """
    if value.layout is not torch.strided:
        raise TypeError(
            f"{shown} returned a tensor of layout {value.layout}, but its fake promised a dense "
            "one: return x.to_dense(), or mark the method @cg.opaque without a fake, and its "
            "result travels as an object"
        )
    if value.is_meta:
        raise TypeError(
            f"{shown} returned a tensor on 'meta', which has no elements: return one that has; "
            "only a fake returns types alone"
        )
    plain = value.detach().contiguous()
    return plain.resolve_conj() if plain.dtype.is_complex else plain
