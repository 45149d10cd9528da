"""Make the functions of a call from its joint graph: declarations, bodies, derivatives.

The way is one for all calls. A joint graph is cut into sections, and each section becomes a
function, with its effect on the actor. Ranks that compute all of a call each run one graph for a
section (`rank_functions.py`); ranks of a mesh that hold pieces lay the graph out first, and run a
program of parts and transfers for a section (`mesh_functions.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

from ...ir.attributes import Effect, Shares
from ...ir.ops.module import Vjp
from ..errors import TraceError
from ..graph.autodiff.partition import AnySection, Sections
from ..graph.autodiff.recomputation import Recomputation, Within
from ..graph.codegen.version_counters import CHANGE_AFTER, changed_between
from ..method.guards.guard import build_guard
from ..method.joint_graph import Joint
from ..method.operator_text import operator_text
from ..values.actor_state import StateTensor
from ..values.gradient_buckets import GradientLayout
from ..values.heap.gradient_hooks import post_accumulate_hooks
from ..values.interface import (
    MethodTarget,
    Target,
    TracedCall,
    TracedFunction,
    TracedPart,
    TracedVjp,
    Write,
)
from ..values.operators import storage_key
from ..values.sharing import shares_of
from .effects import Effects, memory_of, replaced_state, written_state
from .float8_weights import Float8Weights


@dataclass(frozen=True)
class CallFunctions(ABC, Generic[AnySection]):
    """Makes the functions of one call.

    Attributes:
        target: the method or torch function that is called.
        call: the call, with its arguments and state.
        joint: the joint graph of the call.
        effects: the known effects of the step's functions.
        weights: the weights that are prepared for the joint graph; None: there are none.
    """

    target: Target
    call: TracedCall
    joint: Joint
    effects: Effects
    weights: Float8Weights | None

    @abstractmethod
    def forward(self) -> AnySection:
        """The forward alone, without a derivative."""

    @abstractmethod
    def sections(
        self, volatile: frozenset[int], recomputation: Recomputation
    ) -> Sections[AnySection]:
        """The forward, the backward and its halves; takes the arguments of `recomputed`."""

    @abstractmethod
    def part(self, section: AnySection, name: str, effect: Effect, shares: Shares) -> TracedPart:
        """The function of a section.

        Args:
            section: the section.
            name: the function's name.
            effect: its effect on the actor.
            shares: its effects on actors that share the actor's state.
        """

    @abstractmethod
    def gradients(self, backward: AnySection) -> Mapping[str, GradientLayout]:
        """For an actor on a mesh, the layouts of the gradients that a backward adds, by path."""

    @abstractmethod
    def noticing(
        self, derivative: TracedVjp, backward: AnySection, writes: Sequence[Write]
    ) -> TracedVjp:
        """The derivative, which notices when it runs if calls have changed what it reads.

        Args:
            derivative: the derivative.
            backward: its backward.
            writes: calls between forward and backward of which nobody knows what they change.
        """

    def function(self, name: str) -> TracedFunction:
        """Make the function, without a derivative.

        Raises:
            TraceError: it uses state that carries gradient history, or `forward` raises.
        """
        target, call, joint = self.target, self.call, self.joint
        section = self.forward()
        reads = held(section.reads)
        self._refuse_history(reads)
        part = self._forward(section, name)
        guard = None
        if isinstance(target, MethodTarget):
            who = type(target.instance).__qualname__
            guard = build_guard(call, joint.reads, reads, who, target.method)
        changed = memory_of((*written_state(joint), *replaced_state(joint)))
        return TracedFunction(
            part.declaration,
            joint.results,
            joint.references,
            part.body,
            guard,
            views=joint.views,
            program=part.program,
            called=part.called,
            reaching=joint.reaching,
            operators=partial(operator_text, joint),
            refers=_paths(joint.tensors[index] for index in joint.referred),
            changes=_paths(t for t in joint.tensors if changed and _memory([t]) & changed),
        )

    def derivative(
        self, name: str, between: Sequence[Write], recomputation: Recomputation
    ) -> TracedVjp:
        """Make the forward, the backward and its halves.

        Args:
            name: the name of the vjp.
            between: the writes to the actor between the forward and the backward.
            recomputation: the part of the forward that the backward computes again.

        Raises:
            TraceError: as in `function`; or a write in between changes what the backward reads.
        """
        joint = self.joint
        volatile = self.effects.volatile(joint, between)
        sections = self.sections(volatile, recomputation)
        self._refuse_history(held(sections.forward.reads))
        self._refuse_written(held(sections.backward.reads), between)
        forward = self._forward(sections.forward, f"{name}.forward")
        backward = self._backward(sections.backward, f"{name}.backward")
        vjp = Vjp(
            name,
            forward.declaration.name,
            backward.declaration.name,
            joint.wanted_outputs,
            joint.wanted_inputs,
            kept=sections.kept,
        )
        halves: tuple[TracedPart, ...] = ()
        if sections.weight is not None:
            vjp = replace(vjp, weight=backward.declaration.name)
            if sections.input is not None:
                early = self._backward(sections.input, f"{name}.input")
                late = self._backward(sections.weight, f"{name}.weight")
                halves = early, late
                vjp = replace(vjp, input=early.declaration.name, weight=late.declaration.name)
        gradients = self.gradients(sections.backward)
        graded = sections.backward.graded
        hooked = tuple(state.path for state in graded if post_accumulate_hooks(state.tensor))
        operators = partial(operator_text, joint)
        tradeoff = (
            recomputation.tradeoff(joint, volatile) if isinstance(recomputation, Within) else None
        )
        derivative = TracedVjp(
            vjp, forward, backward, halves, gradients, hooked, operators, tradeoff
        )
        unknown = self.effects.unknown(between)
        if unknown and sections.backward.reads:
            return self.noticing(derivative, sections.backward, unknown)
        return derivative

    def _forward(self, section: AnySection, name: str) -> TracedPart:
        effect = self.effects.of_forward(self.joint, section.reads, name)
        reads = _memory(section.reads)
        changed = memory_of((*written_state(self.joint), *replaced_state(self.joint)))
        self._note(reads, changed, name)
        shares = shares_of(self.target.shared, effect, reads, changed)
        return self.part(section, name, effect, shares)

    def _backward(self, section: AnySection, name: str) -> TracedPart:
        effect = self.effects.of_backward(self.joint, held(section.reads), section.graded)
        reads, graded = _memory(section.reads), _memory(section.graded)
        self._note(reads, graded, name)
        shares = shares_of(self.target.shared, effect, (), reads | graded)
        return self.part(section, name, effect, shares)

    def _note(
        self, reads: Collection[int | None], changed: Collection[int | None], name: str
    ) -> None:
        if self.target.use is not None:
            self.target.use.note(reads, changed, name)

    def _refuse_history(self, used: Iterable[StateTensor]) -> None:
        """Refuse state that carries gradient history from outside of the step."""
        for state in used:
            if state.tensor.requires_grad and not state.tensor.is_leaf:
                raise self.call.refusal(
                    f"it uses '{state.path}', which carries gradient history from outside the step",
                    "keep x.detach() in the attribute, or an nn.Parameter",
                )

    def _refuse_written(self, read: Sequence[StateTensor], between: Sequence[Write]) -> None:
        """Refuse a backward if a call in between writes to state that it reads."""
        for write in between:
            memory = self.effects.written_by(write)
            paths = [f"'{s.path}'" for s in read if storage_key(s.tensor) in memory]
            if paths:
                raise TraceError(
                    changed_between(self.call.shown, paths, [write]),
                    loc=self.call.loc,
                    remedy=CHANGE_AFTER,
                )


def held(state: Iterable[StateTensor]) -> tuple[StateTensor, ...]:
    """The tensors of the state that are read for some, each once."""
    return tuple(dict.fromkeys(source for tensor in state for source in tensor.held))


def _paths(state: Iterable[StateTensor]) -> frozenset[str]:
    """The paths of all attributes that hold tensors of the state."""
    return frozenset(slot.path for tensor in held(state) for slot in tensor.slots)


def _memory(state: Iterable[StateTensor]) -> set[int | None]:
    return memory_of(state_tensor.tensor for state_tensor in held(state))
