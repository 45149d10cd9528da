"""Makes the fake device known to torch, as a package for a new device does.

After `register`, `torch.device("fake")` exists, `torch.fake` is its module, and tensors of it are
in the host's memory. Torch keeps one place for devices that it does not know: the process must not
use it for another one, such as NPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils import backend_registration
from torch.utils.weak import WeakIdKeyDictionary

from .generators import take_generators
from .host_memory import DEVICE_INDEX, KIND, host_storage, storage_on_device
from .kernels import install


class Worked(Protocol):
    """A device that is told of work before torch puts it there."""

    def before_work(self) -> None:
        """Torch is about to put work on the compute stream."""


class _Threads(threading.local):
    device: Worked | None = None


_threads = _Threads()
_of_process: list[Worked] = []
_registrations: list[Any] = []
_registering = threading.Lock()


def register() -> None:
    """Make the device known to torch; idempotent.

    Raises:
        RuntimeError: the process has given the place to another device.
    """
    with _registering:
        if _registrations:
            return
        backend_registration._setup_privateuseone_for_python_backend(
            KIND, _module, _Hooks(), _DeviceGuard()
        )
        _registrations.extend(install(_before))
        take_generators()
        gradients = _Grad(torch._C.TensorBase.grad)
        torch.Tensor.grad = gradients  # type: ignore[assignment]
        torch.Tensor.data = _Data(torch._C.TensorBase.data, gradients)  # type: ignore[assignment]
        _take_clones()
        _take_pinning()
        torch.accelerator.synchronize = _module.synchronize


def use(device: Worked | None) -> Worked | None:
    """Tell a device of this thread's work from here on; returns the device of before."""
    before, _threads.device = _threads.device, device
    return before


def use_for_process(device: Worked) -> None:
    """Tell a device of the work of threads that use none, such as those of backwards."""
    _of_process[:] = [device]
    # A module that is moved keeps its parameters, as on devices for which torch sets `.data`.
    torch.__future__.set_swap_module_params_on_conversion(True)


def _before() -> None:
    device = _threads.device
    if device is not None:
        device.before_work()
    elif _of_process:
        _of_process[0].before_work()


class _FakeModule:
    """`torch.fake`, with the functions that torch calls of a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return DEVICE_INDEX

    def set_device(self, device: object) -> None:
        pass

    def device(self, device: object) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, device: object = None) -> None:
        """Wait for all that the device has to do."""
        _before()

    def empty_cache(self) -> None:
        _before()

    def manual_seed(self, seed: int) -> None:
        """Do nothing: torch has seeded the host's generator, which the device draws from."""

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing, as `manual_seed`."""

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.default_generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, device: object = None) -> int:
        return 0

    def max_memory_allocated(self, device: object = None) -> int:
        return 0

    def reset_peak_memory_stats(self, device: object = None) -> None:
        pass


_module = _FakeModule()


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True


class _DeviceGuard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Grad:
    """`torch.Tensor.grad` that stays where it is while its tensor is on another device.

    On devices that torch knows, a tensor whose data are replaced keeps its gradient. Modes see
    torch's own calls, as with `_Data`.
    """

    def __init__(self, own: Any) -> None:
        self._own = own
        self._apart: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.__dict__.update(
            __get__=own.__get__, __set__=own.__set__, __delete__=own.__delete__, __name__="grad"
        )

    def __get__(self, tensor: torch.Tensor | None, kind: type | None = None) -> Any:
        if tensor is None:
            return self
        if tensor in self._apart:
            return self._apart[tensor]
        return self._own.__get__(tensor, kind)

    def __set__(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        if tensor in self._apart:
            del self._apart[tensor]
        self._own.__set__(tensor, value)

    def __delete__(self, tensor: torch.Tensor) -> None:
        self.__set__(tensor, None)

    def keep(self, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        """Give a tensor the gradient that it had before its data were replaced."""
        if gradient.device == tensor.device:
            self.__set__(tensor, gradient)
        else:
            self._apart[tensor] = gradient


class _Data:
    """`torch.Tensor.data` that takes a tensor of the device for one of the host, and vice versa.

    Torch allows that for the devices that it knows. Code that looks up its `__get__` and `__set__`,
    as torch does for modes that see all calls, gets torch's own.
    """

    def __init__(self, own: Any, gradients: _Grad) -> None:
        self._own = own
        self._gradients = gradients
        self.__dict__.update(__get__=own.__get__, __set__=own.__set__, __name__="data")

    def __get__(self, tensor: torch.Tensor | None, kind: type | None = None) -> Any:
        return self if tensor is None else self._own.__get__(tensor, kind)

    def __set__(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if value.is_cpu == tensor.is_cpu:
            self._own.__set__(tensor, value)
            return
        gradient = tensor.grad
        moved = value.detach().requires_grad_(tensor.requires_grad)
        torch._C._swap_tensor_impl(tensor, moved)
        if gradient is not None:
            self._gradients.keep(tensor, gradient)


def _take_clones() -> None:
    """Let storages of the device be cloned, for `copy.deepcopy`: torch cannot allocate there."""
    clone: Callable[[Any], Any] = torch.UntypedStorage.clone

    def of_any_device(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.device.type != KIND:
            return clone(self)  # type: ignore[no-any-return]
        return storage_on_device(clone(host_storage(self)))

    torch.UntypedStorage.clone = of_any_device  # type: ignore[assignment, method-assign]


def _take_pinning() -> None:
    """Let memory of the host be pinned by a copy: the device reads and writes any memory."""

    def pin_memory(self: torch.Tensor, device: object = None) -> torch.Tensor:
        return self.clone()

    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment, method-assign]
