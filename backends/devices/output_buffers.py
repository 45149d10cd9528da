"""Lend a graph's memory to the caller, and find out when it is given back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils import dlpack

from ..device import Device, DeviceQueue


class LentTensor:
    """A tensor in a graph's memory that the caller gets, and whether it has been given back.

    The caller's tensor has a storage of its own over the same memory. That storage ends with the
    last tensor that uses any of it, views included, whatever else uses the graph's storage.

    When the host has dropped the tensor, the caller's streams may still read it. Torch's allocator
    does not know of that, since the storage is not its own. So this keeps the streams that it was
    handed to, and whoever uses its memory again waits for the work that is on them by then.
    """

    __slots__ = ("_as_bytes", "_dtype", "_lent", "_memory", "_shape", "_users")

    def __init__(self, tensor: Tensor) -> None:
        memory = tensor.detach().contiguous()
        # Elements where dlpack has the type: a view of bytes as elements takes microseconds.
        self._as_bytes = not _is_known(memory)
        self._memory = memory.reshape(-1).view(torch.uint8) if self._as_bytes else memory
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._lent: Any = None
        self._users: list[DeviceQueue] = []

    def out(self) -> Tensor:
        """The tensor, for the caller; see `hand_to_caller`."""
        self._users.clear()
        tensor: Tensor = dlpack.from_dlpack(_export(self._memory))
        if self._as_bytes:
            tensor = tensor.view(self._dtype).view(self._shape)
        self._lent = _reference(tensor.untyped_storage())
        return tensor

    def is_back(self) -> bool:
        """True if nobody holds the tensor, or part of it, any more."""
        return self._lent is None or self._lent.expired()

    def hand_to_caller(self, device: Device) -> None:
        """Inside a session: the caller's stream will use the tensor."""
        caller = device.caller()
        if caller not in self._users:
            self._users.append(caller)
            device.keep((self._memory,), caller)  # for when the graph is dropped

    def await_users(self, device: Device, queue: DeviceQueue) -> None:
        """Inside a session: let a stream wait for those who have used the tensor.

        The stream is behind the caller's stream already.
        """
        caller = device.caller()
        for user in self._users:
            if user != caller:
                passed = device.event()
                passed.record(user)
                queue.wait_event(passed)


_export: Any = torch._C._to_dlpack
_reference: Any = reductions.StorageWeakRef


def _is_known(tensor: Tensor) -> bool:
    """True if dlpack keeps the type and shape of a tensor."""
    try:
        alias: Tensor = dlpack.from_dlpack(_export(tensor))
    except (RuntimeError, BufferError):
        return False
    return alias.dtype is tensor.dtype and alias.shape == tensor.shape


def may_be_lent(tensor: Tensor) -> bool:
    """True if a tensor's memory can be given another storage."""
    return tensor.is_contiguous() and tensor.numel() > 0 and not tensor.is_complex()
