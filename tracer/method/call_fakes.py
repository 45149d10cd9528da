"""The fakes that a traced call runs on: one for each tensor of its state, and for each input."""

from __future__ import annotations

import inspect
from collections import Counter

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..values.actor_state import StateTensor
from ..values.interface import TracedCall
from ..values.operators import storage_key
from ..values.specs import ObjectSpec, TensorSpec
from .stored.plain_fakes import PlainFakes


def state_fakes(call: TracedCall, mode: FakeTensorMode) -> list[torch.Tensor]:
    """A fake for each tensor of the state, in order.

    Raises:
        TraceError: the class of a tensor has functions of its own, which a fake has not.
    """
    for tensor in call.state.tensors:
        if _has_functions(tensor.tensor):
            raise call.refusal(
                f"'{tensor.path}' is a {type(tensor.tensor).__qualname__}, a class of tensors that "
                "computes torch functions in its own way, and a graph has those of plain tensors",
                "keep it as a plain tensor, and do in the method what its functions do; or, where "
                "no gradient flows through the method, mark it with @cg.opaque",
            )
    memory = Counter(storage_key(tensor.tensor) for tensor in call.state.tensors)
    plain = PlainFakes(mode)
    return [
        _plain_fake(tensor.tensor, tensor.device, plain)
        if memory[storage_key(tensor.tensor)] == 1 and is_plain(tensor)
        else _fake_state(tensor, mode)
        for tensor in call.state.tensors
    ]


def input_fakes(
    call: TracedCall, mode: FakeTensorMode, differentiated: frozenset[int]
) -> list[torch.Tensor]:
    """A fake for each value among the arguments, in order.

    Args:
        call: the call.
        mode: makes the fakes.
        differentiated: the values whose gradients are wanted.

    Raises:
        TraceError: an argument is known only at run time.
    """
    return [
        _fake_input(call, mode, index in differentiated, leaf, name)
        for index, (leaf, name) in enumerate(call.values())
    ]


def _has_functions(tensor: torch.Tensor) -> bool:
    """True if the class of a tensor computes functions or operators in a way that a fake loses."""
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return False
    own = (torch.Tensor, torch.nn.Parameter)
    function = inspect.getattr_static(kind, "__torch_function__")
    if all(function is not inspect.getattr_static(cls, "__torch_function__") for cls in own):
        return True
    is_known = isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor)
    return not is_known and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _plain_fake(real: torch.Tensor, device: torch.device, fakes: PlainFakes) -> torch.Tensor:
    """Make what `FakeTensorMode.from_tensor` makes of a plain tensor, twenty times as fast."""
    plain = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
    fake = fakes.of(plain, device)
    if isinstance(real, torch.nn.Parameter):
        fake._is_param = True
    vars(fake).update(vars(real))
    return fake.requires_grad_(real.requires_grad)


def _fake_state(state: StateTensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake of the logical tensor."""
    real = state.tensor if state.tensor.is_leaf else state.tensor.detach()
    if state.shape == tuple(real.shape):
        known = mode.from_tensor(real, static_shapes=True)
        known.fake_device = state.device
        return known
    with mode:
        fake = torch.empty(state.shape, dtype=real.dtype, device=state.device)
        if isinstance(real, torch.nn.Parameter):
            return torch.nn.Parameter(fake, real.requires_grad)
        return fake.requires_grad_(real.requires_grad)


def _fake_input(
    call: TracedCall,
    mode: FakeTensorMode,
    is_differentiated: bool,
    leaf: TensorSpec | ObjectSpec,
    name: str,
) -> torch.Tensor:
    if isinstance(leaf, ObjectSpec):
        raise call.refusal(
            f"{name} is an object that is known only at run time",
            "mark the method with @cg.opaque, so that it is called as it is",
            call.loc,
        )
    plain = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    fake: torch.Tensor = FakeTensor(mode, plain, call.device)
    if not (leaf.requires_grad or is_differentiated):
        return fake
    # Like the output of another call, it must not be a leaf of autograd.
    with mode, torch.enable_grad():
        return fake.requires_grad_(True).clone()


_OF_BUFFERS = {"persistent", "_is_buffer"}
"""What `torch.nn.Buffer` sets on a tensor, and torch on the fake of one."""


def is_plain(state: StateTensor) -> bool:
    """True if a tensor is a dense, contiguous leaf that fills its storage, without flags."""
    tensor = state.tensor
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and state.shape == tuple(tensor.shape)
        and tensor.layout is torch.strided
        and tensor.is_leaf
        and not (tensor._is_view() or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        and not (tensor.is_quantized or tensor.is_meta or vars(tensor).keys() - _OF_BUFFERS)
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
