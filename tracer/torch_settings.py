"""Read torch's settings, on which its functions depend besides their arguments, and set them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch

Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]
"""A function that reads a setting, and one that sets it."""


def settings_now() -> tuple[Any, ...]:
    """The settings that a torch function may depend on; those of autocast while it is on."""
    settings = torch.is_inference_mode_enabled(), *[read() for read, _ in _SETTINGS]
    if not _C._is_any_autocast_enabled():
        return settings
    return (*settings, *[read() for read, _ in _AUTOCAST])


@contextmanager
def settings_restored_on_failure() -> Iterator[None]:
    """Set torch's settings as they were before, if the `with` block raises.

    A method that is left in its midst does not come to the lines that undo what it has set. No
    function sets the inference mode, so a method leaves it by the end of a `with` block.
    """
    both = (*_SETTINGS, *_AUTOCAST)
    before = [read() for read, _ in both]
    try:
        yield
    except BaseException:
        for (read, put), value in zip(both, before, strict=True):
            if read() != value:
                put(value)
        raise


_C: Any = torch._C


def _determinism() -> tuple[bool, bool]:
    """Whether deterministic algorithms are wanted, and whether others only warn."""
    return _C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()


def _set_determinism(value: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(value[0], warn_only=value[1])


_SETTINGS: tuple[Setting, ...] = (
    (torch.is_grad_enabled, _C._set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_determinism, _set_determinism),
    (_C._get_float32_matmul_precision, _C._set_float32_matmul_precision),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (
        _C._get_math_sdp_allow_fp16_bf16_reduction,
        _C._set_math_sdp_allow_fp16_bf16_reduction,
    ),
)

_AUTOCAST: tuple[Setting, ...] = tuple(
    (partial(read, device), partial(put, device))
    for device in ("cpu", "cuda", "privateuseone")
    for read, put in (
        (torch.is_autocast_enabled, torch.set_autocast_enabled),
        (torch.get_autocast_dtype, torch.set_autocast_dtype),
    )
)
