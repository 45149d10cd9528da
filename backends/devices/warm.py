"""Run what a program calls once by itself, before any message is under way.

A device loads a kernel when it is first launched, and may wait for all that it is doing before it
does. If that is a receive whose message is only sent once the kernel has run, nothing moves any
more. So the functions of a program run once, in the program's order, with the state of their actors
put back behind them. What comes from elsewhere is made up. What one function makes for another is
as it came: kernels are chosen by strides, too. Opaque methods, which may do anything, are left out.

Memory goes as it does in the program: a fused backward drops its operands while gradients come. A
backward runs a second time, as later ones add to these gradients; what it takes is made up then.

An index that is computed of made up numbers may be out of range, as `length - 1` of a length of 0.
A kernel that meets one on a device ends the process, so indices are brought into range here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir.module import Function, FunctionKind, Program
from ...ir.ops import Call, Op, Slice, Value, View, Wait
from ...ir.types import DType, FutureType, TensorType, Type, promised
from ..base import Body, BoxedBody, GraphBody, StatefulBody
from ..dtypes import TORCH_DTYPES
from ..program import builtins
from ..program.linked import LinkedProgram
from ..program.tensor_regions import taking
from .base import Device
from .programs.tensor_memory import laid_out, layouts

_ATEN = torch.ops.aten
_ALONG_DIM: Final = frozenset(
    {
        *(_ATEN.gather, _ATEN.index_select, _ATEN.scatter, _ATEN.scatter_, _ATEN.scatter_add),
        *(_ATEN.scatter_add_, _ATEN.scatter_reduce, _ATEN.scatter_reduce_, _ATEN.index_add),
        *(_ATEN.index_add_, _ATEN.index_copy, _ATEN.index_copy_, _ATEN.index_fill),
        *(_ATEN.index_fill_, _ATEN.index_reduce, _ATEN.index_reduce_),
    }
)
"""Ops that take a tensor, a dimension, and indices along that."""
_BY_LIST: Final = frozenset(
    {
        *(_ATEN.index, _ATEN._unsafe_index, _ATEN.index_put, _ATEN.index_put_),
        *(_ATEN._unsafe_index_put, _ATEN._index_put_impl_),
    }
)
"""Ops that take a tensor, and a list of indices along its dimensions, with None for a whole one."""

Output = tuple[str, int]
"""A value that a function makes: its name and the number of the value."""


def warm(linked: LinkedProgram, device: Device) -> dict[str, str]:
    """Run each traced function of a program, and what moves its values, once.

    Returns:
        The functions that could not be run, by name, and why. While messages are under way, a
        device may not get past the first call of one of them.
    """
    before = device.random_state(), torch.default_generator.get_state()
    with device.session(), torch.no_grad():
        for dtype in _dtypes(linked.program):
            _move(dtype, device)
        left_out = _Rehearsal(linked, device).run()
    device.synchronize()
    device.set_random_state(before[0])
    torch.default_generator.set_state(before[1])
    return left_out


class _Rehearsal:
    """Runs the first call of each function of a program."""

    def __init__(self, linked: LinkedProgram, device: Device) -> None:
        self._linked = linked
        self._device = device
        ops = linked.program.ops
        self._producers: dict[Value, Op] = {value: op for op in ops for value in op.results}
        calls: dict[str, Call] = {}
        for op in ops:
            if isinstance(op, Call):
                calls.setdefault(op.fn.name, op)
        self._calls = list(calls.values())
        self._last_uses = {
            output: index
            for index, call in enumerate(self._calls)
            for output in filter(None, map(self._output, call.operands))
        }
        self._outputs: dict[Output, Any] = {}

    def run(self) -> dict[str, str]:
        """The functions that could not be run, and why."""
        left_out = {}
        for index, call in enumerate(self._calls):
            try:
                self._call(call, index)
            except (RuntimeError, ValueError, ArithmeticError, LookupError) as error:
                left_out[call.fn.name] = f"{type(error).__name__}: {error}"
            self._let_go(index)
        return left_out

    def _call(self, call: Call, index: int) -> None:
        name = call.fn.name
        function = self._linked.module.functions[name]
        if function.kind is FunctionKind.BUILTIN:
            body: Body = builtins.implementation(function)
            outputs = body(*map(self._value, call.operands))
        elif function.kind is FunctionKind.GRAPH and function.body_name in self._linked.bodies:
            body = self._linked.bodies[function.body_name]
            if isinstance(body, GraphBody) and body.rebinds:
                return  # what it puts in the place of buffers would stay
            inputs = [*map(self._value, call.operands)]
            self._let_go(index)  # the body holds the only reference, and drops it when it will
            outputs = _run_and_put_back(body, function, inputs)
        else:
            return
        self._outputs |= {(name, number): each for number, each in enumerate(outputs)}

    def _let_go(self, index: int) -> None:
        """Drop what no call behind this one takes."""
        gone = [out for out in self._outputs if self._last_uses.get(out, -1) <= index]
        for output in gone:
            del self._outputs[output]

    def _output(self, value: Value) -> Output | None:
        """The function that makes a value, looking through views and from stream to stream."""
        op = self._producers.get(value)
        if isinstance(op, View | Slice) or (
            isinstance(op, Wait) and not _is_future(op.operands[0])
        ):
            return self._output(op.operands[0])
        return (op.fn.name, op.results.index(value)) if isinstance(op, Call) else None

    def _value(self, value: Value) -> Any:
        """The value to run a function with: what another one has made, if there is any."""
        op = self._producers.get(value)
        if isinstance(op, View):
            return self._value(op.operands[0]).narrow(op.dim, op.start, op.length)
        if isinstance(op, Slice):
            source = self._value(op.operands[0])
            return taking(op.region, tuple(source.shape))(source)
        if isinstance(op, Wait) and not _is_future(op.operands[0]):
            return self._value(op.operands[0])
        output = self._output(value)
        if output in self._outputs:
            return self._outputs[output]
        return _made_up(value.type, self._device)


def _is_future(value: Value) -> bool:
    return isinstance(value.type, FutureType)


def _run_and_put_back(body: Any, function: Function, inputs: list[Any]) -> Sequence[Any]:
    """Run a body, and put back what it changes.

    Args:
        inputs: of the body, which may empty the list.
    """
    is_known = isinstance(body, StatefulBody)
    state: Sequence[Tensor] = body.state() if is_known else ()
    trained: Sequence[Tensor] = body.trained() if is_known else ()
    saved = [tensor.clone() for tensor in state] if function.effect.changes_state else None
    gradients = [parameter.grad for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    # All operands and all gradients are not there at once, unless the program has them so.
    again = layouts(inputs) if trained and isinstance(body, BoxedBody) else None
    try:
        with _IndicesInRange():  # type: ignore[no-untyped-call]
            outputs = _run(body, inputs)
            if trained:
                _put_in_one_place(trained)
                _run(body, inputs if again is None else laid_out(again))  # adds to gradients
    finally:
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        for tensor, value in zip(state, saved or (), strict=False):
            tensor.copy_(value)
    return outputs


def _run(body: Any, inputs: list[Any]) -> Sequence[Any]:
    outputs: Sequence[Any] = (
        body.run_boxed(inputs) if isinstance(body, BoxedBody) else body(*inputs)
    )
    return outputs


def _put_in_one_place(parameters: Sequence[Tensor]) -> None:
    """Replace gradients by others of the same layout, all in the same memory: nobody reads them."""
    dense = [p for p in parameters if p.grad is not None and p.grad.layout is torch.strided]
    found = [layouts([p.grad])[0] for p in dense if p.grad is not None]
    nbytes = max((each.nbytes for each in found), default=0)
    for parameter in dense:
        parameter.grad = None
    made = laid_out([replace(each, whole=0, nbytes=nbytes) for each in found])
    for parameter, gradient in zip(dense, made, strict=True):
        parameter.grad = gradient


class _IndicesInRange(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Brings the indices of ops into range; those inside of a fused kernel do not come by here."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        op, given = func.overloadpacket, list(args)
        if op in _ALONG_DIM and isinstance(given[1], int):
            given[2] = _into_range(given[2], given[0].shape[given[1]] if given[0].dim() else 1)
        elif op in _BY_LIST:
            given[1] = _all_into_range(given[0], given[1])
        elif op is _ATEN.embedding:
            given[1] = _into_range(given[1], given[0].shape[0])
        elif op is _ATEN.embedding_dense_backward:
            given[1] = _into_range(given[1], given[2])
        elif op is _ATEN.nll_loss_forward or op is _ATEN.nll_loss_backward:
            at = 0 if op is _ATEN.nll_loss_forward else 1
            classes = given[at].shape[-1]
            ignored = given[at + 1] == given[at + 4]
            within = _into_range(given[at + 1], classes)
            given[at + 1] = torch.where(ignored, given[at + 1], within)
        return func(*given, **(kwargs or {}))


def _all_into_range(indexed: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    dim = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is None or is_mask:
            found.append(index)
        else:
            found.append(_into_range(index, indexed.shape[dim]))
        dim += index.dim() if index is not None and is_mask else 1
    return found


def _into_range(index: Tensor, size: int) -> Tensor:
    return index.remainder(size) if size else index


def _made_up(type_: Type, device: Device) -> Tensor:
    """Between 0 and 1 where it is floating; else 0, which every index may be."""
    if not isinstance(type_, TensorType):
        raise ValueError(f"it takes {type_}, which is not made up")
    dtype = TORCH_DTYPES[type_.dtype]
    if type_.dtype in (DType.F64, DType.F32, DType.F16, DType.BF16):
        return torch.rand(type_.shape, dtype=dtype, device=device.torch_device)
    return torch.zeros(type_.shape, dtype=dtype, device=device.torch_device)


def _dtypes(program: Program) -> list[torch.dtype]:
    values = [*program.params, *(value for op in program.ops for value in op.results)]
    types = (promised(value.type) for value in values)
    return list(dict.fromkeys(TORCH_DTYPES[t.dtype] for t in types if isinstance(t, TensorType)))


def _move(dtype: torch.dtype, device: Device) -> None:
    """Run the kernels that copy, those by which ports put parts in order, and those for numbers.

    Methods read numbers of a device: torch takes pinned memory for that, which the driver gives
    out only when the device has nothing to do.
    """
    x = torch.zeros(8, 8, dtype=dtype, device=device.torch_device)
    x.clone().copy_(x)
    x.t().contiguous()
    torch.cat(torch.stack(x.chunk(2, 1)).unbind(0), 1)
    x[0, 0].item()
    x.cpu()
