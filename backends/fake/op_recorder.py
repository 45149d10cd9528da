"""Captures torch's operations for devices that are made of the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .host_memory import KIND, is_there, on_device, on_host
from .kernels import written_argument


class Steps(Protocol):
    """Takes the work of a graph, in order."""

    def append(self, step: Callable[[], object], /) -> None: ...


class ReplayMemory:
    """The memory of values that live within a replay; it is given out again when they are gone.

    A recording refers to memory by address, as graphs do. So a tensor, or a view of it, that is
    held during a capture keeps its memory from that capture, and from no other.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._in_use: list[StorageWeakRef] = []
        self._by_pointer: dict[int, torch.Tensor] = {}

    def blank(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor on the device `meta`."""
        host = torch.empty_like(like, device="cpu")
        nbytes = max(host.untyped_storage().nbytes(), 1)
        at = self._free(nbytes)
        if at is None:
            at = len(self._buffers)
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
            self._buffers.append(buffer)
            self._by_pointer[buffer.data_ptr()] = buffer
            self._in_use.append(_weakly(host))
        # The caller's tensor has a storage of its own, whose end shows that it is free again.
        alias = dlpack.from_dlpack(self._buffers[at])
        self._in_use[at] = _weakly(alias)
        tensor = torch.empty(0, dtype=host.dtype, device="cpu")
        tensor.set_(alias.untyped_storage(), 0, host.shape, host.stride())
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    def by_address(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor without keeping its memory from others, if it is the pool's."""
        buffer = self._by_pointer.get(tensor.untyped_storage().data_ptr())
        if buffer is None:
            return tensor
        alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return alias.set_(buffer.untyped_storage(), *place)

    def _free(self, nbytes: int) -> int | None:
        for at, (buffer, used) in enumerate(zip(self._buffers, self._in_use, strict=True)):
            if len(buffer) == nbytes and used.expired():  # type: ignore[no-untyped-call]
                return at
        return None


def _weakly(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class RecordingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations instead of running them: their results hold nothing until a replay."""

    def __init__(self, steps: Steps, pool: ReplayMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = steps
        self.pool = pool

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func.namespace == "prims" or func.overloadpacket is _SET:
            return func(*args, **kwargs)  # of the host alone
        is_on_device = self._is_on_device(args, kwargs)
        host_args, host_kwargs = self._by_address((args, _on(kwargs, torch.device("cpu"))))
        if func._schema.is_mutable and _gives_what_it_writes(func._schema):
            self.steps.append(lambda: func(*host_args, **host_kwargs))
            return _written(func._schema, args, kwargs)
        meta_args, meta_kwargs = tree_map_only(
            torch.Tensor, lambda t: on_host(t).to("meta"), (args, _on(kwargs, torch.device("meta")))
        )
        results = _as_kernels_do(func, meta_args, func(*meta_args, **meta_kwargs))
        outputs = tree_map_only(torch.Tensor, self.pool.blank, results)
        if "empty" not in func.name():
            targets = tree_leaves(self._by_address(outputs))
            self.steps.append(lambda: _copy_all(func(*host_args, **host_kwargs), targets))
        return tree_map_only(torch.Tensor, on_device, outputs) if is_on_device else outputs

    def _by_address(self, values: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: self.pool.by_address(on_host(t)), values)

    def _is_on_device(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """True if an operation makes tensors of the fake device, and not of the host."""
        device = kwargs.get("device")
        if device is not None:
            return bool(device.type == KIND)
        tensors = (v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor))
        return any(is_there(tensor) for tensor in tensors)


def _copy_all(values: Any, targets: list[Any]) -> None:
    for target, value in zip(targets, tree_leaves(values), strict=True):
        if target is not None and value is not None:  # a gradient that was not asked for
            target.copy_(value)


def _gives_what_it_writes(schema: Any) -> bool:
    """True if all results are arguments that an operation writes; batch norm has others, too."""
    return all(result.alias_info is not None for result in schema.returns)


def _written(schema: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results of an operation that gives what it writes."""
    sources = [written_argument(schema.arguments, result) for result in schema.returns]
    results = [args[at] if at < len(args) else kwargs[name] for at, name in filter(None, sources)]
    return results[0] if len(results) == 1 else tuple(results) or None


_SET: Any = torch.ops.aten.set_
"""Says where a tensor lies in memory."""


_NORMS: Any = {
    torch.ops.aten.native_layer_norm.default: 2,
    torch.ops.aten.native_group_norm.default: 1,
}
"""Norms, with the index of their weight."""


def _as_kernels_do(func: Any, args: Any, results: Any) -> Any:
    """The results of an operation on the device `meta`, with element types of the host's kernel.

    For float64, torch 2.11 makes a float32 logsumexp on `meta`, and a float64 one on the host. The
    statistics of norms have the type of the weight on the host, or else that of what is normed.
    """
    if func in _NORMS:
        output, *statistics = results
        weight = args[_NORMS[func]]
        dtype = args[0].dtype if weight is None else weight.dtype
        return output, *(value.to(dtype) for value in statistics)
    if func is not torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        return results
    output, logsumexp = results
    return output, logsumexp.double() if output.dtype is torch.float64 else logsumexp


def _on(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The same arguments for another device, where they name one."""
    return kwargs if kwargs.get("device") is None else {**kwargs, "device": device}
