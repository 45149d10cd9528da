"""The signature of a call of a step: calls with equal ones share one trace; others say why not."""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ...errors import shorten
from ...torch_modes import Ambient, default_device, default_dtype
from ...values.specs import Leaf, ObjectSpec, Static, TensorSpec, Tree, show_type, static_key
from ...values.values import ObjectMarker
from .inputs import InputSpec, static_argument

_SHOWN = 4
"""The most changes that a text lists."""
_ATOMS = frozenset({int, float, bool, str, bytes, type(None), torch.dtype, ObjectMarker})


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A hashable key; calls of a step with equal keys share one trace.

    Calls have equal signatures if their arguments have the same structure, their tensors the same
    dtype, shape and `requires_grad`, and their other leaves equal values. Also, gradients have to
    be enabled in both or in neither, and the default dtype and device have to be the same.

    Raises:
        InputError: an argument is neither a tensor nor a value that can be compared.
    """
    key: list[Any] = [torch.is_grad_enabled(), default_dtype(), default_device()]
    leaves: Sequence[Any] = args
    if kwargs or not all(isinstance(a, torch.Tensor) or type(a) in _ATOMS for a in args):
        leaves, spec = tree_flatten((args, kwargs))
        key.append(spec)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            key.append((leaf.dtype, leaf.shape, leaf.requires_grad))
        else:
            key.append(static_key(static_argument(leaf)))
    return tuple(key)


def own_parameters(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of a function's own code, or of a bound method's; None of anything else.

    A wrapper takes what its own code takes, whatever the function takes that it wraps: it may treat
    an argument by name otherwise than one by position.
    """
    function = fn.__func__ if isinstance(fn, MethodType) else fn
    if not isinstance(function, FunctionType) or "__signature__" in vars(function):
        return None
    return inspect.signature(fn, follow_wrapped=False)


def by_position(
    parameters: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, by position where they can be; unchanged where they do not fit.

    So `step(x, y)` and `step(x, y=y)` have one signature. Defaults are left out.
    """
    try:
        bound = parameters.bind(*args, **kwargs)
    except TypeError:
        return args, kwargs
    return bound.args, bound.kwargs


@dataclass(frozen=True)
class _Argument:
    """What a parameter was bound to: a pytree, with the name of each leaf."""

    tree: Tree
    names: Sequence[str]


class CallSignature:
    """A signature that can say how it differs from another one of the same step.

    Args:
        inputs: the arguments for which the step was traced.
        modes: torch's modes when it was.
    """

    def __init__(self, inputs: InputSpec, modes: Ambient) -> None:
        self._modes = modes
        self._spec = inputs.tree.spec
        self._arguments = _arguments(inputs)

    def why_new(self, known: Sequence[CallSignature]) -> str:
        """How the signature differs from the nearest one of several, in words.

        Args:
            known: other signatures of the step, one at least; the later ones count as nearer.
        """
        changes = min((self.changes_since(other) for other in reversed(known)), key=len)
        more = len(changes) - _SHOWN
        return "; ".join((*changes[:_SHOWN], *([f"{more} more changes"] if more > 0 else ())))

    def changes_since(self, before: CallSignature) -> list[str]:
        """The differences from another signature: one text for each mode and argument."""
        then, now = before._modes, self._modes
        modes = (
            ("grad mode", _on_or_off(then.grad), _on_or_off(now.grad)),
            ("the default dtype", str(then.dtype), str(now.dtype)),
            ("the default device", str(then.device), str(now.device)),
        )
        changes = [_change(*mode) for mode in modes if mode[1] != mode[2]]
        for name in dict.fromkeys((*before._arguments, *self._arguments)):
            changes += _changes(name, before._arguments.get(name), self._arguments.get(name))
        if not changes and before._spec != self._spec:
            return ["other arguments are given by name, and not by position"]
        return changes


def _arguments(inputs: InputSpec) -> Mapping[str, _Argument]:
    """The arguments of a step, by parameter."""
    leaves, names = inputs.tree.leaves, inputs.names
    args, kwargs = tree_unflatten(range(len(leaves)), inputs.tree.spec)
    arguments: dict[str, _Argument] = {}
    for parameter, indices_tree in inputs.signature.bind(*args, **kwargs).arguments.items():
        indices, spec = tree_flatten(indices_tree)
        tree = Tree(tuple(leaves[index] for index in indices), spec)
        arguments[parameter] = _Argument(tree, [names[index] for index in indices])
    return arguments


def _changes(name: str, before: _Argument | None, now: _Argument | None) -> list[str]:
    if before is None or now is None or before.tree.spec != now.tree.spec:
        return [_change(name, _text(before), _text(now))]
    leaves = zip(now.names, before.tree.leaves, now.tree.leaves, strict=True)
    return [
        _change(leaf_name, _leaf_text(old), _leaf_text(new))
        for leaf_name, old, new in leaves
        if old != new
    ]


def _change(name: str, before: str, now: str) -> str:
    if before == now:
        return f"{name} is another value that prints as {now}"
    return f"{name} was {before}, is {now}"


def _on_or_off(mode: bool) -> str:
    return "on" if mode else "off"


def _text(argument: _Argument | None) -> str:
    if argument is None:
        return "left out"
    return shorten(_tree_text(argument.tree.spec, iter(argument.tree.leaves)))


def _tree_text(spec: TreeSpec, leaves: Iterator[Leaf]) -> str:
    if spec.is_leaf():
        return _leaf_text(next(leaves))
    parts = [_tree_text(child, leaves) for child in spec.children()]
    if spec.type is dict:
        items = zip(spec.context, parts, strict=True)
        return f"{{{', '.join(f'{key!r}: {part}' for key, part in items)}}}"
    listing = ", ".join(parts)
    if spec.type is list:
        return f"[{listing}]"
    if spec.type is tuple:
        return f"({listing},)" if len(parts) == 1 else f"({listing})"
    kind = spec.context if spec.type is namedtuple else spec.type
    return f"{kind.__name__}({listing})"


def _leaf_text(leaf: Leaf) -> str:
    match leaf:
        case TensorSpec(dtype, shape, requires_grad):
            return show_type(dtype, shape) + (" with requires_grad" if requires_grad else "")
        case ObjectSpec():
            return "cg.object"
        case Static(value):
            return shorten(repr(value))
