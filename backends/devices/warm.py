"""Runs what a program calls once by itself, before any message is under way.

A device loads a kernel when it is first launched, and may wait for all that it is doing before it
does. If that is a receive whose message is only sent once the kernel has run, nothing moves any
more. So the functions of a program run once on made-up values, with the state of their actors put
back behind them. A function that does not bear made-up values is left out; opaque methods, which
may do anything, always are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir.module import Function, FunctionKind, Program
from ...ir.ops import Call
from ...ir.types import DType, TensorType, Type
from .. import builtins
from ..base import Body
from ..dtypes import TORCH_DTYPES
from ..linked import LinkedProgram
from .base import Device


def warm(linked: LinkedProgram, device: Device) -> None:
    """Run each traced function of a program, and what moves its values, once."""
    program, module, bodies = linked.program, linked.module, linked.bodies
    before = device.random_state(), torch.default_generator.get_state()
    names = dict.fromkeys(op.fn.name for op in program.ops if isinstance(op, Call))
    with device.session(), torch.no_grad():
        for dtype in _dtypes(program):
            _move(dtype, device)
        for name in names:
            function = module.functions[name]
            if function.kind is FunctionKind.BUILTIN:
                _try(builtins.implementation(function), function, device)
            elif function.kind is FunctionKind.GRAPH and name in bodies:
                _run_and_put_back(bodies[name], function, device)
    device.synchronize()
    device.set_random_state(before[0])
    torch.default_generator.set_state(before[1])


def _run_and_put_back(body: Any, function: Function, device: Device) -> None:
    if getattr(body, "rebinds", False):
        return  # what it puts in the place of buffers would stay
    state: Sequence[Tensor] = body.state() if hasattr(body, "state") else ()
    trained: Sequence[Tensor] = body.trained() if hasattr(body, "trained") else ()
    saved = [tensor.clone() for tensor in state] if function.effect.changes_state else None
    gradients = [parameter.grad for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    try:
        if _try(body, function, device) and trained:
            _try(body, function, device)  # this time gradients are added to those of the first
    finally:
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        for tensor, value in zip(state, saved or (), strict=False):
            tensor.copy_(value)


def _try(body: Body, function: Function, device: Device) -> bool:
    if not all(isinstance(type_, TensorType) for type_ in function.inputs):
        return False
    try:
        body(*(_made_up(type_, device) for type_ in function.inputs))
    except (RuntimeError, ValueError, ArithmeticError):  # what it does not bear, such as no inverse
        return False
    return True


def _made_up(type_: Type, device: Device) -> Tensor:
    """Between 0 and 1 where it is floating; else 0, which every index may be."""
    assert isinstance(type_, TensorType)
    dtype = TORCH_DTYPES[type_.dtype]
    if type_.dtype in (DType.F64, DType.F32, DType.F16, DType.BF16):
        return torch.rand(type_.shape, dtype=dtype, device=device.torch_device)
    return torch.zeros(type_.shape, dtype=dtype, device=device.torch_device)


def _dtypes(program: Program) -> list[torch.dtype]:
    values = [*program.params, *(value for op in program.ops for value in op.results)]
    types = (getattr(value.type, "value", value.type) for value in values)
    return list(dict.fromkeys(TORCH_DTYPES[t.dtype] for t in types if isinstance(t, TensorType)))


def _move(dtype: torch.dtype, device: Device) -> None:
    """What copies, and what ports put parts in order with.

    And what methods read numbers with: torch takes pinned memory for that, which the driver gives
    out only when the device has nothing to do.
    """
    x = torch.zeros(8, 8, dtype=dtype, device=device.torch_device)
    x.clone().copy_(x)
    x.t().contiguous()
    torch.cat(torch.stack(x.chunk(2, 1)).unbind(0), 1)
    x[0, 0].item()
    x.cpu()
