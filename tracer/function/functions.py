"""Trace the functions that a step calls, to declarations and bodies.

A method is traced to a graph whose inputs include the actor's state. Some methods are called
without a trace: those that are marked opaque, take an object, or work on gradients (an optimizer,
`.grad`, `.backward()`). A derivative is traced as one joint graph, then split into forward and
backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ...ir.attributes import Effect, Shares
from ...ir.location import Location
from ...ir.ops.module import Function, FunctionKind, Vjp
from ...ir.types import TensorType
from ..errors import TraceError
from ..graph.autodiff.recomputation import refuse_twice, what_again
from ..graph.autodiff.split_backward import SplitBackward
from ..graph.autodiff.subgraphs import Subgraph, fake_of, sharing, state_references
from ..graph.autodiff.subgraphs import memory_of as memory_of_node
from ..graph.codegen.version_counters import CHANGE_AFTER, changed_between, with_versions
from ..method.alike import Traces
from ..method.binding import check_arguments, definition, innermost
from ..method.guards.guard import build_guard
from ..method.joint import Joint, Wanted
from ..method.purity.watch import UsesGradients
from ..method.twice import settled
from ..values.actor_state import ActorState, StateTensor, collect
from ..values.gradient_buckets import Buckets, whole_gradients
from ..values.group import Group
from ..values.interface import (
    MethodTarget,
    RankBodies,
    Target,
    TracedCall,
    TracedFunction,
    TracedPart,
    TracedVjp,
    Write,
    given_objects,
)
from ..values.opaque import OpaqueMark, opaque_mark
from ..values.operators import storage_key
from ..values.sharing import shares_of
from ..values.specs import ObjectSpec, Tree, ir_dtype
from .effects import Effects, memory_of, replaced_state, written_state
from .graph_pieces import GraphPieces
from .group_methods import GroupMethods
from .groups.pieces_only import OperatorWatch
from .opaque_calls import calls_of_ranks, opaque_body, opaque_results, refuse_tensors, strictly


class Functions:
    """Traces the functions that a step calls; implements `FunctionTracer`.

    Each step has its own instance, which compares the effects of the step's functions.

    Args:
        traces: traces of methods from an earlier trace of the same step, to be reused.
        fused: whether fused kernels run the backwards, and compute cheap results again.

    Attributes:
        device: the device of values; None: that of an actor's first tensor, or else the CPU.
    """

    def __init__(
        self, device: torch.device | None = None, traces: Traces | None = None, fused: bool = False
    ) -> None:
        self.device = device
        self._fused = fused
        self._effects = Effects()
        self._traces = Traces() if traces is None else traces
        self._pieces = GraphPieces()
        self._buckets: dict[str, Buckets] = {}

    def trace(
        self, target: Target, signature: Tree, name: str, loc: Location | None
    ) -> TracedFunction:
        """Trace a call of `target` whose arguments are the pytree `(args, kwargs)` of `signature`.

        Gradients are tracked if `torch.is_grad_enabled()` is true when this is called.

        Raises:
            TraceError: the arguments do not fit the method, or the function cannot be traced. The
                actor's state is unchanged then.
        """
        call = _call_of(target, signature, loc)
        if isinstance(target, MethodTarget):
            check_arguments(call)
            if inspect.iscoroutinefunction(innermost(call.function)):
                raise TraceError(
                    f"{call.what} is an async method, and nobody would await what it returns",
                    loc=loc,
                    remedy="make it a plain method, which may run what it awaits by asyncio.run",
                )
        mark = opaque_mark(call.function)
        takes_objects = any(isinstance(leaf, ObjectSpec) for leaf in signature.leaves)
        if mark is None and isinstance(target, MethodTarget) and takes_objects:
            mark = OpaqueMark()  # nothing can be traced of what is known only at run time
        if mark is not None:
            return self._opaque(target, call, mark, name)
        try:
            call, joint = self._joint(target, self._with_state(target, call))
        except UsesGradients:
            return self._opaque(target, call, OpaqueMark(), name)
        if target.group is not None and target.group.has_layouts:
            return self._trace_group(target, target.group, call, joint, name)
        piece = self._pieces.forward(joint)
        _refuse_history(call, piece.state)
        declaration = self._declare(target, call, joint, piece, name)
        guard = None
        if isinstance(target, MethodTarget):
            who = type(target.instance).__qualname__
            guard = build_guard(call, joint.reads, piece.state, who, target.method)
        return TracedFunction(
            declaration,
            joint.results,
            piece.state_outputs,
            self._pieces.bodies(piece, name, target.group),
            guard,
            views=sharing(joint.outputs, joint.inputs),
            reaching=joint.reaching,
        )

    def _trace_group(
        self, target: Target, group: Group, call: TracedCall, joint: Joint, name: str
    ) -> TracedFunction:
        """Trace a function that the ranks of a group call together, each on its pieces."""
        methods = self._methods(target, group, call)
        function = methods.forward(joint, name)
        guard = None
        if isinstance(target, MethodTarget):
            who, state = type(target.instance).__qualname__, methods.read(joint)
            guard = build_guard(call, joint.reads, state, who, target.method)
        memory = {memory_of_node(node) for node, _ in joint.state}
        return TracedFunction(
            function.declaration,
            joint.results,
            state_references(joint.outputs, memory),
            None,
            guard,
            views=sharing(joint.outputs, joint.inputs),
            program=function.program,
            parts=function.parts,
            reaching=joint.reaching,
        )

    def trace_vjp(
        self,
        target: Target,
        signature: Tree,
        name: str,
        grad_outputs: tuple[int, ...],
        grad_inputs: tuple[int, ...],
        loc: Location | None,
        between: Sequence[Write] = (),
    ) -> TracedVjp:
        """Trace forward and backward of a call as one joint graph, and split it.

        The vjp is called `name`, its functions `name.forward`, `name.backward`, `name.input` and
        `name.weight`. The vjp leaves out inputs of `grad_inputs` that the outputs do not depend
        on, and does not touch the `.grad` of parameters that they do not depend on.

        Where a call in between replaces state, the backward gets the state that the forward saw.
        If an opaque call in between changes state that the backward needs, the backward raises.

        Raises:
            TraceError: as in `trace`; or the function is opaque, its backward would draw random
                numbers again, a parameter has gradient hooks, the backward cannot compute a
                call with `remat` again, or a traced call in between writes to state that the
                backward needs.
        """
        call = self._with_state(target, _call_of(target, signature, loc))
        if opaque_mark(call.function) is not None:
            raise _no_derivative(call)
        _refuse_hooks(call)
        call, joint = self._joint(target, call, Wanted(grad_outputs, grad_inputs))
        if target.remat:
            refuse_twice(call, joint)
        effects = self._effects_on(target)
        recompute = what_again(target, self._fused, between)
        if target.group is not None and target.group.has_layouts:
            methods = self._methods(target, target.group, call)
            return methods.derivative(joint, name, between, recompute)
        parts = self._pieces.split(joint, effects.volatile(joint, between), recompute)
        _refuse_history(call, parts.forward.state)
        _refuse_written(call, parts.backward, effects, between)
        forward = self._declare(target, call, joint, parts.forward, f"{name}.forward", parts.saved)
        backward = Function(
            f"{name}.backward",
            inputs=tuple(map(_type, (*parts.saved, *joint.cotangents))),
            outputs=tuple(forward.inputs[i] for i in joint.wanted_inputs),
            effect=_of_backward(effects, joint, parts.backward),
            actor=target.actor,
            aliases=parts.backward.aliases,
            loc=forward.loc,
            flops=self._pieces.flops(parts.backward),
        )
        backward = _with_shares(backward, target, parts.backward)
        vjp = Vjp(name, forward.name, backward.name, grad_outputs, joint.wanted_inputs)
        halves: tuple[TracedPart, ...] = ()
        if parts.halves is not None:
            vjp, halves = self._halves(target, vjp, parts.halves, backward, joint, effects)
        traced = TracedVjp(
            vjp,
            self._part(target, forward, parts.forward),
            self._part(target, backward, parts.backward),
            halves,
            gradients={}
            if target.group is None
            else whole_gradients(gradient.tensor for gradient in parts.backward.gradients),
        )
        unknown = effects.unknown(between)
        if unknown and parts.backward.state:
            return with_versions(traced, parts.backward.state, len(parts.saved), call.what, unknown)
        return traced

    def _methods(self, target: Target, group: Group, call: TracedCall) -> GroupMethods:
        buckets = Buckets()
        if group.actor is not None:
            new = Buckets(group.actor.bucket_bytes)
            buckets = self._buckets.setdefault(group.actor.name, new)
        return GroupMethods(target, group, call, self._effects_on(target), buckets)

    def _joint(
        self, target: Target, call: TracedCall, derivative: Wanted | None = None
    ) -> tuple[TracedCall, Joint]:
        """Trace a call, or reuse the trace of an equal call.

        Raises:
            TraceError, UsesGradients: as in `settled` and `refuse_hidden_state`.
        """
        if not isinstance(target, MethodTarget):
            return settled(call, derivative)
        cached_joint = self._traces.find(call, derivative)
        if cached_joint is not None:
            return call, cached_joint
        call, joint = self._traces.make(call, derivative)
        self._traces.add(call, derivative, joint)
        return call, joint

    def _with_state(self, target: Target, call: TracedCall) -> TracedCall:
        """The call, with the current state of its actor."""
        objects = given_objects(call.signature) if isinstance(target, MethodTarget) else ()
        state = (
            collect(target.instance, objects) if isinstance(target, MethodTarget) else call.state
        )
        if target.group is not None and target.group.actor is not None:
            actor = target.group.actor
            state.tensors = actor.whole(state.tensors, actor.first)
        device = self.device
        if device is None:
            device = state.tensors[0].tensor.device if state.tensors else call.device
        return replace(call, state=state, given=objects, device=device)

    def _declare(
        self,
        target: Target,
        call: TracedCall,
        joint: Joint,
        piece: Subgraph,
        name: str,
        saved: Sequence[torch.fx.Node] = (),
    ) -> Function:
        effect = self._effects_on(target).of_forward(joint, piece.state, name)
        return Function(
            name,
            inputs=call.signature.types(),
            outputs=joint.results.types() + tuple(map(_type, saved)),
            effect=effect,
            shares=_shares_of_forward(target, joint, piece, effect, name),
            actor=target.actor,
            random=joint.recorder.draws,
            aliases=piece.aliases,
            loc=call.declared_at,
            flops=self._pieces.flops(piece),
        )

    def _halves(
        self,
        target: Target,
        vjp: Vjp,
        halves: SplitBackward,
        backward: Function,
        joint: Joint,
        effects: Effects,
    ) -> tuple[Vjp, tuple[TracedPart, ...]]:
        """The vjp that names the halves of its backward, and the functions of these halves."""
        if halves.input is None:
            return replace(vjp, weight=backward.name, kept=halves.kept), ()
        left_types = tuple(map(_type, halves.left))
        input_ = replace(
            backward,
            name=f"{vjp.name}.input",
            outputs=backward.outputs + left_types,
            effect=_of_backward(effects, joint, halves.input),
            aliases=halves.input.aliases,
            flops=self._pieces.flops(halves.input),
        )
        weight = replace(
            backward,
            name=f"{vjp.name}.weight",
            inputs=tuple(backward.inputs[i] for i in halves.kept) + left_types,
            outputs=(),
            effect=_of_backward(effects, joint, halves.weight),
            aliases=(),
            flops=self._pieces.flops(halves.weight),
        )
        pieces = ((input_, halves.input), (weight, halves.weight))
        parts = tuple(
            self._part(target, _with_shares(f, target, piece), piece) for f, piece in pieces
        )
        return replace(vjp, input=input_.name, weight=weight.name, kept=halves.kept), parts

    def _part(self, target: Target, function: Function, piece: Subgraph) -> TracedPart:
        return TracedPart(function, self._pieces.bodies(piece, function.name, target.group))

    def _effects_on(self, target: Target) -> Effects:
        """The known effects on actors; a torch function has no actor, and gets an empty object."""
        return self._effects if isinstance(target, MethodTarget) else Effects()

    def _opaque(
        self, target: Target, call: TracedCall, mark: OpaqueMark, name: str
    ) -> TracedFunction:
        """A call without a trace: the method may do anything, so the call counts as a write."""
        if target.use is not None:
            target.use.is_opaque = True
        call = replace(call, device=self.device or call.device)
        instance = target.instance if isinstance(target, MethodTarget) else None
        results = opaque_results(mark, instance, call)
        refuse_tensors(target, call, results)
        declaration = Function(
            name,
            inputs=call.signature.types(),
            outputs=results.types(),
            kind=FunctionKind.OPAQUE,
            effect=Effect.WRITE,
            actor=target.actor,
            loc=call.declared_at,
            shares=Shares.of({shared.other: Effect.WRITE for shared in target.shared}),
        )
        calls = calls_of_ranks(target, call)
        body = RankBodies.of({rank: opaque_body(c, mark, results) for rank, c in calls.items()})
        strict = RankBodies.of(
            {rank: opaque_body(strictly(c), mark, results) for rank, c in calls.items()}
        )
        if target.group is not None:
            watch = OperatorWatch(target.group, name)
            body, strict = watch.around(body), watch.around(strict)
        return TracedFunction(declaration, results, (), body, None, strict)


def _call_of(target: Target, signature: Tree, loc: Location | None) -> TracedCall:
    """The call of a target, without the actor's state so far."""
    function = target.callable
    if not callable(function):
        who, _, method = target.name.rpartition(".")
        raise TraceError(
            f"{who} has no method '{method}'",
            loc=loc,
            remedy="call a method that the actor's class defines",
        )
    home = definition(function) if isinstance(target, MethodTarget) else None
    host = torch.device("cpu")
    return TracedCall(target.name, function, ActorState(), signature, host, loc, home)


def _of_backward(effects: Effects, joint: Joint, piece: Subgraph) -> Effect:
    graded = [gradient.tensor for gradient in piece.gradients]
    return effects.of_backward(joint, piece.state, graded)


def _type(node: torch.fx.Node) -> TensorType:
    fake = fake_of(node)
    return TensorType(ir_dtype(fake.dtype), tuple(fake.shape))


def _shares_of_forward(
    target: Target, joint: Joint, piece: Subgraph, effect: Effect, name: str
) -> Shares:
    reads = _memory(piece.state)
    changed = memory_of((*written_state(joint), *replaced_state(joint)))
    if target.use is not None:
        target.use.note(reads, changed, name)
    return shares_of(target.shared, effect, reads, changed)


def _with_shares(backward: Function, target: Target, piece: Subgraph) -> Function:
    """Declare the effects of a backward, or of one of its halves, on state that actors share."""
    reads = _memory(piece.state)
    graded = _memory(gradient.tensor for gradient in piece.gradients)
    if target.use is not None:
        target.use.note(reads, graded, backward.name)
    shares = shares_of(target.shared, backward.effect, (), reads | graded)
    return replace(backward, shares=shares)


def _memory(state: Iterable[StateTensor]) -> set[int | None]:
    return memory_of(state_tensor.tensor for state_tensor in state)


def _no_derivative(call: TracedCall) -> TraceError:
    """The error for a derivative of an opaque function."""
    return TraceError(
        f"{call.what} is opaque, so it has no derivative, but a loss depends on its result",
        loc=call.loc,
        remedy="remove @cg.opaque, so that the method is traced; or detach its result",
    )


def _refuse_history(call: TracedCall, used: Iterable[StateTensor]) -> None:
    """Refuse state that carries gradient history from outside of the step."""
    for state in used:
        if state.tensor.requires_grad and not state.tensor.is_leaf:
            raise call.refusal(
                f"it uses '{state.path}', which carries gradient history from outside the step",
                "keep x.detach() in the attribute, or an nn.Parameter",
            )


def _refuse_written(
    call: TracedCall, backward: Subgraph, effects: Effects, between: Sequence[Write]
) -> None:
    """Refuse a backward if a call in between writes to state that it reads."""
    for write in between:
        memory = effects.written_by(write)
        paths = [f"'{s.path}'" for s in backward.state if storage_key(s.tensor) in memory]
        if paths:
            raise TraceError(
                changed_between(call.what, paths, [write]), loc=call.loc, remedy=CHANGE_AFTER
            )


def _refuse_hooks(call: TracedCall) -> None:
    """Refuse parameters with gradient hooks."""
    for state in call.state.tensors:
        tensor = state.tensor
        if state.is_trained and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
            raise TraceError(
                f"{call.what} cannot be differentiated: '{state.path}' has a gradient hook, which "
                "would see the gradient of each call instead of their sum",
                loc=call.error_loc,
                remedy="do the hook's work in the method that uses the optimizer",
            )
