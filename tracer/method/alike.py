"""Use the trace of one call for another call that is alike, such as one of the next equal layer.

The other call's Python runs on its own actor, but no operator runs. Each torch function returns the
fake that it returned in the first trace, as long as functions and arguments are the same
(`function_log.py`). So attributes, globals, variables of closures and the structure of modules
matter only where they change the graph, and nobody has to list them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_autocast_cache
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...ir.location import Location
from ..error_translation import call_user, current_location
from ..errors import TraceError, note_refusal, refusals_dropped
from ..torch_settings import settings_restored_on_failure
from ..values.actor_state import ActorState, StateTensor
from ..values.interface import TracedCall
from ..values.operators import storage_key
from ..values.specs import static_key
from .attention.varlen_calls import attention_compared
from .call_fakes import input_fakes, is_plain, state_fakes
from .float8.linear import in_float8
from .joint import Wanted, ends
from .joint_graph import Joint
from .purity.changes import Rebind, sort_changes
from .purity.dispatch_modes import FunctionGuard
from .purity.function_log import LogEntry, Rerun, Unlike
from .purity.randomness import random_state_watched
from .purity.scene import Scene
from .purity.watch import UsesGradients
from .reuse.blocks import Blocks, ModuleCalls, repeated_classes
from .reuse.templates import BlocksMisled
from .stored.plain_text import Damaged, Json, NotStorable
from .stored_traces import USES_GRADIENTS, TraceStore, joint_text, read_joint, trace_key
from .twice import refuse_hidden_state, settled

_MANY = 8
"""The most traces that are tried for a call, the latest first."""


class Traces:
    """The traces of a step's methods so far.

    Args:
        store: has the traces of earlier starts; None: there are none.

    Attributes:
        blocks: their modules that repeat.
        store: see above.
    """

    def __init__(self, store: TraceStore | None = None) -> None:
        self.blocks = Blocks()
        self._joints: dict[Hashable, list[tuple[Hashable, Joint]]] = {}
        self.store = store

    def find(self, call: TracedCall, wanted: Wanted | None) -> Joint | None:
        """Find the trace of a call that is alike, with this call's state; None if there is none.

        Raises:
            UsesGradients: the call works on gradients, as in an earlier start.
        """
        outline = _outline(call.state)
        known = self._joints.get(_kind(call, wanted), [])
        for entry in reversed(known[-_MANY:]):
            if entry[0] != outline:
                continue
            joint = _rerun(call, wanted, entry[1], self.blocks)
            if joint is not None:
                known.remove(entry)
                known.append(entry)
                return joint
        if self.store is None or self.store.is_empty:
            return None
        return self._find_stored(call, wanted, outline, self.store)

    def _find_stored(
        self, call: TracedCall, wanted: Wanted | None, outline: Hashable, store: TraceStore
    ) -> Joint | None:
        """Find the trace of an earlier start, which the call is like; None if there is none.

        Without a derivative, the call runs twice, as `refuse_hidden_state` has it.

        Raises:
            UsesGradients: it works on gradients, as in an earlier start.
        """
        try:
            key = trace_key(call, wanted, outline)
        except NotStorable:
            return None  # the reason is given where the trace would be kept
        for text in store.read(key):
            if text == USES_GRADIENTS:
                _refuse_work_on_gradients(call, store)
                continue
            try:
                again = partial(self._trace_again, call, wanted, store)
                stored = read_joint(text, call, wanted, again, partial(store.mend, call.shown))
            except Damaged as error:
                store.leave_out(call.shown, f"damaged: {error}")
                continue
            joint = _rerun(call, wanted, stored, self.blocks, relocates=True)
            if joint is not None and wanted is None:
                joint = _rerun(call, wanted, stored, self.blocks, relocates=True)
            if joint is not None:
                store.take(call.shown)
                self._joints.setdefault(_kind(call, wanted), []).append((outline, joint))
                return joint
            store.leave_out(call.shown, "it does not call the functions that were kept")
        return None

    def _trace_again(
        self, call: TracedCall, wanted: Wanted | None, store: TraceStore, error: Damaged
    ) -> Joint:
        """Trace a call that is like a kept one, whose graph turns out to be damaged."""
        store.leave_out(call.shown, f"damaged: {error}")
        return _settled(call, wanted, None)[1]

    def make(self, call: TracedCall, wanted: Wanted | None) -> tuple[TracedCall, Joint]:
        """Trace a call by `settled`, and check it by `refuse_hidden_state`.

        The first attempt uses blocks. If it fails after a module was compared with a block, the
        call is traced again without blocks, and that attempt says what is wrong.

        Returns:
            The call, on the actor after changes of a first call, and its trace.

        Raises:
            TraceError: it cannot be traced.
            UsesGradients: it works on gradients.
        """
        self.blocks.tried = False
        try:
            with refusals_dropped():
                return _settled(call, wanted, self.blocks)
        except UsesGradients:
            self._keep_refusal(call)
            raise
        except (TraceError, BlocksMisled) as error:
            if not self.blocks.tried and isinstance(error, TraceError):
                note_refusal(error)
                raise
        return _settled(call, wanted, None)

    def _keep_refusal(self, call: TracedCall) -> None:
        """Keep that a call works on gradients: the next start need not prepare a graph for it."""
        if self.store is not None:
            with suppress(NotStorable):
                self.store.keep(trace_key(call, None, _outline(call.state)), lambda: USES_GRADIENTS)

    def add(
        self,
        call: TracedCall,
        wanted: Wanted | None,
        joint: Joint,
        pieces: Callable[[Joint], Json],
    ) -> None:
        """Keep a trace if another call can be compared with it.

        Args:
            call: the call.
            wanted: the derivative that was traced as well, if any.
            joint: the trace.
            pieces: gives the JSON of what it was cut into, when that is done.
        """
        outline = _outline(call.state)
        can_be_compared = joint.functions.complete and not joint.initial
        if can_be_compared and outline is not None:
            self._joints.setdefault(_kind(call, wanted), []).append((outline, joint))
        if self.store is None:
            return
        try:
            if not can_be_compared:
                raise NotStorable("it calls what cannot be compared, or changes its actor")
            key = trace_key(call, wanted, outline)
        except NotStorable as reason:
            self.store.leave_out(call.shown, str(reason))
            return
        self.store.keep(key, lambda: joint_text(joint, pieces(joint)))


def _settled(
    call: TracedCall, derivative: Wanted | None, blocks: Blocks | None
) -> tuple[TracedCall, Joint]:
    call, joint = settled(call, derivative, blocks)
    if derivative is None:
        refuse_hidden_state(call, joint, blocks)
    return call, joint


def _kind(call: TracedCall, derivative: Wanted | None) -> Hashable:
    """The key of calls that may be alike; calls with different keys are never compared."""
    types = tuple(map(str, call.signature.leaves))
    is_tracked = torch.is_grad_enabled()
    place = str(call.device), call.is_of_mesh
    return (call.shown, call.signature.spec, types, *place, derivative, is_tracked)


def _rerun(
    call: TracedCall,
    derivative: Wanted | None,
    joint: Joint,
    blocks: Blocks,
    relocates: bool = False,
) -> Joint | None:
    """The trace with the state of a call, if the call is like it; None if not.

    Args:
        call: the call.
        derivative: the derivative that is wanted, if any.
        joint: the trace.
        blocks: known blocks.
        relocates: whether the lines of the trace are those of another process's source.
    """
    if joint.log is None:
        blocks = Blocks()  # its log has the functions of blocks in place of the blocks
    try:
        with (
            refusals_dropped(),
            random_state_watched(call),
            settings_restored_on_failure(),
        ):
            return _AlikeCall(call, joint, blocks, relocates).run(derivative)
    except (Unlike, BlocksMisled, UsesGradients, Exception):
        return None  # the trace that follows says what is wrong, if anything is


def _refuse_work_on_gradients(call: TracedCall, store: TraceStore) -> None:
    """Run the beginning of a call that has worked on gradients in an earlier start.

    Raises:
        UsesGradients: it does so again, before it uses a torch function. A trace would come to the
            same line.
    """
    try:
        with (
            refusals_dropped(),
            random_state_watched(call),
            settings_restored_on_failure(),
        ):
            _Beginning(call).run()
    except UsesGradients:
        store.take(call.shown)
        raise
    except (Unlike, Exception):
        pass  # the trace that follows says what is wrong, if anything is
    store.leave_out(call.shown, "it worked on gradients, and does not begin with that")


class _Beginning(Scene):
    """One call, which ends where it uses a torch function."""

    def __init__(self, call: TracedCall) -> None:
        super().__init__(call, FakeTensorMode(allow_non_fake_inputs=False, shape_env=None))
        self.state = state_fakes(call, self.mode)
        self.inputs = input_fakes(call, self.mode, frozenset())

    def run(self) -> None:
        """Run the call.

        Raises:
            UsesGradients: it works on gradients.
            Unlike: it uses a torch function.
        """
        attention = attention_compared(self.call.shown)
        with self.fakes_in_place(compares=True), attention, disable_autocast_cache():
            rerun = Rerun((), lambda _: None)
            with _NoOperators(), FunctionGuard(self.call.shown, rerun.run):
                args, kwargs = self.call.signature.fill(self.inputs)
                call_user(self.call.function, *args, **kwargs)
            raise Unlike


class _AlikeCall(Scene):
    """One call, which runs on the fakes of another call's trace."""

    def __init__(self, call: TracedCall, joint: Joint, blocks: Blocks, relocates: bool) -> None:
        functions = joint.functions
        super().__init__(call, functions.mode)
        self.state = functions.state
        self.inputs = functions.inputs
        self._joint = joint
        self._blocks = blocks
        self._relocates = relocates
        self._lines: dict[Location, Location] = {}

    def run(self, wanted: Wanted | None) -> Joint:
        """Run the call, and return the trace with this call's state.

        Raises:
            Unlike: the call is not like the traced one. Any other error means the same.
        """
        attention = attention_compared(self.call.shown)
        with self.fakes_in_place(compares=True), attention, disable_autocast_cache():
            rebinds = self._go_along(wanted)
        if self.initial:
            raise Unlike
        joint = _moved(self._joint, self.call.state, rebinds, self.watch.reads)
        return joint.relocated(self._lines.get) if self._relocates else joint

    def _see(self, entry: LogEntry) -> None:
        """Note where the line of a function is now."""
        if self._relocates and entry.line is not None and entry.line not in self._lines:
            line, _ = current_location()
            if line is not None:
                self._lines[entry.line] = line

    def _run_kernel(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator of another library on fakes, though no other operator runs."""
        with _disable_current_modes(), self.mode:
            return function(*args, **kwargs)

    def _go_along(self, derivative: Wanted | None) -> list[Rebind]:
        with torch.set_grad_enabled(derivative is not None or torch.is_grad_enabled()):
            refusing = _NoOperators()
            with refusing:
                log = self._joint.functions
                rerun = Rerun(log.entries, log.number_of, see=self._see, kernel=self._run_kernel)
                calls = ModuleCalls(
                    self._blocks,
                    repeated_classes(self.call.state),
                    log,
                    rerun.run,
                    self.watch,
                    derivative is not None,
                    None,
                    self.has_side_effects,
                )
                run = in_float8(calls.run, self.float8_weights(), self.call.float8)
                with FunctionGuard(self.call.shown, run), calls.intercepted():
                    args, kwargs = self.call.signature.fill(self.inputs)
                    result = call_user(self.call.function, *args, **kwargs)
            leaves, spec = pytree.tree_flatten(result)
            outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            changes = self.attributes.changes()
            rebinds, self.initial = sort_changes(
                changes, self.call, self.state, outputs, self.inputs, self.watch
            )
            rerun.finish()
            if refusing.met or log.form_of_end(ends(spec, leaves, rebinds)) != log.ends:
                raise Unlike
        return rebinds


class _NoOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators: only functions that are not in the log can call one now."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met = False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        self.met = True
        raise Unlike


def _moved(
    joint: Joint, state: ActorState, rebinds: Sequence[Rebind], reads: dict[int, set[str]]
) -> Joint:
    """The trace with the state of another actor, whose tensors correspond in order."""
    index = {id(tensor): i for i, tensor in enumerate(joint.tensors)}
    tensors = tuple(state.tensors)
    graded = tuple(tensors[index[id(tensor)]] for tensor in joint.graded)
    return replace(joint, tensors=tensors, rebound=tuple(rebinds), graded=graded, reads=reads)


def _outline(state: ActorState) -> Hashable | None:
    """The key of actors whose tensors can stand for each other, one by one.

    Such tensors are held by the same attributes, look the same to torch, and share memory with
    corresponding tensors. The key is None if a tensor cannot be compared.
    """
    holders: dict[int, int] = {}
    memory: dict[int | None, int] = {}
    attached: dict[int, int] = {}
    tensor_outlines: list[Hashable] = []
    for tensor in state.tensors:
        slots = []
        for slot in tensor.slots:
            holder = holders.setdefault(id(slot.holder), len(holders))
            slots.append((holder, type(slot.key), slot.key, slot.within))
        attributes = _attributes(tensor, attached)
        if tensor.tensor.layout is not torch.strided or attributes is None:
            return None
        shared = memory.setdefault(storage_key(tensor.tensor), len(memory))
        tensor_outlines.append((tuple(slots), shared, attributes, *_metadata(tensor)))
    return tuple(tensor_outlines)


def _metadata(tensor: StateTensor) -> tuple[Hashable, ...]:
    """The properties of a tensor that a trace sees, which sees a piece as its logical tensor."""
    value = tensor.tensor
    if tensor.shape != tuple(value.shape) or is_plain(tensor):
        seen = (value.requires_grad, value.is_leaf, bool(value._backward_hooks))
        return (type(value), value.dtype, tensor.device, tensor.shape, *seen)
    strides = (value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    flags = (value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg(), value._is_view())
    is_hooked = bool(value._backward_hooks)
    return (
        *(type(value), value.dtype, tensor.device, tuple(value.shape), tensor.shape, strides),
        *(flags, is_hooked, value.is_inference()),
    )


def _attributes(tensor: StateTensor, attached: dict[int, int]) -> Hashable | None:
    """The attributes that somebody has set on a tensor; None if they cannot be compared.

    Of a tensor that is one, a trace can use nothing but what it is like: operators of a trace take
    no tensors from elsewhere.

    Args:
        attached: a number for each tensor that is an attribute; new ones are added.
    """
    keys: list[Hashable] = []
    for name, value in vars(tensor.tensor).items():
        if isinstance(value, torch.Tensor):
            number = attached.setdefault(id(value), len(attached))
            kind = (type(value), value.dtype, str(value.layout), str(value.device))
            keys.append((name, number, *kind, tuple(value.shape), value.requires_grad))
        elif isinstance(value, (bool, int, float, str, type(None))):
            keys.append((name, static_key(value)))
        else:
            return None
    return tuple(keys)
