"""Look up compilers that make fused kernels of whole graphs.

TorchInductor is reached by its public entry `torch._inductor.compile`, which takes a graph and
needs no dynamo. Compiled code takes the tensors of the graph's placeholders in a list, and empties
the list, so that each tensor is freed after its last use. That holds for graphs in a `GmWrapper`,
which is private to torch; dynamo and compiled autograd use it as well.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .few_queries import loop_over_few
from .split import CompiledGraphs, Compute, compile_in_parts, fake_like

OPTIONS = {
    "fallback_random": True,  # operators that draw numbers draw the same ones as without fusion
    "triton.cudagraphs": False,  # a program's segments are captured, with these kernels in them
    "max_autotune": False,
    "compile_threads": 1,  # no processes beside those of MPI
}
"""The options of TorchInductor."""

WORKERS = 8
"""The most processes of a rank that compile kernels of its GPU by Triton, one at a time each."""


class FuseError(RuntimeError):
    """A compiler that a step asks for is not there, or lacks something."""

    __module__ = "cg"  # the public name, which tracebacks show


def check_name(name: object) -> None:
    """Refuse a name that no compiler has.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in FUSERS:
        known = ", ".join(f"'{compiler}'" for compiler in sorted(FUSERS))
        raise ValueError(f"fuse={name!r}: there is no such compiler; choose from {known}, or None")


def fuser(name: str) -> Callable[[fx.GraphModule, Sequence[Tensor]], Compute]:
    """The compiler of a name, which compiles equal graphs once.

    Raises:
        ValueError: there is none of that name.
        FuseError: this installation of torch does not have it.
    """
    check_name(name)
    return FUSERS[name]()


def _inductor() -> Callable[[fx.GraphModule, Sequence[Tensor]], Compute]:
    try:
        # It takes seconds to import, and most programs do not need it. Symbolic shapes bring sympy,
        # which makes 0.4 s of the time that a process takes to import cg.
        inductor = importlib.import_module("torch._inductor")
        shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        exceptions = importlib.import_module("torch._inductor.exc")
        importlib.import_module("torch._inductor.compile_fx")
        workers: Any = importlib.import_module("torch._inductor.async_compile").AsyncCompile
        config: Any = importlib.import_module("torch._inductor.config")
        wrapper: Any = importlib.import_module("torch._dynamo.utils").GmWrapper
        compile_: Any = inductor.compile
    except (ImportError, AttributeError) as error:
        raise FuseError(
            f"fuse='inductor' needs TorchInductor, which torch {torch.__version__} does not offer "
            f"here: {error}. Install a torch that has it, such as 2.11 or 2.13, or leave fuse out"
        ) from error
    missing = getattr(exceptions, "InvalidCxxCompiler", ())

    def whole(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Compute:
        compute = compile_(wrapper(graph, _as_given), inputs, _options(inputs))
        return _as_compiled(compute, inputs)

    compiled = CompiledGraphs(whole)

    def run(module: fx.GraphModule, examples: Sequence[Tensor]) -> Compute:
        mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=shapes.ShapeEnv(), static_shapes=True
        )
        fakes = [fake_like(x, mode) for x in examples]
        loop_over_few(module.graph)
        module.recompile()
        with config.patch(_options(examples)):
            workers.wakeup()  # they import torch while graphs are made ready for them
        try:
            with torch.no_grad(), _on_devices(examples):
                return compile_in_parts(module, fakes, mode, compiled)
        except Exception as error:
            if any(isinstance(cause, missing) for cause in _causes(error)):
                raise FuseError(
                    "fuse='inductor' needs a C++ compiler for functions on the host, and finds "
                    "none: install g++, name one by the variable CXX, or leave fuse out"
                ) from error
            raise

    return run


FUSERS = {"inductor": _inductor}


def _options(examples: Sequence[Tensor]) -> dict[str, Any]:
    """The options for a graph, whose processes that compile are one for each core on GPUs.

    On hosts the compiler is g++, a process of its own already. With one, nothing is started.
    """
    if not any(example.is_cuda for example in examples):
        return OPTIONS
    return OPTIONS | {"compile_threads": min(WORKERS, len(os.sched_getaffinity(0)))}


def _as_given(values: list[Tensor]) -> list[Tensor]:
    """The arguments of a graph, which are those of its wrapper."""
    return values


def _as_compiled(compute: Compute, examples: Sequence[Tensor]) -> Compute:
    """Let compiled code take tensors of other strides than it was compiled for."""
    layouts = [x.stride() for x in examples]

    def run(values: list[Tensor]) -> Sequence[Tensor]:
        if [value.stride() for value in values] != layouts:  # almost never
            for index, strides in enumerate(layouts):  # a name for a value would hold it
                values[index] = _with_strides(values[index], strides)
        return compute(values)

    return run


def _with_strides(tensor: Tensor, target_strides: tuple[int, ...]) -> Tensor:
    """The tensor with these strides; those of dimensions with one element do not count."""
    dimensions = zip(tensor.shape, tensor.stride(), target_strides, strict=True)
    if all(stride == target for size, stride, target in dimensions if size > 1):
        return tensor
    copy = torch.empty_strided(
        tensor.shape, target_strides, dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


@contextmanager
def _on_devices(examples: Sequence[Tensor]) -> Iterator[None]:
    """Let a compiler try kernels out: on the examples' device, which a new thread has not yet.

    Random generators are restored after the `with` block.
    """
    devices = sorted({x.device.index or 0 for x in examples if x.device.type == "cuda"})
    on_device = torch.cuda.device(devices[0]) if devices else nullcontext()
    with on_device, torch.random.fork_rng(devices):
        yield


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it stems from."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        cause = pending.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        pending += [cause.__cause__, cause.__context__, getattr(cause, "inner_exception", None)]
