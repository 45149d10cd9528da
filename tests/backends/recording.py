"""Captures torch's operations for devices that are made of host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Steps(Protocol):
    """Where what a graph does is noted down, in order."""

    def append(self, step: Callable[[], object], /) -> None: ...


class Pool:
    """The memory of what lives within a replay: given out again as soon as nothing refers to it.

    A recording refers to it as graphs do, by address. So whoever holds a tensor, or a view of it,
    during captures keeps its memory from those that are captured then; and from no others.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._in_use: list[StorageWeakRef] = []

    def blank(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor on the device `meta`."""
        made = torch.empty_like(like, device="cpu")
        nbytes = max(made.untyped_storage().nbytes(), 1)
        at = self._free(nbytes)
        if at is None:
            at = len(self._buffers)
            self._buffers.append(torch.zeros(nbytes, dtype=torch.uint8))
            self._in_use.append(StorageWeakRef(made.untyped_storage()))
        # The caller's tensor has a storage of its own, whose end shows that it is free again.
        alias = dlpack.from_dlpack(dlpack.to_dlpack(self._buffers[at]))
        self._in_use[at] = StorageWeakRef(alias.untyped_storage())
        tensor = torch.empty(0, dtype=made.dtype)
        tensor.set_(alias.untyped_storage(), 0, made.shape, made.stride())
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    def by_address(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor without keeping its memory from others, if it is the pool's."""
        at = tensor.untyped_storage().data_ptr()
        for buffer in self._buffers:
            if buffer.data_ptr() == at:
                same = torch.empty(0, dtype=tensor.dtype)
                place = (tensor.storage_offset(), tensor.shape, tensor.stride())
                return same.set_(buffer.untyped_storage(), *place)
        return tensor

    def _free(self, nbytes: int) -> int | None:
        for at, (buffer, used) in enumerate(zip(self._buffers, self._in_use, strict=True)):
            if len(buffer) == nbytes and used.expired():
                return at
        return None


class Recording(TorchDispatchMode):
    """Notes operations down instead of doing them: their results hold nothing until a replay."""

    def __init__(self, steps: Steps, pool: Pool) -> None:
        super().__init__()
        self.steps = steps
        self.pool = pool

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func.namespace == "prims" or func.overloadpacket is _SET:
            return func(*args, **kwargs)  # of the host alone
        here, kwhere = self._by_address((args, kwargs))
        if func._schema.is_mutable:
            self.steps.append(lambda: func(*here, **kwhere))
            return args[0] if func._schema.returns else None
        meta_args, meta_kwargs = tree_map_only(
            torch.Tensor, lambda t: t.to("meta"), (args, {**kwargs, **_meta(kwargs)})
        )
        made = _as_kernels_do(func, func(*meta_args, **meta_kwargs))
        outputs = tree_map_only(torch.Tensor, self.pool.blank, made)
        if "empty" in func.name():
            return outputs
        targets = tree_leaves(self._by_address(outputs))

        def step() -> None:
            for target, value in zip(targets, tree_leaves(func(*here, **kwhere)), strict=True):
                if target is not None:  # a gradient that was not asked for
                    target.copy_(value)

        self.steps.append(step)
        return outputs

    def _by_address(self, values: Any) -> Any:
        return tree_map_only(torch.Tensor, self.pool.by_address, values)


_SET: Any = torch.ops.aten.set_
"""Says where a tensor lies in memory."""


def _as_kernels_do(func: Any, made: Any) -> Any:
    """The results of an operation on the device `meta`, with element types of the host's kernel.

    Of float64, torch 2.11 makes a float32 logsumexp there, and a float64 one on the host.
    """
    if func is not torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        return made
    output, logsumexp = made
    return output, logsumexp.double() if output.dtype is torch.float64 else logsumexp


def _meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
