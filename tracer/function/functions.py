"""Trace the functions that a step calls, to declarations and bodies.

A method is traced to a graph whose inputs include the actor's state. Some methods are called
without a trace: those that are marked opaque, take an object, or work on gradients (an optimizer,
`.grad`, `.backward()`). A derivative is traced as one joint graph, then split into forward and
backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...ir.attributes import Effect, Shares
from ...ir.location import Location
from ...ir.ops.module import Function, FunctionKind
from ..errors import TraceError
from ..graph.autodiff.recomputation import refuse_twice, what_again
from ..graph.autodiff.saved_tensors import SavingLimits
from ..method.alike import Traces
from ..method.binding import check_arguments, definition, innermost
from ..method.function_traces import trace_function
from ..method.joint import Wanted
from ..method.joint_graph import Joint
from ..method.purity.watch import UsesGradients
from ..values.actor_state import ActorState, collect
from ..values.gradient_buckets import Buckets
from ..values.heap.gradient_hooks import has_refused_hooks, post_accumulate_hooks, trainers_of
from ..values.interface import (
    MethodTarget,
    RankBodies,
    Target,
    TracedCall,
    TracedFunction,
    TracedVjp,
    Write,
    given_objects,
)
from ..values.opaque import OpaqueMark, opaque_mark
from ..values.specs import ObjectSpec, Tree
from .effects import Effects
from .float8_weights import Float8Weights, PreparingGraphs, with_one_scale
from .groups.pieces_only import OperatorWatch
from .mesh_functions import MeshFunctions
from .opaque_calls import (
    calls_of_ranks,
    opaque_body,
    opaque_results,
    refuse_tensors,
    strictly,
    with_counts_on_host,
)
from .rank_functions import RankFunctions
from .resting_calls import (
    brought_to_rest,
    host_state_of,
    note_used_on,
    parameters_at_rest,
    resting_bytes,
    resting_guard,
    single_rank,
)
from .step_pieces import StepPieces, TracedGraph, call_key


class Functions:
    """Traces the functions that a step calls; implements `FunctionTracer`.

    Each step has its own instance, which compares the effects of the step's functions.

    Args:
        traces: traces of methods from an earlier trace of the same step, to be reused.
        fused: whether fused kernels run the backwards, and compute cheap results again.
        limits: the limits of what forwards save for backwards; None: none, and none are asked for.
        pieces: graphs and pieces of earlier traces of the same step, to be reused: no actor has
            changed since. None: there are none.

    Attributes:
        device: the device of values; None: that of an actor's first tensor, or else the CPU.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        traces: Traces | None = None,
        fused: bool = False,
        limits: SavingLimits | None = None,
        pieces: StepPieces | None = None,
    ) -> None:
        self.device = device
        self._fused = fused
        self._limits = limits
        self._effects = Effects()
        self._traces = Traces() if traces is None else traces
        self._preparing = PreparingGraphs()
        self._pieces = StepPieces() if pieces is None else pieces
        self._known = None if pieces is None else pieces.calls
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
                    f"{call.shown} is an async method, and nobody would await what it returns",
                    loc=loc,
                    remedy="make it a plain method, which may run what it awaits by asyncio.run",
                )
        mark = opaque_mark(call.function)
        takes_objects = any(isinstance(leaf, ObjectSpec) for leaf in signature.leaves)
        if mark is None and isinstance(target, MethodTarget) and takes_objects:
            mark = OpaqueMark()  # nothing can be traced of what is known only at run time
        if mark is not None:
            return self._opaque(target, call, mark, name)
        key = call_key(target, call, name, None)
        if self._known is not None and key in self._known:
            graph = self._known[key]
        else:
            graph = self._without_derivative(target, call)
            self._keep(key, graph)
        if graph is None:
            return self._opaque(target, call, OpaqueMark(), name)
        call, joint = graph
        traced = self._functions_of(target, call, joint, ()).function(name)
        return replace(traced, guard=brought_to_rest(target, traced.guard))

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
            TraceError: as in `trace`; or the function is opaque; its backward would draw random
                numbers again; a parameter has gradient hooks that a step does not run, or whose
                optimizers no actor holds; the backward cannot compute a call with `remat` again; or
                a traced call in between writes to state that the backward needs.
        """
        call, wanted = _call_of(target, signature, loc), Wanted(grad_outputs, grad_inputs)
        key = call_key(target, call, name, wanted)
        graph = None if self._known is None else self._known.get(key)
        call = self._with_state(target, call) if graph is None else graph[0]
        if opaque_mark(call.function) is not None:
            raise _no_derivative(call)
        _refuse_hooks(target, call)
        if graph is None:
            graph = self._joint(target, call, wanted)
            self._keep(key, graph)
        call, joint = graph
        if target.remat:
            refuse_twice(call, joint)
        recompute = what_again(target, self._fused, between, self._limits, name)
        functions = self._functions_of(target, call, joint, between)
        return functions.derivative(name, between, recompute)

    def _without_derivative(self, target: Target, call: TracedCall) -> TracedGraph | None:
        """The graph of a call that is not differentiated; None if it works on gradients."""
        try:
            return self._joint(target, self._with_state(target, call))
        except UsesGradients:
            return None

    def _keep(self, key: Hashable, graph: TracedGraph | None) -> None:
        if self._known is not None:
            self._known[key] = graph

    def _functions_of(
        self, target: Target, call: TracedCall, joint: Joint, between: Sequence[Write]
    ) -> RankFunctions | MeshFunctions:
        # A torch function has no actor that others could change, so its effects are its own.
        effects = self._effects if isinstance(target, MethodTarget) else Effects()
        resting = parameters_at_rest(target)
        group = target.group
        if resting and group is None:
            group = single_rank(target, len(call.signature.values))
        is_cut = group is not None and (group.has_layouts or bool(resting))
        joint, weights = self._prepared(target, call, joint, is_cut or not between)
        if group is None or not is_cut:
            return RankFunctions(target, call, joint, effects, weights, self._pieces.whole)
        buckets = Buckets()
        if group.actor is not None:
            new = Buckets(group.actor.bucket_bytes)
            buckets = self._buckets.setdefault(group.actor.name, new)
        pieces = self._pieces.laid_out
        return MeshFunctions(target, call, joint, effects, weights, group, buckets, resting, pieces)

    def _prepared(
        self, target: Target, call: TracedCall, joint: Joint, is_allowed: bool
    ) -> tuple[Joint, Float8Weights | None]:
        """The joint graph, and the weights that are prepared for it.

        Where calls between a forward and its backward may change weights, each forward casts them.
        """
        if not isinstance(target, MethodTarget) or not is_allowed:
            return joint, None
        indices = with_one_scale(target.float8, call.state.tensors)
        if not indices:
            return joint, None
        graph = self._pieces.prepared(joint, indices)
        if graph is None:
            return joint, None
        group = None if target.group is None else target.group.actor
        tensors = call.state.tensors
        by_rank = (
            {0: tensors} if group is None else {r: group.state(r).tensors for r in group.instances}
        )
        paths = tuple(tensors[index].path for index in indices)
        weights = Float8Weights(
            target.actor, paths, by_rank, group, call.declared_at, self._preparing
        )
        return graph.applied(joint), weights

    def _joint(
        self, target: Target, call: TracedCall, derivative: Wanted | None = None
    ) -> tuple[TracedCall, Joint]:
        """Trace a call, or reuse the trace of an equal call.

        Raises:
            TraceError, UsesGradients: as in `settled` and `refuse_hidden_state`.
        """
        if not isinstance(target, MethodTarget):
            return trace_function(call, derivative, self._traces.store, self._pieces.whole.json)
        cached_joint = self._traces.find(call, derivative)
        if cached_joint is not None:
            return call, cached_joint
        call, joint = self._traces.make(call, derivative)
        self._traces.add(call, derivative, joint, self._pieces.whole.json)
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
        note_used_on(target, call, state)
        device = self.device
        if device is None:
            device = state.tensors[0].device if state.tensors else call.device
        return replace(call, state=state, argument_objects=objects, device=device)

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
            resting=resting_bytes(target, call),
        )
        calls = calls_of_ranks(target, call)
        if self.device is not None:
            calls = {rank: with_counts_on_host(c) for rank, c in calls.items()}
        body = RankBodies.of({rank: opaque_body(c, mark, results) for rank, c in calls.items()})
        strict = RankBodies.of(
            {rank: opaque_body(strictly(c), mark, results) for rank, c in calls.items()}
        )
        if target.group is not None:
            watch = OperatorWatch(target.group, name)
            body, strict = watch.around(body), watch.around(strict)
        state = host_state_of(target) if declaration.resting else {}
        guard = brought_to_rest(target, resting_guard(target))
        return TracedFunction(declaration, results, (), body, guard, strict, host_state=state)


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
    state, float8 = ActorState(), target.float8
    return TracedCall(
        target.name,
        function,
        state,
        signature,
        host,
        loc,
        home,
        float8=float8,
        is_of_mesh=target.group is not None,
    )


def _no_derivative(call: TracedCall) -> TraceError:
    """The error for a derivative of an opaque function."""
    return TraceError(
        f"{call.shown} is opaque, so it has no derivative, but a loss depends on its result",
        loc=call.loc,
        remedy="remove @cg.opaque, so that the method is traced; or detach its result",
    )


def _refuse_hooks(target: Target, call: TracedCall) -> None:
    """Refuse hooks of gradients, but for those behind the sum whose optimizers an actor holds.

    No checkpoint has other optimizers, and they are not undone with the actor. A parameter that
    actors share may have the hook of any of them.
    """
    hooks: list[tuple[str, Callable[..., Any]]] = []
    for state in call.state.tensors:
        if not state.is_trained:
            continue
        if has_refused_hooks(state.tensor):
            raise TraceError(
                f"{call.shown} cannot be differentiated: '{state.path}' has a gradient hook, which "
                "would see the gradient of each call instead of their sum",
                loc=call.error_loc,
                remedy="register it by register_post_accumulate_grad_hook, and let it work on "
                ".grad; or do its work in a method that the step calls behind cg.backward",
            )
        hooks += ((state.path, hook) for hook in post_accumulate_hooks(state.tensor))
    held = {id(trainer) for trainer in call.state.trainers}
    for trainer in trainers_of(hook for _, hook in hooks):
        if id(trainer) not in held and not any(share.has(trainer) for share in target.shared):
            path = next(path for path, hook in hooks if trainer in trainers_of([hook]))
            raise TraceError(
                f"{call.shown} cannot be differentiated: a hook of '{path}' uses "
                f"{type(trainer).__name__}, which the actor does not hold, so checkpoints "
                "would lack its state",
                loc=call.error_loc,
                remedy="keep it in an attribute of the actor: self.optimizers = [...], and "
                "let the hook use what is there",
            )
