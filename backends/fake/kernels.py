"""Kernels of the fake device: torch's operators, computed on the host in the same memory.

A kernel refuses what kernels of a real device refuse: tensors of the host beside those of the
device, and generators of the host. Torch finds out by itself which results are views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import autocast
from .generators import device_type
from .host_memory import HOST, KIND, move_into, on_device, on_host, placed, storage_on_device

aten = torch.ops.aten
_KEY = "PrivateUse1"
_AS_ON_HOST = torch._C.DispatchKey.CPU

SAME_DEVICE = (
    "Expected all tensors to be on the same device, but found at least two devices, {} and {}!"
)
"""Torch's own words."""

_VIEWS = (
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "view_as_real",
    "view_as_complex",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)
"""Kernels of the host that touch no memory; they serve the device as well."""

_TAKES_HOST_INDICES = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
    "aten::_unsafe_index_put",
}
_TAKES_HOST_SCALARS = {
    "aten::fill_",
    "aten::fill",
    "aten::masked_fill",
    "aten::masked_fill_",
    "aten::index_fill",
    "aten::index_fill_",
    *_TAKES_HOST_INDICES,
}
"""Operators that take scalars of the host, besides the pointwise ones, which torch has marked."""


def written_argument(arguments: Sequence[Any], result: Any) -> tuple[int, str] | None:
    """The index and the name of the argument that an operator writes and returns as this result.

    Args:
        arguments, result: of the operator's schema.

    Returns:
        They; None if the result is no such argument.
    """
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    for index, argument in enumerate(arguments):
        info = argument.alias_info
        if info is not None and info.before_set == result.alias_info.before_set:
            return index, argument.name
    return None


class Kernel:
    """An operation of torch on the fake device.

    Args:
        op: the operation.
        before: called with each call, before anything is done.
    """

    def __init__(self, op: Any, before: Callable[[], None]) -> None:
        schema = op._schema
        self._op = op
        self._before = before
        self._name = schema.name
        arguments = schema.arguments
        self._written = [
            (index, argument.name)
            for index, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._returned = [written_argument(arguments, result) for result in schema.returns]
        self._devices = [a.name for a in arguments if str(a.type) in ("Device", "Optional[Device]")]
        self._tensors = tuple(
            index for index, argument in enumerate(arguments) if str(argument.type) == "Tensor"
        )
        self._most = max(self._tensors, default=-1) + 1
        self._scalars = torch.Tag.pointwise in op.tags or schema.name in _TAKES_HOST_SCALARS
        self._indices = schema.name in _TAKES_HOST_INDICES
        self._is_view = any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in schema.returns
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        operands: list[torch.Tensor] = []
        host_args = [self._on_host(value, operands) for value in args]
        host_kwargs = {name: self._on_host(value, operands) for name, value in kwargs.items()}
        for name in self._devices:
            if kwargs.get(name) is not None:
                host_kwargs[name] = HOST
        self._check(operands)
        op = self._op
        if any(isinstance(host_args[at], int | float | complex) for at in self._tensors_of(args)):
            op = op.overloadpacket  # torch hands a number over where it has made a tensor of it
        results = op(*host_args, **host_kwargs)
        for index, name in self._written:
            if index < len(args):
                _follow(args[index], host_args[index])
            else:
                _follow(kwargs.get(name), host_kwargs.get(name))
        if not self._returned:
            return None
        if len(self._returned) > 1:
            pairs = zip(self._returned, results, strict=True)
            return tuple(self._result(*pair, args, kwargs, operands) for pair in pairs)
        return self._result(self._returned[0], results, args, kwargs, operands)

    def _tensors_of(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """The positions of tensors among the positional arguments."""
        count = len(args)
        return (
            self._tensors
            if count >= self._most
            else tuple(at for at in self._tensors if at < count)
        )

    def _on_host(self, value: Any, operands: list[torch.Tensor]) -> Any:
        """An argument for the host's operator; tensors are added to the operands."""
        if isinstance(value, torch.Tensor):
            if not value.is_cpu:
                operands.append(value)
                return on_host(value)
            if not (self._scalars and value.dim() == 0):
                operands.append(value)
        elif isinstance(value, list | tuple):
            return [self._of_list(item, operands) for item in value]
        elif isinstance(value, torch._C.Generator) and device_type(value) != KIND:
            raise RuntimeError(
                f"Expected a '{KIND}' device type for generator but found '{device_type(value)}'"
            )
        return value

    def _of_list(self, value: Any, operands: list[torch.Tensor]) -> Any:
        if self._indices and isinstance(value, torch.Tensor) and value.is_cpu:
            return value
        return self._on_host(value, operands)

    def _check(self, operands: Sequence[torch.Tensor]) -> None:
        """Raise torch's error if tensors of the host stand beside those of the device."""
        for operand in operands:
            if operand.is_cpu != operands[0].is_cpu:
                device = next(operand.device for operand in operands if not operand.is_cpu)
                raise RuntimeError(SAME_DEVICE.format(device, HOST))

    def _result(
        self,
        source: tuple[int, str] | None,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Sequence[torch.Tensor],
    ) -> Any:
        if source is not None:
            index, name = source
            return args[index] if index < len(args) else kwargs[name]
        if isinstance(result, torch.Tensor):
            return self._on_device(result, operands)
        if isinstance(result, list | tuple):
            return [
                self._on_device(item, operands) if isinstance(item, torch.Tensor) else item
                for item in result
            ]
        return result

    def _on_device(self, result: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """A result on the device; that of a view is in the storage of its operand."""
        if self._is_view:
            at = result.untyped_storage().data_ptr()
            for operand in operands:
                storage = operand.untyped_storage()
                if storage.data_ptr() == at:
                    return placed(storage, result)
        return on_device(result)


def _follow(value: Any, host_value: Any) -> None:
    """Give a tensor that is written on the device the memory and layout that the host gave it."""
    if isinstance(value, list | tuple):
        for item, host_item in zip(value, host_value, strict=True):
            _follow(item, host_item)
        return
    if not isinstance(value, torch.Tensor) or value.is_cpu:
        return
    storage, memory = value.untyped_storage(), host_value.untyped_storage()
    if memory.data_ptr() != storage.data_ptr() or memory.nbytes() != storage.nbytes():
        move_into(value, storage_on_device(memory), host_value)
    elif value.shape != host_value.shape or value.stride() != host_value.stride():
        move_into(value, storage, host_value)


def _without_device(op: Any, before: Callable[[], None]) -> Callable[..., torch.Tensor]:
    """A function that makes tensors from nothing, for the device."""

    def run(
        *args: Any, device: Any = None, pin_memory: Any = None, layout: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        before()
        return on_device(op(*args, device=HOST, **kwargs))

    return run


def _copier(before: Callable[[], None]) -> Callable[..., torch.Tensor]:
    """`copy_`, which alone may take tensors of both the host and the device."""

    def copy_(
        target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        before()
        on_host(target).copy_(on_host(source))
        return target

    return copy_


def _as_on_host(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(_AS_ON_HOST, *args, **kwargs)

    return run


def install(before: Callable[[], None]) -> Iterable[torch.library.Library]:
    """Register all kernels; `before` is called with each call of one, before it does anything.

    Returns:
        The registrations, which end when they are dropped.
    """
    kernels: dict[Any, Kernel] = {}

    def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = kernels.get(op)
        if kernel is None:
            kernel = kernels[op] = Kernel(op, before)
        return kernel(*args, **kwargs)

    make: Any = torch.library.Library
    everything, library = make("_", "IMPL"), make("aten", "IMPL")
    everything.fallback(fallback, _KEY)
    own_kernels = {
        "empty.memory_format": _without_device(aten.empty.memory_format, before),
        "empty_strided": _without_device(aten.empty_strided.default, before),
        "copy_": _copier(before),
    }
    # The operators that torch calls for devices that it does not know.
    for name in ("convolution", "convolution_backward"):
        own_kernels[f"{name}_overrideable"] = Kernel(_overload(f"aten::{name}"), before)
    for name in _VIEWS:
        own_kernels[name] = _as_on_host(_overload(f"aten::{name}"))
    for name, kernel in own_kernels.items():
        library.impl(name, kernel, _KEY)
    for name in sorted(_decomposed() - own_kernels.keys()):
        library.impl(name, Kernel(_overload(f"aten::{name}"), before), _KEY)
    autocast_library = make("_", "IMPL")
    autocast_library.fallback(torch.library.fallthrough_kernel, autocast.KEY)
    autocast.install(library, lambda name: _overload(f"aten::{name}"))
    return everything, autocast_library, library


def _decomposed() -> set[str]:
    """Operators that the host has kernels for, and that torch would compose of others for a device.

    The host's kernels give the results of the host, to the last bit.
    """
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    return {
        name.removeprefix("aten::")
        for name in names
        if name.startswith("aten::") and any(has(name, key) for key in composite)
    }


def _overload(name: str) -> Any:
    """The operation of a full name, such as `aten::add.Tensor`."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, packet), overload or "default")
