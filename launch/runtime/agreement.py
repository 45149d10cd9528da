"""Check that ranks agree on a step before they trace it, and before they compile it."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import numpy as np
import torch

from ...backends.agreement.digests import digest
from ...backends.agreement.gather import ADVICE, ComparedText, agree
from ...backends.base import World
from ...backends.errors import PlanMismatch
from ...ir.location import Location
from ...ir.ops import Constant
from ...ir.text.printer import without_locations
from ...ir.types import Place, format_ranks
from ...tracer.method.binding import definition
from ...tracer.record.session.inputs import InputError, InputSpec, name_parts
from ...tracer.record.step import describe_inputs
from ...tracer.record.trace import Trace
from ...tracer.values.specs import Leaf, ObjectSpec, Static, TensorSpec, show_type
from .runtime import tell

_TYPES: Final = (
    "Every rank must call the same steps in the same order, with arguments of the same types: look "
    "for a last batch that is smaller on one rank (drop_last=True), for a dtype that one rank "
    "alone has, or for a call that depends on the rank"
)
_PLAIN: Final = (int, float, complex, bool, bytes, type(None), slice, range)
_TORCH: Final = (torch.dtype, torch.Size, torch.layout, torch.memory_format, np.generic)
_DEVICE: Final = re.compile(r"(cpu|cuda|npu|meta|xpu|hpu|mps)(:\d+)?")
_SHOWN: Final = 8
"""The most elements of a tensor that are shown where ranks differ."""


@dataclass(frozen=True)
class TraceRequest:
    """A step that is about to be traced.

    Attributes:
        name: of the step.
        fn: its Python function.
        inputs, outputs: as `cg.trace` takes them.
        optimistic, remat: as `trace_step` takes them.
        fused: whether its backwards are for fused kernels.
        limits: the limits of what its forwards save, by derivative; None: none are asked for.
    """

    name: str
    fn: Callable[..., Any]
    inputs: Place | None
    outputs: Place | None
    optimistic: bool
    remat: frozenset[str]
    fused: bool
    limits: Mapping[str, int] | None = None

    def check(self, world: World, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Return if all ranks are about to trace this step for such arguments; collective.

        Raises:
            PlanMismatch: they are not; all ranks raise it, and can go on.
            InputError: the step cannot take the arguments of this rank.
        """
        if world.is_virtual:
            return
        refusal: InputError | None = None
        arguments: dict[str, ComparedText] = {}
        doing = f"step '{self.name}'"
        try:
            place = Place(tuple(range(world.size)))
            spec = describe_inputs(self.fn, args, kwargs, self.name, place, host_only=False)
            loc = definition(self.fn)
            arguments, doing = _arguments(spec, loc), call_text(spec, loc)
        except InputError as error:
            refusal = error
        refusal_text = "nothing" if refusal is None else str(refusal)
        parts = {
            "step": ComparedText("the step is", self._text()),
            "refusal": ComparedText("what forbids its arguments is", refusal_text),
            **arguments,
        }
        tell(world, f"the trace of {doing}")
        try:
            agree(world, "the ranks trace a step differently", parts, _TYPES)
        except PlanMismatch:
            if refusal is None:
                raise
        finally:
            tell(world, "")
        if refusal is not None:
            raise refusal

    def _text(self) -> str:
        loc = definition(self.fn)
        line = "" if loc is None else f", which line {loc.line} of {_file(loc)} defines"
        places = f"inputs {_ranks(self.inputs)}, outputs {_ranks(self.outputs)}"
        mode = "optimistically, " if self.optimistic else ""
        if self.remat:
            mode += f"recomputing {', '.join(sorted(self.remat))}, "
        mode += "for fused kernels, " if self.fused else ""
        if self.limits is not None:
            listed = ", ".join(f"@{name} {limit}" for name, limit in sorted(self.limits.items()))
            mode += f"saving at most [{listed}] bytes, "
        grad = "on" if torch.is_grad_enabled() else "off"
        return f"{self.name}({_parameters(self.fn)}){line} ({mode}{places}, gradients {grad})"


def check_compilation(
    world: World,
    step: str,
    traces: Sequence[Trace],
    texts: Sequence[str],
    options: Mapping[str, object],
) -> None:
    """Return if all ranks are about to compile the same; collective.

    Ranks compare the text of the traces, the numbers that torch functions are given, the tensors
    that the step makes from nothing, the structure of its results, and the options
    of `compile`.

    Args:
        world: all ranks.
        step: its name.
        traces: of the step.
        texts: of their modules, with locations, which ranks do not compare.
        options: those arguments of `compile` that must be equal, by name.

    Raises:
        PlanMismatch: they are not; all ranks raise it, and can go on.
    """
    if world.is_virtual:
        return
    parts = {
        option: ComparedText(f"{option} in compile() is", text_of(value))
        for option, value in options.items()
    }
    for number, (trace, text) in enumerate(zip(traces, texts, strict=True)):
        parts |= _beside(trace, number)
        called = f"{without_locations(text)}\n"
        parts[f"{number} trace"] = ComparedText("in what it calls", called)
        parts[f"{number} results"] = ComparedText("what it returns is", _results(trace))
    agree(world, f"the ranks have traced step {step} differently", parts, ADVICE)


def check_fuse(world: World, step: str, fuse: str | None) -> None:
    """Return if all ranks compile a step with one compiler of graphs, or with none; collective.

    Raises:
        PlanMismatch: they do not; all ranks raise it, and can go on.
    """
    parts = {"fuse": ComparedText("fuse in compile() is", text_of(fuse))}
    agree(world, f"the ranks compile step {step} differently", parts, ADVICE)


def check_memory(world: World, step: str, limit: object) -> None:
    """Return if all ranks compile a step with one limit of memory; collective.

    Raises:
        PlanMismatch: they do not; all ranks raise it, and can go on.
    """
    parts = {"memory": ComparedText("memory in compile() is", text_of(limit))}
    agree(world, f"the ranks compile step {step} differently", parts, ADVICE)


def call_text(spec: InputSpec, loc: Location | None) -> str:
    """Describe a step and the arguments that it is called with, in words."""
    location = "" if loc is None else f" ({loc.file}:{loc.line})"
    texts = map(_argument, spec.tree.leaves)
    arguments = ", ".join(f"{name}: {text}" for name, text in zip(spec.names, texts, strict=True))
    listing = arguments if len(arguments) <= 400 else f"{arguments[:397]}..."
    return f"step '{spec.step}'{location} for {listing or 'no arguments'}"


def text_of(value: Any) -> str:
    """Describe the part of a static value that must be equal on all ranks; devices may differ."""
    kind = type(value).__qualname__
    if isinstance(value, torch.device) or (isinstance(value, str) and _DEVICE.fullmatch(value)):
        return "a device"
    if isinstance(value, enum.Enum):
        return f"{kind}.{value.name}"
    if type(value) in _PLAIN or isinstance(value, (str, *_TORCH)):
        return repr(value)
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (tuple, list)):
        return f"{kind}({', '.join(map(text_of, value))})"
    if isinstance(value, frozenset):
        return f"{kind}({', '.join(sorted(map(text_of, value)))})"
    if is_dataclass(value):
        field_texts = (
            f"{field.name}={text_of(getattr(value, field.name, None))}" for field in fields(value)
        )
        return f"{kind}({', '.join(field_texts)})"
    return f"of type {kind}"


def _parameters(fn: Callable[..., Any]) -> str:
    """The parameters of a step, with their defaults."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return "..."
    none = inspect.Parameter.empty
    return ", ".join(
        parameter.name
        if parameter.default is none
        else f"{parameter.name}={text_of(parameter.default)}"
        for parameter in parameters
    )


def _arguments(spec: InputSpec, loc: Location | None) -> dict[str, ComparedText]:
    location = "" if loc is None else f", defined at {loc.file}:{loc.line},"
    return {
        f"argument {name}": ComparedText(
            f"argument {name} of {spec.step}(){location} is", _argument(leaf)
        )
        for name, leaf in zip(spec.names, spec.tree.leaves, strict=True)
    }


def _argument(leaf: Leaf) -> str:
    match leaf:
        case TensorSpec(dtype, shape, requires_grad):
            return show_type(dtype, shape) + (" with a gradient" if requires_grad else "")
        case ObjectSpec():
            return "a Python object"
        case Static(value):
            return text_of(value)


def _beside(trace: Trace, number: int) -> dict[str, ComparedText]:
    """The facts that all ranks must share and that the text of a trace does not say."""
    parts = {}
    for call in trace.plain_arguments:
        words = f"{call.function}, called at {call.loc}, is given"
        parts[f"{number} {call.function}"] = ComparedText(words, ", ".join(call.values))
    for op in trace.module.program.ops:
        if isinstance(op, Constant) and op.ref is not None:
            words = f"the constant made at {op.loc} is"
            parts[f"{number} {op.ref.name}"] = ComparedText(
                words, _content(trace.constants[op.ref.name])
            )
    return parts


def _results(trace: Trace) -> str:
    """Describe where in the results of a step its values are, and what else it returns."""
    tree = trace.outputs.tree
    leaves = zip(name_parts(tree.spec), tree.leaves, strict=True)
    return ", ".join(f"{name or 'result'}: {_argument(leaf)}" for name, leaf in leaves) or "nothing"


def _content(tensor: torch.Tensor) -> str:
    if tensor.numel() <= _SHOWN:
        return f"{tensor.dtype} {tensor.tolist()}"
    return f"{show_type(tensor.dtype, tensor.shape)} of digest {digest(tensor):08x}"


def _ranks(place: Place | None) -> str:
    return "everywhere" if place is None else f"on ranks {format_ranks(place.ranks)}"


def _file(loc: Location) -> str:
    """The file's name without its folder, which may differ between machines."""
    return re.split(r"[/\\]", loc.file)[-1]
