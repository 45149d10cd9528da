"""Functions that are called as they are: opaque methods, and methods that work on gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

from ...ir.location import Location
from ..errors import TraceError, Verbatim
from ..intrinsics.opaque import OpaqueMark
from ..step.inputs import show_type
from ..step.specs import Leaf, ObjectSpec, TensorSpec, Tree, filler, result_spec
from .interface import Body


def opaque_results(
    mark: OpaqueMark,
    instance: Any,
    signature: Tree,
    what: str,
    loc: Location | None,
    device: torch.device,
) -> Tree:
    """Describe what an opaque call returns, as its mark says.

    Raises:
        TraceError: the mark's `fake` fails, or returns a tensor that is not fake.
    """
    if mark.fake is not None:
        return _faked(mark.fake, instance, signature, what, loc, device)
    leaf = ObjectSpec()
    leaves, spec = pytree.tree_flatten(leaf if mark.returns is None else (leaf,) * mark.returns)
    return Tree(tuple(leaves), spec)


def _faked(
    fake: Callable[..., Any],
    instance: Any,
    signature: Tree,
    what: str,
    loc: Location | None,
    device: torch.device,
) -> Tree:
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=None), torch.no_grad():
        values = [_stand_in(signature.leaves[i], device) for i in signature.values]
        args, kwargs = signature.fill(values)
        try:
            result = fake(instance, *args, **kwargs)
        except Exception as error:
            raise TraceError(
                f"the fake of the opaque {what} raised {type(error).__name__}: {error}",
                loc=loc,
                remedy="it gets the method's arguments, self included, with fake tensors, and "
                "returns fake tensors of the right shapes and dtypes",
            ) from error
    leaves, spec = pytree.tree_flatten(result)
    return Tree(
        tuple(
            result_spec(leaf, what, loc) if isinstance(leaf, torch.Tensor) else ObjectSpec()
            for leaf in leaves
        ),
        spec,
    )


def _stand_in(leaf: Leaf, device: torch.device) -> Any:
    if isinstance(leaf, TensorSpec):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    return leaf


def strictly(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """`function`, for a call that a loss depends on: no gradient may be lost.

    Raises (when it runs):
        RuntimeError: a tensor that the function returns requires a gradient.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise RuntimeError(
                    f"a loss depends on what {what} returns, which requires a gradient; but the "
                    "method is opaque, and no gradient flows through it. If none should, return "
                    "it detached, x.detach(), or compute it under torch.no_grad(); else remove "
                    "@cg.opaque, so that the method is traced"
                )
        return result

    return checked


def opaque_body(
    function: Callable[..., Any], mark: OpaqueMark, signature: Tree, results: Tree, what: str
) -> Body:
    """A body that calls `function` with the filled-in signature, gradients enabled.

    `what` names it in messages, with its file and line.

    Raises (when it runs):
        TypeError: the function returns something else than its mark says.
    """
    call = _caller(function, signature)
    if mark.fake is not None:
        return _checked(call, results, what)
    many = mark.returns
    if many is None:
        return _for_one(function, call, _is_flat(signature))

    def several(*inputs: Any) -> Sequence[Any]:
        with torch.enable_grad():
            result = call(inputs)
        if not isinstance(result, (tuple, list)) or len(result) != many:
            raise TypeError(
                f"{what} is marked @cg.opaque(returns={many}), but it returned {_words(result)}"
            )
        return tuple(result)

    return several


def _for_one(
    function: Callable[..., Any], call: Callable[[tuple[Any, ...]], Any], flat: bool
) -> Body:
    """A body for one object. Switching gradients on costs more than a short method."""
    if flat:
        is_grad_enabled = torch.is_grad_enabled

        def short(*inputs: Any) -> Sequence[Any]:
            if is_grad_enabled():
                return (function(*inputs),)
            with torch.enable_grad():
                return (function(*inputs),)

        return short

    def one(*inputs: Any) -> Sequence[Any]:
        with torch.enable_grad():
            return (call(inputs),)

    return one


def _words(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {len(result)}"
    return f"a value of type {type(result).__name__}"


def _caller(function: Callable[..., Any], signature: Tree) -> Callable[[tuple[Any, ...]], Any]:
    """Calls `function` with values in their places; without pytrees where none are needed."""
    if _is_flat(signature):
        return lambda inputs: function(*inputs)

    fill = filler(signature)

    def general(inputs: tuple[Any, ...]) -> Any:
        args, kwargs = fill(inputs)
        return function(*args, **kwargs)

    return general


def _is_flat(signature: Tree) -> bool:
    """True if the values are the positional arguments, and there are no others."""
    args, kwargs = pytree.tree_unflatten(range(len(signature.leaves)), signature.spec)
    flat = not kwargs and all(type(i) is int for i in args)
    return flat and len(signature.values) == len(signature.leaves)


def _checked(call: Callable[[tuple[Any, ...]], Any], results: Tree, what: str) -> Body:
    def body(*inputs: Any) -> Sequence[Any]:
        with torch.enable_grad():
            result = call(inputs)
        leaves, spec = pytree.tree_flatten(result)
        if spec != results.spec or not all(map(_is_promised, leaves, results.leaves)):
            returned = pytree.tree_map(_outline, result)
            promised = pytree.tree_unflatten(map(_promise, results.leaves), results.spec)
            raise TypeError(
                f"{what} returned {returned!r}, but its fake promised {promised!r}. Types are "
                "fixed when a step is compiled: return on every call what the fake says, or "
                "correct the fake"
            )
        return tuple(
            _plain(value, what) if isinstance(leaf, TensorSpec) else value
            for value, leaf in zip(leaves, results.leaves, strict=True)
        )

    return body


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


def _plain(value: torch.Tensor, what: str) -> torch.Tensor:
    """A tensor as it travels."""
    if value.layout is not torch.strided:
        raise TypeError(
            f"{what} returned a tensor of layout {value.layout}, but its fake promised a dense "
            "one: return x.to_dense(), or mark the method @cg.opaque without a fake, and its "
            "result travels as an object"
        )
    if value.is_meta:
        raise TypeError(
            f"{what} returned a tensor on 'meta', which has no elements: return one that has; only "
            "a fake returns types alone"
        )
    plain = value.detach().contiguous()
    return plain.resolve_conj() if plain.dtype.is_complex else plain
