"""What a call of an operator of torch does: which memory it uses, its writes, its random draws."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._library import simple_registry
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode


class OperatorFunction(torch.autograd.Function):
    """A function of autograd that only issues operators, which its arguments determine."""


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identifies the memory of a (fake) tensor; None where it has no plain storage."""
    if tensor.layout is not torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)


def is_random(op: object, args: Any, kwargs: Any) -> bool:
    """True if a call of an operator draws from a random number generator.

    A dropout counts only if it drops anything in this call. A backward does not draw: it gets what
    its forward has drawn.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return False
    if not _may_draw(op):
        return False
    share = ("p",) if "dropout" in op._schema.name else ()
    rates = (argument_of(op, args, kwargs, name) for name in ("dropout_p", "dropout", *share))
    modes = (argument_of(op, args, kwargs, name) for name in ("train", "training"))
    return all(rate != 0.0 for rate in rates) and all(mode is not False for mode in modes)


@functools.cache
def _may_draw(op: torch._ops.OpOverload) -> bool:
    tagged = torch.Tag.nondeterministic_seeded in op.tags
    return tagged and not op._schema.name.endswith("_backward")


def argument_of(op: torch._ops.OpOverload, args: Any, kwargs: Any, name: str) -> Any:
    """An argument of a call, by name, or its default; None if the operator has no such argument."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            value = args[position] if position < len(args) else kwargs.get(name)
            return argument.default_value if value is None else value
    return None


@functools.cache
def _written_arguments(op: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operator writes to."""
    hidden = _HIDDEN_WRITES.get(op._schema.name, ())
    return tuple(
        (i, a.name)
        for i, a in enumerate(op._schema.arguments)
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in hidden
    )


_RUNNING = ("running_mean", "running_var")
_HIDDEN_WRITES: dict[str, tuple[str, ...]] = {
    "aten::native_batch_norm": _RUNNING,
    "aten::cudnn_batch_norm": _RUNNING,
    "aten::miopen_batch_norm": _RUNNING,
}
"""Operators that write to arguments in training mode, which their schema does not say."""


def written_values(op: object, args: Any, kwargs: Any) -> Iterator[Any]:
    """Return what a call of an operator writes to: tensors while tracing, nodes in a graph."""
    if not isinstance(op, torch._ops.OpOverload):
        return
    hidden = op._schema.name in _HIDDEN_WRITES
    if hidden and not argument_of(op, args, kwargs, "training"):
        return
    for position, name in _written_arguments(op):
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from value if isinstance(value, (list, tuple)) else (value,)


def writes_in_secret(op: object, args: Any, kwargs: Any) -> bool:
    """True if a call writes to an argument although its schema says that it does not."""
    return (
        isinstance(op, torch._ops.OpOverload)
        and not op._schema.is_mutable
        and any(value is not None for value in written_values(op, args, kwargs))
    )


_DECOMPOSING = (
    *("CompositeImplicitAutograd", "ADInplaceOrView", "Functionalize", "Autograd"),
    *("AutogradCPU", "AutogradCUDA", "AutogradPrivateUse1", "AutogradMeta", "AutogradOther"),
    *("AutocastCPU", "AutocastCUDA"),
)
"""Keys whose kernels run other operators in the place of one, or something before it."""


def plain_operator(function: object) -> torch._ops.OpOverload | None:
    """The operator of another library that a function is, if a graph has its calls as they are.

    It has one overload and no derivative, writes to nothing, gives no view, draws nothing, and
    nothing decomposes it. So a call adds one node, whose type its fake kernel gives.
    """
    if isinstance(function, torch._ops.OpOverloadPacket):
        overload, *others = function.overloads()  # type: ignore[no-untyped-call]
        function = None if others else getattr(function, overload)
    if not isinstance(function, torch._ops.OpOverload) or function.py_kernels:
        return None
    schema = function._schema
    aliases = [a.alias_info for a in (*schema.arguments, *schema.returns)]
    if any(alias is not None for alias in aliases) or _may_draw(function):
        return None
    name = function.name()  # type: ignore[no-untyped-call]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(has_kernel(name, key) for key in _DECOMPOSING):
        return None
    rules = simple_registry.singleton.find(name).torch_dispatch_rules
    if any(map(rules.find, (FakeTensorMode, ProxyTorchDispatchMode))):
        return None
    return function
