"""Tensors of the fake device: torch's own kind of tensor, whose memory is the host's.

A storage of the device has the same address as a storage of the host, and keeps that alive. So a
pointer to a tensor of the device is one that the host can use, and a kernel of the device is that
of the host on the same memory.
"""

from __future__ import annotations

from typing import Any

import torch

KIND = "fake"
"""Torch's word for the device."""

DEVICE_INDEX = 0
"""Each process sees one fake device alone, its own."""

HOST = torch.device("cpu")

_SET: Any = torch.ops.aten.set_.source_Storage_storage_offset
_AS_ON_HOST = torch._C.DispatchKey.CPU
_make_storage: Any = torch._C._construct_storage_from_data_pointer


def is_there(tensor: torch.Tensor) -> bool:
    """True if a tensor is on the fake device."""
    return tensor.device.type == KIND


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the host; a tensor of the host is returned itself."""
    if tensor.is_cpu:
        return tensor
    host = host_storage(tensor.untyped_storage())
    blank = _blank(tensor.dtype)
    return blank.set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the device, with a storage of its own."""
    return placed(storage_on_device(tensor.untyped_storage()), tensor)


def placed(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor in a storage of the device, with the layout of a tensor of the host."""
    empty = torch._C._acc.create_empty_tensor((0,), like.dtype)
    return move_into(empty, storage, like)


def move_into(
    tensor: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor
) -> torch.Tensor:
    """Move a tensor of the device into a storage, with the layout of a tensor of the host."""
    place = like.storage_offset(), like.shape, like.stride()
    return _SET._op_dk(_AS_ON_HOST, tensor, storage, *place)  # type: ignore[no-any-return]


def storage_on_device(host: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the device in the memory of a storage of the host."""
    storage: Any = _make_storage(host.data_ptr(), torch.device(KIND, DEVICE_INDEX), host.nbytes())
    # Torch keeps the Python attributes of a storage for as long as the storage lives.
    storage.on_host = host
    return storage  # type: ignore[no-any-return]


def host_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the host in the memory of a storage of the device."""
    device_storage: Any = storage
    try:
        return device_storage.on_host  # type: ignore[no-any-return]
    except AttributeError:
        # Torch has made the storage from another one, as by DLPack, and keeps that alive.
        host: Any = _make_storage(storage.data_ptr(), HOST, storage.nbytes())
        host.of_device = storage
        return host  # type: ignore[no-any-return]


_BLANKS: dict[torch.dtype, torch.Tensor] = {}


def _blank(dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of the host; to detach one that exists takes the least time."""
    blank = _BLANKS.get(dtype)
    if blank is None:
        blank = _BLANKS[dtype] = torch.empty(0, dtype=dtype, device=HOST)
    return blank.detach()
