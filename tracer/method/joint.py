"""Run a call under make_fx: one graph of its forward and, on request, its backward.

The state of the actor is replaced by fake tensors for the time of the trace, the call runs on
fake inputs, and `torch.autograd.grad` inside the same trace records the backward. Of modules that a
method repeats, `reuse/templates.py` records forward and backward once, and copies them for the
others. Afterwards the actor, its attributes and all generators are as they were before, whatever
happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node, _engine_run_backward, get_gradient_edge
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import disable_autocast_cache, make_fx

from ...ir.location import Location
from ..error_translation import call_user, translate
from ..errors import TraceError, refusals_raised
from ..function_runs import Run, run_plainly
from ..lazy import Lazy
from ..values.interface import TracedCall, result_spec
from ..values.operators import storage_key
from ..values.specs import Static, Tree
from .attention.varlen_calls import attention_traced
from .binding import explain_misfit
from .call_fakes import input_fakes, state_fakes
from .float8.linear import in_float8
from .float8.shared_casts import share_casts
from .joint_graph import Joint, JointNodes
from .node_memory import memory_of, sharing, state_references
from .purity.changes import Rebind, sort_changes
from .purity.dispatch_modes import FunctionGuard, OpRecorder, nodes_so_far, nothing_to_check
from .purity.function_log import FunctionLog
from .purity.op_log import OpLog
from .purity.randomness import random_state_watched
from .purity.scene import Scene
from .purity.simplify import simplify
from .purity.watch import UsesGradients
from .reuse.blocks import Blocks, ModuleCalls, repeated_classes
from .rows.iterations import SINGLE, Iterations
from .rows.row_programs import RowPrograms
from .rows.row_values import Rows, RowValue, refusal
from .saving_marks import pass_marks


@dataclass(frozen=True)
class Wanted:
    """The derivative to trace: indices of value outputs and of value inputs."""

    outputs: tuple[int, ...]
    inputs: tuple[int, ...]


def trace_call(
    call: TracedCall, wanted: Wanted | None = None, blocks: Blocks | None = None
) -> Joint:
    """Trace a call, with its backward if `wanted` is given.

    Args:
        call: the call.
        wanted: the derivative to trace as well, if any.
        blocks: blocks that its modules may be copies of.

    Raises:
        TraceError: it cannot be traced.
        UsesGradients: it works on gradients, so it must be called and not traced.
        BlocksMisled: it must be traced without blocks.
    """
    try:
        with random_state_watched(call), refusals_raised():
            trace = _JointTrace(call, wanted, blocks)
            joint = trace.trace()
        if trace.iterations.loops and not joint.initial:
            _compare_iterations(call, trace)
        return joint
    except UsesGradients:
        if wanted is None:
            raise
        raise _works_on_gradients(call) from None
    except Exception as error:
        raise _in_words(error, call) from error


def run_call(call: TracedCall, blocks: Blocks | None = None) -> OpLog:
    """Run a call on fakes, as `trace_call` does, and return the log of its operators.

    Raises:
        TraceError: it cannot be traced.
        UsesGradients: it works on gradients.
    """
    try:
        with random_state_watched(call):
            return _JointTrace(call, None, blocks).run()
    except Exception as error:
        raise _in_words(error, call) from error


def _compare_iterations(call: TracedCall, trace: _JointTrace) -> None:
    """Check that nothing outside of loops over classes depends on which of them occur.

    Raises:
        TraceError: it does.
    """
    whole = trace
    for only in SINGLE:
        with random_state_watched(call):
            alone = _JointTrace(call, None, None, only)
            alone.run()
            different = _difference(whole, alone)
            if different and whole is trace:  # some code does other things without a graph
                whole = _JointTrace(call, None, None)
                whole.run()
                different = _difference(whole, alone)
        if different:
            words, loc = different
            raise call.refusal(
                f"what it does outside of a loop over classes depends on which of them occur, by a "
                f"variable, a list or an object that iterations change: {words}",
                "let iterations do nothing but add rows to tensors by index_add_, and compute what "
                "else is needed for all classes by torch functions, as mask.sum((1, 2)) > 0 does",
                loc,
            )


def _difference(whole: _JointTrace, alone: _JointTrace) -> tuple[str, Location | None] | None:
    difference = whole.iterations.difference(alone.iterations)
    return difference or whole.recorder.log.difference(alone.recorder.log)


def _gradients(
    outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], cotangents: list[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """The results of `torch.autograd.grad`, with modes of torch functions in force inside.

    `torch.autograd.grad` is a torch function itself, so modes are off while it runs. A checkpoint
    computes its forward again there, and its functions have to be those of the forward.
    """
    return _engine_run_backward(
        tuple(outputs), tuple(cotangents), False, False, tuple(sources), True, accumulate_grad=False
    )


def _in_words(error: Exception, call: TracedCall) -> TraceError:
    unfit = explain_misfit(error, call)
    return unfit or translate(error, call.shown, call.error_loc)


def _works_on_gradients(call: TracedCall) -> TraceError:
    return TraceError(
        f"{call.shown} cannot be differentiated: it works on gradients (Tensor.grad, .backward()) "
        "in its forward or backward",
        loc=call.error_loc,
        remedy="compute gradients inside a differentiated method with torch.autograd.grad",
    )


class _JointTrace(Scene):
    """One trace."""

    def __init__(
        self,
        call: TracedCall,
        wanted: Wanted | None,
        blocks: Blocks | None,
        only: int | None = None,
    ) -> None:
        super().__init__(call, FakeTensorMode(allow_non_fake_inputs=False, shape_env=None))
        self.wanted = wanted
        self.state = state_fakes(call, self.mode)
        differentiated = frozenset() if wanted is None else frozenset(wanted.inputs)
        self.inputs = input_fakes(call, self.mode, differentiated)
        values = call.values()
        named = {storage_key(t): name for t, (_, name) in zip(self.inputs, values, strict=True)}
        state = frozenset(map(storage_key, self.state))
        log = OpLog([*self.state, *self.inputs])
        self.functions = FunctionLog(self.mode, self.state, self.inputs)
        self.recorder = OpRecorder(call.shown, named, state, log, self.functions)
        self.iterations = Iterations(log, only)
        self.calls = ModuleCalls(
            blocks or Blocks(),
            repeated_classes(call.state) if blocks is not None else frozenset(),
            self.functions,
            self.functions.run,
            self.watch,
            wanted is not None,
            self.recorder,
            self.has_side_effects,
        )
        self.recorder.check = self.calls.check_operator
        self.results: Tree | None = None
        self.forward: frozenset[str] = frozenset()
        self.cotangents: list[str] = []
        self.rebinds: list[Rebind] = []
        self.counts: list[int] = []
        self.graded: list[int] = []
        self.dependent: list[int] = []
        self.reaching: tuple[tuple[int, ...], ...] = ()

    def trace(self) -> Joint:
        # Nobody calls the module that comes out, so its code is not generated.
        with self._scene(), _use_lazy_graph_module(True):
            owner = make_fx(lambda s, i: self._traced(s, i))(self.state, self.inputs)
        return self._joint(owner)

    def run(self) -> OpLog:
        """Run the call again without a graph, in a third of the time."""
        with self._scene(), disable_autocast_cache():
            self._traced(self.state, self.inputs)
        for change in self.initial:
            raise change.refusal()
        return self.recorder.log

    @contextmanager
    def _scene(self) -> Iterator[None]:
        compares = self.calls.compares
        with self.fakes_in_place(compares), attention_traced(self.call.shown):
            yield

    def _traced(
        self, state: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run what make_fx traces.

        Returns:
            Outputs, rebound state, gradients, and results of operators that write in secret.
        """
        with torch.set_grad_enabled(self.wanted is not None or torch.is_grad_enabled()):
            rows = RowPrograms(self.iterations, self.recorder.constants.has)
            guard = FunctionGuard(self.call.shown, self._in_float8(self.calls.run), rows)
            with self.recorder, guard, self.calls.intercepted():
                self.functions.begin()
                args, kwargs = self.call.signature.fill(inputs)
                result = call_user(self.call.function, *args, **kwargs)
            outputs = self._finish_forward(result)
            grads = self._backward(outputs) if self.wanted is not None else []
        self.recorder.check = nothing_to_check  # a cycle would outlive the trace
        rebound = [r.value for r in self.rebinds]
        self.counts = [len(outputs), len(rebound), len(grads)]
        return [*outputs, *rebound, *grads, *self.recorder.secret]

    def _in_float8(self, run: Run) -> Run:
        """Run functions, and the linear layers that the plan names in float8."""
        return in_float8(run, self.float8_weights(), self.call.float8)

    def _finish_forward(self, result: Any) -> list[torch.Tensor]:
        leaves, spec = pytree.tree_flatten(result)
        rows = next((leaf for leaf in leaves if isinstance(leaf, RowValue)), None)
        if rows is not None:
            unknown = refusal("the method returns them")
            loc = rows.universe.loc if isinstance(rows, Rows) else None
            raise self.call.refusal(unknown.reason, unknown.remedy, loc)
        self.results = Tree(tuple(result_spec(leaf, self.call) for leaf in leaves), spec)
        outputs = [leaves[i] for i in self.results.values]
        self.rebinds, self.initial = sort_changes(
            self.attributes.changes(), self.call, self.state, outputs, self.inputs, self.watch
        )
        self._check_state_metadata()
        self.calls.check_end((*leaves, *(r.value for r in self.rebinds)))
        if self.iterations.loops:
            self.functions.complete = False  # it does not have what a loop has left out
        self.functions.note_end(ends(spec, leaves, self.rebinds))
        self.forward = frozenset(node.name for node in nodes_so_far() or ())
        self._note_results(outputs)
        self.reaching = inputs_reached(outputs, self.inputs)
        return outputs

    def _note_results(self, outputs: Sequence[torch.Tensor]) -> None:
        assert self.results is not None
        log, tree = self.recorder.log, self.results
        log.note_result("", (str(tree.spec), outputs))
        for leaf in tree.leaves:
            if isinstance(leaf, Static):
                log.note_result("", leaf.value)
        for rebind in self.rebinds:
            log.note_result(f"in '{rebind.slot.path}'", rebind.value)

    def _check_state_metadata(self) -> None:
        for tensor, fake in zip(self.call.state.tensors, self.state, strict=True):
            real = tensor.tensor
            had_grad = real.requires_grad and real.is_leaf
            if tuple(fake.shape) != tensor.shape or fake.requires_grad < had_grad:
                raise self.call.refusal(
                    f"it changes shape or requires_grad of '{tensor.path}', which would happen "
                    "once, while tracing",
                    "do so before the step is traced, or mark the method with @cg.opaque",
                )
            if fake._backward_hooks or fake._post_accumulate_grad_hooks:
                raise self.call.refusal(
                    f"it puts a hook on the gradient of '{tensor.path}', which would be one more "
                    "in each call",
                    "give the parameter to a torch.autograd.Function whose backward does its "
                    "work, and compute with its result",
                )
            if fake.requires_grad > had_grad:
                raise self.call.refusal(
                    f"it writes to '{tensor.path}' what a gradient could flow back through, from "
                    "later steps into this one",
                    "write x.detach() instead of x",
                )

    def _backward(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        assert self.wanted is not None
        chosen = [outputs[i] for i in self.wanted.outputs]
        for index, output in zip(self.wanted.outputs, chosen, strict=True):
            if not output.requires_grad:
                raise TraceError(
                    f"{self.call.shown}: output {index} does not depend on anything that requires "
                    "a gradient, so it has no derivative",
                    loc=self.call.loc,
                    remedy="leave it out of the loss, or let an input or parameter require one",
                )
        trained = [i for i, t in enumerate(self.call.state.tensors) if t.is_trained]
        sources = [self.inputs[i] for i in self.wanted.inputs]
        sources += [self.state[i] for i in trained]
        if not sources or not chosen:
            return []
        cotangents = [self._cotangent(output) for output in chosen]
        self.recorder.backward = True
        held = [fake.grad for fake in self.state]
        rows = RowPrograms(is_constant=self.recorder.constants.has)
        guard = FunctionGuard(self.call.shown, self._in_float8(run_plainly), rows)
        with self.recorder, guard:
            gradients = call_user(_gradients, chosen, sources, cotangents)
        if any(fake.grad is not grad for fake, grad in zip(self.state, held, strict=True)):
            raise _works_on_gradients(self.call)
        many = len(self.wanted.inputs)
        pairs = zip(self.wanted.inputs, gradients[:many], strict=True)
        self.dependent = [i for i, g in pairs if g is not None]
        self.graded = [i for i, g in zip(trained, gradients[many:], strict=True) if g is not None]
        return [g for g in gradients if g is not None]

    def _cotangent(self, output: torch.Tensor) -> torch.Tensor:
        fake = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        self.recorder.inputs[storage_key(fake)] = "the gradient that it is given"
        self.cotangents.append(next(iter(reversed(nodes_so_far()))).name)
        return fake

    def _joint(self, owner: fx.GraphModule) -> Joint:
        assert self.results is not None
        pass_marks(simplify(owner.graph), self.recorder.locations)
        share_casts(owner.graph, self.forward)
        nodes = {node.name: node for node in owner.graph.nodes}
        placeholders = [n for n in owner.graph.nodes if n.op == "placeholder"]
        returned = iter(_returned(owner.graph))
        tensors = self.call.state.tensors
        state = tuple(placeholders[: len(tensors)])
        inputs = tuple(placeholders[len(tensors) :])
        outputs = tuple(next(returned) for _ in range(self.counts[0]))
        rebinds = tuple(next(returned) for _ in self.rebinds)
        input_grads = tuple(next(returned) for _ in self.dependent)
        joint_nodes = JointNodes(
            owner=owner,
            graph=owner.graph,
            state=state,
            inputs=inputs,
            cotangents=tuple(nodes[name] for name in self.cotangents),
            outputs=outputs,
            rebinds=rebinds,
            input_grads=input_grads,
            state_grads=tuple(next(returned) for _ in self.graded),
            forward=self.forward,
            locations=self.recorder.locations,
        )
        return Joint(
            nodes=Lazy.known(joint_nodes),
            tensors=tuple(tensors),
            rebound=tuple(self.rebinds),
            graded=tuple(tensors[i] for i in self.graded),
            wanted_outputs=self.wanted.outputs if self.wanted is not None else (),
            wanted_inputs=tuple(self.dependent),
            reaching=self.reaching,
            references=state_references(outputs, set(map(memory_of, state))),
            referred=state_references(state, set(map(memory_of, outputs)) - {None}),
            views=sharing(outputs, inputs),
            results=self.results,
            draws=self.recorder.draws,
            log=self.recorder.log,
            functions=self.functions,
            written=self._indices(self.recorder.written),
            backward_written=self._indices(self.recorder.backward_writes),
            reads=self.watch.reads,
            initial=tuple(self.initial),
        )

    def _indices(self, keys: set[int | None]) -> frozenset[int]:
        return frozenset(i for i, t in enumerate(self.state) if storage_key(t) in keys)


def ends(spec: pytree.TreeSpec, leaves: Sequence[Any], rebinds: Sequence[Rebind]) -> Any:
    """The results and the rebound tensors of a forward, for a function log to compare."""
    replaced = [(r.slot.path, r.value, r.shared) for r in rebinds]
    return (spec, leaves, replaced)


def inputs_reached(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[tuple[int, ...], ...]:
    """For each output, the indices of the inputs to which autograd's graph leads from it.

    A `torch.autograd.Function` may send no gradient to an input. Only the backward shows that.
    """
    numbers = {
        get_gradient_edge(tensor).node: i for i, tensor in enumerate(inputs) if tensor.requires_grad
    }
    return tuple(
        _reached_from(get_gradient_edge(tensor).node, numbers)
        if numbers and tensor.requires_grad
        else ()
        for tensor in outputs
    )


def _reached_from(start: Node, numbers: Mapping[Node, int]) -> tuple[int, ...]:
    seen, pending = {start}, [start]
    while pending:
        node = pending.pop()
        if node not in numbers:
            new = {following for following, _ in node.next_functions if following is not None}
            new -= seen
            seen |= new
            pending += new
    return tuple(sorted(numbers[node] for node in seen & numbers.keys()))


def _returned(graph: fx.Graph) -> list[fx.Node]:
    (values,) = graph.output_node().args
    return list(pytree.tree_leaves(values, is_leaf=lambda v: isinstance(v, fx.Node)))
