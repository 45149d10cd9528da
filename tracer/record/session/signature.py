"""The signature of a call of a step: calls with equal ones share one trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from ...torch_modes import default_device, default_dtype
from ...values.specs import static_key
from ...values.values import ObjectMarker
from .inputs import static_argument

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
