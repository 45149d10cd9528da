"""Torch functions that a step cannot use, the reasons, and the remedies."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from ....ir.location import Location
from ...errors import TraceError
from ...source import is_user_file
from ...values.values import TracedTensor


@dataclass(frozen=True)
class Unsupported:
    """Why a function is not supported, in words that follow its name, and the remedy."""

    why: str
    remedy: str


_READ = "return it from the step, or read it in an actor's method that is marked @cg.opaque"
_READS = Unsupported("needs elements of a value, which exist only when the step runs", _READ)
_BRANCHES = Unsupported(
    "needs elements of a value to decide on, which exist only when the step runs",
    "use torch.where, decide by a static argument of the step, or branch in an actor's method "
    "that is marked @cg.opaque",
)
_PRINTS = Unsupported(
    "needs elements of a value to write, which exist only when the step runs",
    "return it from the step and print it there, or print it in an actor's method that is marked "
    "@cg.opaque",
)
_SHAPES = Unsupported(
    "makes a value whose shape depends on elements; shapes are static in a compiled step",
    "use torch.where with a mask, or an actor's method that is marked @cg.opaque",
)
_BACKWARD = Unsupported(
    "would differentiate now; the step is only being traced",
    "call cg.backward(loss)",
)
_GRAD = Unsupported(
    "asks autograd about a value, which the compiled step does not keep",
    "call cg.backward(loss) for the gradients of actors' parameters; for others call "
    "torch.autograd.grad in an actor's method that is marked @cg.opaque",
)
_LEAF = Unsupported(
    "would make a new leaf for gradients in the step",
    "let parameters live in actors, and call cg.backward(loss)",
)
_HOOK = Unsupported(
    "would run Python in the backward, which is derived and compiled",
    "apply a torch.autograd.Function with that backward in an actor's method; gradients of "
    "parameters can be changed in the method that calls opt.step()",
)
_MEMORY = Unsupported(
    "asks for the memory of a value, which the compiled step lays out itself",
    "do this in an actor's method",
)
_LAYOUT = Unsupported(
    "asks for the memory layout of a value, which is not part of the trace",
    "use .reshape or .contiguous, which work with any layout",
)
_RESHAPES = Unsupported(
    "would change the shape of a value in place",
    "use the function without the underscore, and its result",
)
_DEVICE = Unsupported(
    "names a device; a value of the step is where its actor is",
    "leave it out; change dtypes with .to(dtype)",
)
_COPIES = Unsupported(
    "would copy the Python object that stands for a value",
    "use value.clone(), and copy containers item by item, as in [value.clone() for value in list]",
)
_SHARED = Unsupported(
    "would share memory with a value behind the tracer's back",
    "use .detach() or .clone()",
)
_FROM_VALUES = Unsupported(
    "reads the elements of what it is given, which exist only when the step runs",
    "use torch.stack, or the value itself",
)


def _all(unsupported: Unsupported, names: str) -> dict[str, Unsupported]:
    return dict.fromkeys(names.split(), unsupported)


_FUNCTIONS: dict[str, Unsupported] = {
    **_all(_READS, "item tolist numpy __int__ __float__ __complex__ __index__ __array__"),
    **_all(_BRANCHES, "__bool__ __contains__ is_nonzero equal allclose"),
    **_all(_PRINTS, "__repr__ __str__ __format__"),
    **_all(_SHAPES, "nonzero argwhere masked_select unique unique_consecutive"),
    **_all(_BACKWARD, "backward"),
    **_all(_GRAD, "grad retain_grad"),
    **_all(_LEAF, "requires_grad_ _make_subclass"),
    **_all(_HOOK, "register_hook register_post_accumulate_grad_hook"),
    **_all(_MEMORY, "data_ptr storage untyped_storage _typed_storage share_memory_ is_shared"),
    **_all(_MEMORY, "pin_memory is_pinned __dlpack__ __dlpack_device__ set_ resize_ resize_as_"),
    **_all(_MEMORY, "is_set_to apply_ map_ map2_"),
    **_all(_LAYOUT, "stride is_contiguous storage_offset dim_order"),
    **_all(_RESHAPES, "squeeze_ unsqueeze_ transpose_ swapaxes_ swapdims_ t_ as_strided_"),
    **_all(_DEVICE, "cuda cpu npu xpu hpu mps ipu get_device"),
    **_all(_COPIES, "__deepcopy__ __reduce_ex__ __reduce__ __setstate__ as_subclass"),
    **_all(_FROM_VALUES, "tensor as_tensor asarray scalar_tensor"),
}
_GETTERS: dict[str, Unsupported] = {
    **_all(_GRAD, "grad grad_fn _grad is_leaf retains_grad output_nr _backward_hooks"),
    **_all(_SHARED, "data _base"),
    **_all(_MEMORY, "__cuda_array_interface__ _version"),
}
_SETTERS: dict[str, Unsupported] = {
    **_all(_LEAF, "requires_grad"),
    **_all(_GRAD, "grad _grad"),
    **_all(_SHARED, "data"),
}


Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A call of a torch function by the step.

    Attributes:
        func: the function.
        kind: "call" for a function, "get" or "set" for the getter or setter of a property.
        name: the name of the function or property.
        args, kwargs: the arguments of the call.
        loc: the user's line.
    """

    func: Function
    kind: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loc: Location | None

    @property
    def shown(self) -> str:
        """The name of the function in messages."""
        if self.kind == "get":
            return f".{self.name} of a tensor"
        if self.kind == "set":
            return f"an assignment to .{self.name} of a tensor"
        return _SHOWN.get(self.name, f"{self.name}()")


def describe(function: Function) -> tuple[str, str]:
    """The kind and the name of a torch function, as in `TorchCall`."""
    name: str = getattr(function, "__name__", "")
    owner = getattr(function, "__self__", None)
    if name in ("__get__", "__set__", "__delete__") and owner is not None:
        inner: str = getattr(owner, "__name__", None) or owner.fget.__name__
        return ("get" if name == "__get__" else "set"), inner
    schema = getattr(function, "_schema", None)
    if schema is not None:
        name = schema.name.rpartition("::")[2]
    return "call", name or type(function).__name__


def check(call: TorchCall) -> None:
    """Return if a step may make a call of a torch function.

    Raises:
        TraceError: the step may not use the function, or not with these arguments.
    """
    unsupported = {"call": _FUNCTIONS, "get": _GETTERS, "set": _SETTERS}[call.kind].get(call.name)
    if unsupported is None and call.kind == "set":
        unsupported = _SHARED
    if unsupported is None and call.kind == "call":
        unsupported = _by_arguments(call)
    if unsupported is not None:
        unsupported = unsupported_library(call.name) or unsupported
        raise TraceError(f"{call.shown} {unsupported.why}", loc=call.loc, remedy=unsupported.remedy)


_SCALER = Unsupported(
    "is called by a GradScaler, whose Python runs only while the step is traced",
    "bfloat16 needs no scaling; else multiply the loss by a number, cg.backward(loss * scale), and "
    "divide .grad by it in the actor's method that calls opt.step()",
)
_VALIDATES = Unsupported(
    "is called by torch.distributions, which checks elements that exist only when the step runs",
    "pass validate_args=False to the distribution, or make it in an actor's method, also so",
)
_LIBRARIES = (
    (os.path.join("torch", "amp", "grad_scaler.py"), None, _SCALER),
    (os.path.join("torch", "distributions", ""), "__bool__", _VALIDATES),
)


def unsupported_library(name: str) -> Unsupported | None:
    """The reason why a torch function cannot be used by the library that is calling it.

    Args:
        name: the name of the function.

    Returns:
        None unless one of the libraries in `_LIBRARIES` is calling the function.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        for file, only, unsupported in _LIBRARIES:
            if file in frame.f_code.co_filename and only in (None, name):
                return unsupported
        frame = frame.f_back
    return None


_SHOWN = {
    "__bool__": "a decision on a tensor (if, while, and, or, not)",
    "__int__": "int() of a tensor",
    "__float__": "float() of a tensor",
    "__complex__": "complex() of a tensor",
    "__index__": "a tensor as an index of a Python sequence or a range",
    "__contains__": "'in' on a tensor",
    "__array__": "a numpy function on a tensor",
    "__repr__": "the text of a tensor",
    "__str__": "the text of a tensor",
    "__format__": "the text of a tensor",
    "__getitem__": "an index",
    "__setitem__": "an assignment to an index",
}


def _by_arguments(call: TorchCall) -> Unsupported | None:
    name, args, kwargs = call.name, call.args, call.kwargs
    if name == "__getitem__" and len(args) > 1 and _has_mask(args[1]):
        return _SHAPES
    if name == "where" and len(args) + len(kwargs) == 1:
        return _SHAPES
    if name in ("to", "type") and any(map(_is_device, (*args[1:], kwargs.get("device")))):
        return _DEVICE
    if kwargs.get("out") is not None:
        return Unsupported("with out= writes into a tensor", "use what the function returns")
    if kwargs.get("generator") is not None:
        return Unsupported(
            "with generator= draws from a generator of this process",
            "leave it out; the step's random numbers follow from its seed",
        )
    if name in ("batch_norm", "instance_norm") and _updates_statistics(call):
        return Unsupported(
            "would update running statistics in place", "let an actor own the module"
        )
    if name.startswith("embedding") and kwargs.get("max_norm") is not None:
        return Unsupported("with max_norm= writes to its weight", "let an actor own the embedding")
    return None


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple | list) else (index,)
    return any(
        isinstance(part, TracedTensor) and part.dtype in (torch.bool, torch.uint8) for part in parts
    )


def _is_device(argument: Any) -> bool:
    if isinstance(argument, str):
        return not argument.startswith("torch.")
    return isinstance(argument, torch.device)


def _updates_statistics(call: TorchCall) -> bool:
    """True if a normalisation gets running statistics, and is in training mode."""
    args, kwargs = call.args, call.kwargs
    statistics = (*args[1:5], kwargs.get("running_mean"), kwargs.get("running_var"))
    training = kwargs.get("training", kwargs.get("use_input_stats"))
    if training is None:
        training = len(args) > 5 and args[5]
    return bool(training) and any(isinstance(value, TracedTensor) for value in statistics[:2])
