"""Trace functions that the ranks of a group call together: lay out their graphs, and cut them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...ir.attributes import Effect
from ...ir.layout import Layout
from ...ir.ops.module import Vjp
from ...ir.ops.names import layer_of
from ..errors import TraceError
from ..graph.autodiff.recomputation import Recompute
from ..graph.autodiff.subgraphs import fake_of
from ..graph.layouts.cases import LayoutError
from ..graph.layouts.propagation.joints import propagate_joint
from ..graph.layouts.propagation.sections import Section, SectionCutter
from ..graph.layouts.versions import Version
from ..method.joint import Joint
from ..values.actor_state import StateTensor
from ..values.gradient_buckets import Buckets, GradientLayout, numel_at_rank
from ..values.group import Group
from ..values.interface import Target, TracedCall, TracedVjp, Write
from ..values.operators import storage_key
from .effects import Effects
from .group_functions import GroupFunction, SectionFunctions
from .groups.stored import Stored


@dataclass(frozen=True)
class GroupMethods:
    """Traces one call of a group.

    Attributes:
        target: the method or torch function that is called.
        group: the ranks that call it.
        call: the call, with its arguments and state.
        effects: the known effects of the step's functions.
        buckets: the buckets of the actor's gradients.
    """

    target: Target
    group: Group
    call: TracedCall
    effects: Effects
    buckets: Buckets

    def forward(self, joint: Joint, name: str) -> GroupFunction:
        """Make the function, without a derivative.

        Raises:
            TraceError: the call gives state new tensors, or its layouts contradict each other.
        """
        self._refuse_changes([rebind.slot.path for rebind, _ in joint.rebinds])
        state = self.read(joint)
        effect = self.effects.of_forward(joint, state, name)
        section = self._cutter(joint).forward()
        self._note([*section.state.values()], (), name)
        return self._make(name, section, joint, effect)

    def derivative(
        self, joint: Joint, name: str, between: Sequence[Write], what: Recompute
    ) -> TracedVjp:
        """Make the forward, the backward and its halves.

        Args:
            joint: the joint graph.
            name: the name of the vjp.
            between: the writes to the actor between the forward and the backward.
            what: the part of the forward that the backward computes again.

        Raises:
            TraceError: as in `forward`; or the backward writes to state, it reads state that a call
                in between may change, or it gives no gradient at all.
        """
        written = [joint.state[index][1].path for index in sorted(joint.backward_written)]
        self._refuse_changes(written, " in its backward")
        self._refuse_changes([rebind.slot.path for rebind, _ in joint.rebinds])
        self._refuse_without_gradients(joint)
        volatile = self.effects.volatile(joint, between)
        cutter = self._cutter(joint)
        self.buckets.enter(self._sums(cutter.gradients))
        cutter.buckets = self.buckets.of
        sections = cutter.sections(volatile, what)
        self._refuse_between(between, sections.backward)
        effect = self.effects.of_forward(joint, [*sections.forward.state.values()], name)
        forward = self._make(f"{name}.forward", sections.forward, joint, effect)
        backward = self._backward(f"{name}.backward", sections.backward, joint)
        grad_outputs, grad_inputs = joint.wanted_outputs, joint.wanted_inputs
        vjp = Vjp(
            name,
            forward.declaration.name,
            backward.declaration.name,
            grad_outputs,
            grad_inputs,
            kept=sections.kept,
        )
        halves: list[GroupFunction] = []
        if sections.input is not None and sections.weight is not None:
            halves = [
                self._backward(f"{name}.input", sections.input, joint),
                self._backward(f"{name}.weight", sections.weight, joint),
            ]
            vjp = replace(vjp, input=halves[0].declaration.name, weight=halves[1].declaration.name)
        elif sections.weight is not None:
            vjp = replace(vjp, weight=backward.declaration.name)
        return TracedVjp(
            vjp,
            forward.part,
            backward.part,
            tuple(half.part for half in halves),
            called=tuple(p for function in (forward, backward, *halves) for p in function.parts),
            gradients={
                t.path: GradientLayout(version.layout, self.buckets.of.get(t.path, 0))
                for t, version in sections.backward.gradients
            },
        )

    def _sums(self, gradients: Iterable[tuple[StateTensor, Version]]) -> Iterator[tuple[str, int]]:
        """The path of each gradient that has to be reduced, and its bytes on a rank."""
        for tensor, version in gradients:
            if version.layout.summands:
                fake = fake_of(version.node)
                count = numel_at_rank(tuple(fake.shape), version.layout, self.group.place)
                yield tensor.path, count * fake.element_size()

    def read(self, joint: Joint) -> list[StateTensor]:
        """The state that a forward reads."""
        return [tensor for node, tensor in joint.state if node.users]

    def _cutter(self, joint: Joint) -> SectionCutter:
        actor = self.group.actor
        layouts: dict[str, Layout] = {} if actor is None else actor.layouts
        gathered: dict[str, Layout] = {} if actor is None else actor.gathered
        pins = {n: gathered[state.path] for n, state in joint.state if state.path in gathered}
        layers = {path: layer_of(path) for path in gathered}
        try:
            propagation = propagate_joint(
                joint, self.group.place, layouts, self.group.inputs, pins=pins
            )
            return SectionCutter(joint, propagation, self._ranks, layers)
        except LayoutError as error:
            if error.loc is not None:
                raise
            # The call is of a torch function, or the op belongs to no line of the method.
            loc = self.call.error_loc
            raise LayoutError(error.reason, loc=loc, remedy=error.remedy) from None

    @property
    def _ranks(self) -> tuple[int, ...]:
        """The ranks that get a graph here. For a torch function, this includes the first rank."""
        group = self.group
        if group.actor is not None:
            return group.played
        return tuple(dict.fromkeys((group.place.ranks[0], *group.played)))

    def _backward(self, name: str, section: Section, joint: Joint) -> GroupFunction:
        graded = [tensor for tensor, _ in section.gradients]
        state = _state_read(section)
        effect = self.effects.of_backward(joint, state, graded)
        self._note(state, graded, name)
        return self._make(name, section, joint, effect)

    def _make(self, name: str, section: Section, joint: Joint, effect: Effect) -> GroupFunction:
        actor = self.group.actor
        state: dict[int, dict[str, StateTensor]] = {rank: {} for rank in self._ranks}
        if actor is not None:
            for rank in self._ranks:
                tensors = actor.state(rank).tensors
                state[rank] = {slot.path: tensor for tensor in tensors for slot in tensor.slots}
        return SectionFunctions(
            name,
            self.target.actor,
            section,
            state,
            self.group.played,
            joint.owner,
            effect,
            self.call.declared_at,
            None if actor is None else Stored(actor, self.call.declared_at, self.buckets.of),
            self.buckets.of,
        ).make()

    def _note(self, read: Sequence[StateTensor], graded: Sequence[StateTensor], name: str) -> None:
        if self.target.use is not None:
            reads = {storage_key(state.tensor) for state in read}
            self.target.use.note(reads, {storage_key(state.tensor) for state in graded}, name)

    def _refuse_changes(self, changed: Sequence[str], where: str = "") -> None:
        """Refuse a call that gives the state at these paths new tensors, or writes in `where`."""
        if changed:
            raise self.call.refusal(
                f"it changes '{changed[0]}'{where}, and its actor is on a mesh, with tensors that "
                "are cut",
                _WRITE_LATER if where else _WRITE_IN_PLACE,
            )

    def _refuse_without_gradients(self, joint: Joint) -> None:
        if not joint.input_grads and not joint.state_grads:
            raise TraceError(
                f"{self.call.what} cannot be differentiated: a loss depends on it, and its "
                "backward gives no gradient to any argument or parameter",
                loc=self.call.error_loc,
                remedy="leave its result out of the loss, or call .detach() on it in the method",
            )

    def _refuse_between(self, between: Sequence[Write], backward: Section) -> None:
        """Refuse a backward if a call in between may write to state that it reads."""
        unknown = self.effects.unknown(between)
        read = {storage_key(state.tensor) for state in _state_read(backward)}
        for write in between:
            written = self.effects.written_by(write)
            if not (read if write in unknown else read & written):
                continue
            raise TraceError(
                f"@{write.function} may change what the gradient of {self.call.what} needs: it is "
                "called between the forward and cg.backward, and the actor is on a mesh",
                loc=write.loc or self.call.loc,
                remedy="call cg.backward first",
            )


_WRITE_IN_PLACE = (
    "write in place, as by self.seen.add_(x); or mark the method @cg.opaque, which every rank "
    "calls on its pieces"
)
_WRITE_LATER = (
    "write in the forward: keep what counts, such as a batch norm, out of checkpointed functions, "
    "and state out of hooks and of the backwards of torch.autograd.Function"
)


def _state_read(section: Section) -> list[StateTensor]:
    """The state that the parts of a section read, or gather."""
    read = {version for part in section.partition.parts for version in part.inputs}
    gathers = section.partition.gathers.values()
    read |= {transfer.before for transfers in gathers for transfer in transfers}
    return [tensor for version, tensor in section.state.items() if version in read]
