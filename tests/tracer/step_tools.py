"""A small world and a plain function tracer, to test the tracing of steps by themselves.

`EagerTracer` declares functions by running them under fake tensors, and its bodies run them
eagerly; what its forwards save is autograd's own graph, as an object. It knows nothing of
torch.fx, and stands for the definition that the real tracer is held against.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from cg.ir.attributes import Effect
from cg.ir.ops import Call
from cg.ir.ops.module import Function, FunctionKind, Vjp
from cg.ir.text.printer import format_op
from cg.ir.types import ObjectType, Place
from cg.tracer.errors import TraceError
from cg.tracer.method.joint import inputs_reached
from cg.tracer.record.actors.factory import ActorFactory
from cg.tracer.record.step import trace_step
from cg.tracer.record.trace import Trace
from cg.tracer.values.interface import (
    MethodTarget,
    TracedFunction,
    TracedPart,
    TracedVjp,
)
from cg.tracer.values.specs import ObjectSpec, Static, TensorSpec, Tree


class Solo:
    """A world of `size` ranks that one process plays."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.told: list[Any] = []

    def plays(self, rank: int) -> bool:
        return True

    def broadcast(self, value: Any, root: int) -> Any:
        self.told.append((root, value))
        return value

    def allgather(self, value: Any) -> list[Any]:
        return [value] * self.size


def has_effect(effect: Effect, kind: FunctionKind = FunctionKind.GRAPH) -> Callable[[Any], Any]:
    """Say what a method does to its actor; those that do not say only read."""

    def mark(method: Any) -> Any:
        method.effect, method.kind = effect, kind
        return method

    return mark


writes = has_effect(Effect.WRITE)
opaque = has_effect(Effect.WRITE, FunctionKind.OPAQUE)


class PlainStage(torch.nn.Module):
    """A linear layer of 4 features; `Bench.stages` makes actors of it and of its subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.linear(x)

    def weight(self) -> Any:
        return self.linear.weight

    @writes
    def update(self) -> None: ...

    @opaque
    def say(self, x: Any) -> Any:
        return Opaque()


class _Random(TorchDispatchMode):
    """Notices whether random numbers are drawn."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class EagerTracer:
    """A `FunctionTracer` that counts what it traces in `traced`."""

    def __init__(self) -> None:
        self.traced: list[str] = []

    def trace(self, target: Any, signature: Tree, name: str, loc: Any) -> TracedFunction:
        self.traced.append(name)
        call, effect, kind, actor = _described(target)
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        inputs = [_example(fakes, signature.leaves[i]) for i in signature.values]
        with fakes, _Random() as random:
            args, kwargs = signature.fill(inputs)
            leaves, spec = tree_flatten(call(*args, **kwargs))
        results = Tree(tuple(_spec(leaf) for leaf in leaves), spec)
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | Opaque)]
        declaration = Function(
            name,
            signature.types(),
            results.types(),
            kind=kind,
            effect=effect,
            actor=actor,
            random=random.drawn,
            aliases=_aliases(outputs, inputs),
            loc=loc,
        )
        state = tuple(i for i, x in enumerate(outputs) if getattr(x, "is_state", False))
        state += tuple(i for i, x in enumerate(outputs) if isinstance(x, torch.nn.Parameter))

        def body(*values: Any) -> Any:
            with torch.no_grad():
                return _run(call, signature, values) or (None,)

        reaching = inputs_reached(*(_as_tensors(values) for values in (outputs, inputs)))
        return TracedFunction(
            declaration, results, state, body, lambda: None, strict=body, reaching=reaching
        )

    def trace_vjp(
        self,
        target: Any,
        signature: Tree,
        name: str,
        grad_outputs: tuple[int, ...],
        grad_inputs: tuple[int, ...],
        loc: Any,
        between: Any = (),
    ) -> TracedVjp:
        self.traced.append(name)
        traced = EagerTracer().trace(target, signature, name, loc)
        call, _, _, actor = _described(target)
        primal = traced.declaration
        saved = ObjectType()
        module = getattr(target, "instance", torch.nn.Module())
        parameters = [p for p in module.parameters() if p.requires_grad]
        forward = Function(
            f"{name}.fwd",
            primal.inputs,
            (*primal.outputs, saved),
            effect=primal.effect,
            actor=actor,
            random=primal.random,
        )
        backward = Function(
            f"{name}.bwd",
            (saved, *(primal.outputs[i] for i in grad_outputs)),
            tuple(primal.inputs[i] for i in grad_inputs),
            effect=Effect.ACCUMULATE if actor else Effect.PURE,
            actor=actor,
        )

        def forward_body(*values: Any) -> Any:
            with torch.enable_grad():
                leaves = [_leaf(v, i in grad_inputs) for i, v in enumerate(values)]
                outputs = _run(call, signature, leaves)
            # Copies: the IR does not know that autograd's graph holds the results, too.
            plain = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in outputs]
            return [*plain, (leaves, outputs)]

        def backward_body(saved: Any, *cotangents: Any) -> Any:
            # May run again on the same saved values, where equal forwards have become one.
            leaves, outputs = saved
            wanted = [leaves[i] for i in grad_inputs] + parameters
            found = torch.autograd.grad(
                [outputs[i] for i in grad_outputs],
                wanted,
                cotangents,
                retain_graph=True,
                allow_unused=True,
            )
            for parameter, gradient in zip(parameters, found[len(grad_inputs) :], strict=True):
                if gradient is not None:
                    before = parameter.grad
                    parameter.grad = gradient.clone() if before is None else before + gradient
            return [gradient.clone() for gradient in found[: len(grad_inputs)]] or [None]

        vjp = Vjp(name, forward.name, backward.name, grad_outputs, grad_inputs)
        return TracedVjp(
            vjp, TracedPart(forward, forward_body), TracedPart(backward, backward_body)
        )


def _as_tensors(values: list[Any]) -> list[torch.Tensor]:
    return [x if isinstance(x, torch.Tensor) else torch.empty(()) for x in values]


class Opaque:
    """The fake result of an opaque method that would return an object."""


def _described(target: Any) -> tuple[Callable[..., Any], Effect, FunctionKind, str | None]:
    if not isinstance(target, MethodTarget):
        return target.callable, Effect.PURE, FunctionKind.GRAPH, None
    method = getattr(target.instance, target.method)
    effect = getattr(method, "effect", Effect.READ)
    return method, effect, getattr(method, "kind", FunctionKind.GRAPH), target.actor


def _example(fakes: FakeTensorMode, leaf: Any) -> Any:
    if isinstance(leaf, ObjectSpec):
        return Opaque()
    with fakes:
        made = torch.empty(leaf.shape, dtype=leaf.dtype)
    return made.requires_grad_(leaf.requires_grad)


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorSpec(leaf.dtype, tuple(leaf.shape), leaf.requires_grad)
    return ObjectSpec() if isinstance(leaf, Opaque) else Static(leaf)


def _aliases(outputs: list[Any], inputs: list[Any]) -> tuple[tuple[int, int], ...]:
    return tuple(
        (o, i)
        for o, output in enumerate(outputs)
        for i, input_ in enumerate(inputs)
        if isinstance(output, FakeTensor)
        and isinstance(input_, FakeTensor)
        and output.untyped_storage()._cdata == input_.untyped_storage()._cdata
    )


def _run(call: Callable[..., Any], signature: Tree, values: Any) -> list[Any]:
    args, kwargs = signature.fill(values)
    leaves = tree_flatten(call(*args, **kwargs))[0]
    return [x for x in leaves if isinstance(x, torch.Tensor | Real)]


class Real:
    """An object that a method of a test returns when it really runs."""


def _leaf(value: Any, needed: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(needed)


class Bench:
    """A world, the actors in it, and a way to trace."""

    def __init__(self, size: int = 2) -> None:
        self.peers = Solo(size)
        self.actor = ActorFactory(lambda: self.peers)
        self.tracer = EagerTracer()

    def stages(self, cls: type[torch.nn.Module], ranks: Iterable[int] = (0,)) -> list[Any]:
        """An actor on each rank, named `stage0` and so on whatever the class is called."""
        actor: Any = self.actor(type("Stage", (cls,), {}))
        return [actor.on(rank)() for rank in ranks]

    def trace(self, fn: Any, *args: Any, **kwargs: Any) -> Trace:
        return self.trace_at(fn, args, kwargs)

    def trace_at(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        inputs: Place | None = None,
        outputs: Place | None = None,
    ) -> Trace:
        return trace_step(
            fn,
            args,
            kwargs or {},
            peers=self.peers,
            inputs=inputs,
            outputs=outputs,
            name="step",
            tracer=self.tracer,
        )


def refusal(bench: Bench, fn: Any, *args: Any, **kwargs: Any) -> TraceError:
    """The error that tracing a step raises; it names a line of a test, and a remedy."""
    with pytest.raises(TraceError) as caught:
        bench.trace(fn, *args, **kwargs)
    error = caught.value
    assert error.loc is not None, "no line"
    assert "test_" in error.loc.file, error.loc.file
    assert error.remedy, "no remedy"
    return error


def calls(trace: Trace) -> list[str]:
    """The functions that a traced step calls, in order."""
    return [op.fn.name for op in trace.module.program.ops if isinstance(op, Call)]


def text(trace: Trace) -> list[str]:
    """The ops of a traced step, one line for each."""
    return [format_op(op) for op in trace.module.program.ops]


def line_of(error: TraceError) -> str:
    """The source line that an error names, as the user sees it."""
    assert error.loc is not None
    return linecache.getline(error.loc.file, error.loc.line).strip()
