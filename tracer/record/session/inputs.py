"""The arguments of a step: their specs and names, and the checks of every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from ....ir.types import Place
from ...errors import shorten
from ...method.guards.tensors_alike import check_of, never
from ...torch_modes import NO_REACH, default_dtype, entered_mode, is_autocast_on, mode_count
from ...values.specs import Leaf, ObjectSpec, Static, TensorSpec, Tree, show_type, static_key
from ...values.values import NotAValue, ObjectMarker

_STRIDED = torch.strided
_TENSOR = torch.Tensor


class InputError(TypeError):
    """A step was called with arguments that it was not traced for, or that no step can take."""

    __module__ = "cg"  # the public name, which tracebacks show


@dataclass(frozen=True)
class InputSpec:
    """The arguments of a traced step.

    Attributes:
        step: the step's name, for messages.
        tree: the pytree `(args, kwargs)`; its value leaves are the program's parameters.
        names: the name of each leaf in messages, such as `batch.tokens`.
        place: the ranks that call the step with arguments.
        signature: the signature of the step's Python function.
        host_only: whether tensors have to be in the host's memory, since this rank has no device.
        dtype: torch's default dtype when the step was traced; None if the trace does not depend on
            it, since the step calls only opaque functions.
    """

    step: str
    tree: Tree
    names: tuple[str, ...]
    place: Place
    signature: inspect.Signature
    host_only: bool = False
    dtype: torch.dtype | None = None
    _count: int = field(init=False, compare=False)
    _has_complex: bool = field(init=False, compare=False)
    _alike: Callable[..., bool] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        flat = tree_flatten(((0,) * len(self.tree.leaves), {}))[1]
        is_flat = flat == self.tree.spec
        object.__setattr__(self, "_count", len(self.tree.leaves) if is_flat else -1)
        tensors = [leaf for leaf in self.tree.leaves if isinstance(leaf, TensorSpec)]
        object.__setattr__(self, "_has_complex", any(leaf.dtype.is_complex for leaf in tensors))
        object.__setattr__(self, "_alike", never)

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The values for the program's parameters, in order.

        Raises:
            InputError: an argument is missing, or the step was not traced for it; a tensor is not
                dense, or is on a device that the step does not take it from; autocast or a mode
                of the user's is on; or the default dtype has changed since the trace.
        """
        if self.dtype is not None and (
            is_autocast_on() or mode_count() or default_dtype() is not self.dtype
        ):
            self._check_modes()
        if kwargs or len(args) != self._count:
            leaves: Sequence[Any] = self._flatten(args, kwargs)
        else:
            if self._alike(*args):
                return list(args)
            leaves = args
        values = []
        for index, spec in enumerate(self.tree.leaves):
            leaf = leaves[index]
            if isinstance(spec, TensorSpec):
                if (
                    not isinstance(leaf, _TENSOR)
                    or leaf.dtype is not spec.dtype
                    or leaf.shape != spec.shape
                    or leaf.requires_grad > spec.requires_grad
                    or leaf.layout is not _STRIDED
                    or (not leaf.is_cpu and (self.host_only or leaf.is_meta))
                ):
                    raise self._misfit(index, leaf)
                values.append(leaf)
            elif isinstance(spec, ObjectSpec):
                values.append(leaf)
            elif static_key(leaf) != static_key(spec.value):
                raise self._misfit(index, leaf)
        if self._has_complex:
            return [x.resolve_conj() if isinstance(x, _TENSOR) else x for x in values]
        if leaves is args and values and all(type(leaf) is _TENSOR for leaf in leaves):
            object.__setattr__(self, "_alike", check_of(values, strides=False))
        return values

    def _check_modes(self) -> None:
        mode = entered_mode()
        if mode is not None:
            name, remedy = mode
            raise InputError(f"{self.step}() is called under {name}, {NO_REACH}; {remedy}")
        if default_dtype() is not self.dtype:
            raise InputError(
                f"{self.step}() was traced under the default dtype {self.dtype}, which is "
                f"{default_dtype()} now; set it as it was, or lower the step again"
            )

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        try:
            return self.tree.spec.flatten_up_to((args, kwargs))
        except ValueError:
            pass  # an argument may be given by position now, and by name when the step was traced
        bound = self._bind(args, kwargs)
        try:
            return self.tree.spec.flatten_up_to(bound)
        except ValueError as error:
            raise InputError(
                f"{self.step}() was traced for arguments of another structure: {error}; lower it "
                "again for these"
            ) from None

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, by position and by name as when the step was traced.

        Raises:
            InputError: the arguments do not fit the signature, or some are missing or new.
        """
        example: tuple[tuple[Any, ...], dict[str, Any]]
        example = torch.utils._pytree.tree_unflatten(list(self.names), self.tree.spec)
        try:
            arguments = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InputError(f"{self.step}(): {error}") from None
        traced = self.signature.bind(*example[0], **example[1]).arguments
        named = _by_name(arguments, self.signature)
        missing = sorted(_by_name(traced, self.signature).keys() - named.keys())
        extra = sorted(named.keys() - _by_name(traced, self.signature).keys())
        if missing or extra:
            difference = f"without {', '.join(extra)}" if extra else f"with {', '.join(missing)}"
            raise InputError(
                f"{self.step}() was traced {difference}; give the same arguments, or lower it again"
            )
        positional: list[Any] = []
        for name in self.signature.bind_partial(*example[0]).arguments:
            several = self.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            positional.extend(arguments[name] if several else (arguments[name],))
        return tuple(positional), {name: named[name] for name in example[1]}

    def _misfit(self, index: int, leaf: Any) -> InputError:
        spec, name = self.tree.leaves[index], self.names[index]
        if isinstance(spec, Static):
            return InputError(
                f"argument {name} of {self.step}() is static: it was {spec.value!r} when the step "
                f"was traced and is {shorten(repr(leaf))} now; lower the step again for it"
            )
        assert isinstance(spec, TensorSpec)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad > spec.requires_grad:
            return InputError(
                f"argument {name} of {self.step}() requires a gradient, which a compiled step "
                f"does not give to its inputs; pass {name}.detach()"
            )
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            return InputError(
                f"argument {name} of {self.step}() is a tensor of layout {leaf.layout}, and a step "
                f"takes dense tensors only; pass {name}.to_dense()"
            )
        expected = show_type(spec.dtype, spec.shape)
        got = (
            show_type(leaf.dtype, leaf.shape)
            if isinstance(leaf, torch.Tensor)
            else shorten(repr(leaf))
        )
        if got == expected:
            why = f"and this rank works in the host's memory; pass {name}.cpu()"
            if leaf.is_meta:
                why = "where tensors have no elements; pass one that has"
            return InputError(f"argument {name} of {self.step}() is on '{leaf.device}', {why}")
        return InputError(
            f"argument {name} of {self.step}() must be {expected}, as when the step was traced, "
            f"and is {got}; lower the step again for it"
        )


def _by_name(bound: dict[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """Bound arguments by name; those in `**kwargs` stand beside the others."""
    arguments = dict(bound)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


def static_argument(leaf: Any) -> Any:
    """The leaf itself, if it can be a static argument of a step.

    Raises:
        InputError: the leaf is an array, is not hashable, or can change and still compare equal.
    """
    if isinstance(leaf, np.ndarray):
        raise InputError(
            "a step takes a numpy array as an argument; pass torch.from_numpy(array), or lower "
            "the step with cg.object in its place"
        )
    if type(leaf) is not slice:
        try:
            hash(leaf)
        except TypeError:
            if is_dataclass(leaf):
                raise InputError(_unregistered(leaf, "not hashable")) from None
            raise InputError(
                f"a step takes {shorten(repr(leaf))} as an argument, which is neither a tensor nor "
                "hashable, so it cannot be static; pass tensors, make it hashable (a frozen "
                "dataclass, a tuple), or lower the step with cg.object in its place"
            ) from None
        if _may_change_unnoticed(leaf):
            raise InputError(
                f"a step takes {shorten(repr(leaf))} as an argument, which is equal to itself "
                "however it changes, so it cannot be static; pass what it holds, make it a frozen "
                "dataclass, or lower the step with cg.object in its place"
            )
    return leaf


def _unregistered(leaf: Any, problem: str) -> str:
    """The message for a dataclass that is a leaf of a step's arguments."""
    name = type(leaf).__name__
    return (
        f"a step takes {shorten(repr(leaf))} as an argument, a dataclass that is {problem}, so it "
        f"cannot be static; call torch.export.register_dataclass({name}) once, and its fields are "
        "arguments, or lower the step with cg.object in its place"
    )


def _holds_markers(leaf: Any) -> bool:
    """True if a leaf, or a field of a dataclass at any depth, stands for a value of the step."""
    if isinstance(leaf, ObjectMarker | TensorSpec):
        return True
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return False
    values = (getattr(leaf, data_field.name, None) for data_field in fields(leaf))
    return any(_holds_markers(part) for value in values for part in tree_leaves(value))


def _may_change_unnoticed(leaf: Any) -> bool:
    """True if a value compares by identity and has attributes that can be set."""
    kind: Any = type(leaf)
    if kind.__hash__ is not object.__hash__ or isinstance(leaf, NotAValue | ModuleType):
        return False
    return bool(getattr(leaf, "__dict__", None)) and not callable(leaf)


def leaf_spec(leaf: Any) -> Leaf:
    """The spec of an argument of a step.

    Raises:
        InputError: a step cannot take the argument.
    """
    if isinstance(leaf, ObjectMarker):
        return ObjectSpec()
    if isinstance(leaf, TensorSpec):
        return leaf
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
            raise InputError("a step takes dense tensors only; pass tensor.to_dense()")
        return TensorSpec(leaf.dtype, tuple(leaf.shape), leaf.requires_grad)
    if _holds_markers(leaf):
        raise InputError(_unregistered(leaf, "no pytree, and holds what is known only at run time"))
    return Static(static_argument(leaf))


def name_leaves(step: str, signature: inspect.Signature, spec: TreeSpec) -> tuple[str, ...]:
    """The names of the leaves of a step's `(args, kwargs)`, such as `batch.tokens` or `x`.

    Raises:
        InputError: the arguments do not fit the parameters.
    """
    indices = list(range(spec.num_leaves))
    args, kwargs = torch.utils._pytree.tree_unflatten(indices, spec)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise InputError(f"{step}(): {error}") from None
    names: dict[int, str] = {}
    for parameter, argument in bound.items():
        _collect(parameter, signature.parameters[parameter].kind, argument, names)
    return tuple(names[index] for index in indices)


def name_parts(spec: TreeSpec) -> tuple[str, ...]:
    """The names of the leaves of a pytree, by path: `loss`, `0.tokens`; empty for a single leaf."""
    names: dict[int, str] = {}
    index_tree = torch.utils._pytree.tree_unflatten(range(spec.num_leaves), spec)
    _collect("", inspect.Parameter.VAR_KEYWORD, index_tree, names)
    return tuple(names[index] for index in range(spec.num_leaves))


def _collect(name: str, kind: Any, argument: Any, names: dict[int, str]) -> None:
    paths: Iterable[tuple[Sequence[Any], Any]]
    try:
        paths, _ = torch.utils._pytree.tree_flatten_with_path(argument)
    except ValueError:  # a class is registered without keys: name the leaves by their numbers
        leaves = torch.utils._pytree.tree_leaves(argument)
        paths = (((number,), leaf) for number, leaf in enumerate(leaves))
    for path, index in paths:
        parts = [str(_part(entry)) for entry in path]
        if kind is not inspect.Parameter.VAR_KEYWORD:
            parts.insert(0, name)
        names[index] = ".".join(parts)


def _part(entry: Any) -> Any:
    """The index, dictionary key or field name in a key of a pytree path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry
