"""Functions of ranks that hold pieces: their graph is laid out, and cut where they exchange.

An actor whose parameters rest on the host has such functions, too, on one rank as well: its graph
is cut where a layer is used first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from ...ir.attributes import Effect, Shares
from ...ir.layout import Layout
from ...ir.ops.names import layer_of
from ...ir.packing import numel_at_rank
from ..errors import TraceError
from ..graph.autodiff.partition import Sections
from ..graph.autodiff.recomputation import Recomputation
from ..graph.autodiff.subgraphs import fake_of
from ..graph.layouts.cases import LayoutError
from ..graph.layouts.propagation.sections import LaidOutSection
from ..graph.layouts.versions import Version
from ..graph.prepared import cast_path
from ..method.reuse.saving_functions import OFFLOAD
from ..method.saving_marks import mark_of
from ..values.actor_state import StateTensor
from ..values.gradient_buckets import Buckets, GradientLayout
from ..values.group import Group
from ..values.interface import TracedPart, TracedVjp, Write
from ..values.optimizer_state import RestingState
from .call_functions import CallFunctions
from .groups.stored import Stored
from .laid_out_pieces import LaidOutPieces, LayoutPlan
from .section_programs import SectionProgram


@dataclass(frozen=True)
class MeshFunctions(CallFunctions[LaidOutSection]):
    """Makes the functions of a call that ranks compute together, each on its pieces.

    Attributes:
        group: the ranks that call it.
        buckets: the buckets of the actor's gradients.
        resting: the parameters that rest on the host, by rank.
        pieces: the pieces of the step's graphs.
    """

    group: Group
    buckets: Buckets
    resting: Mapping[int, RestingState]
    pieces: LaidOutPieces

    def forward(self) -> LaidOutSection:
        self._refuse_forward_changes()
        with self._errors_located():
            return self.pieces.forward(self.joint, self._plan)

    def sections(
        self, volatile: frozenset[int], recomputation: Recomputation
    ) -> Sections[LaidOutSection]:
        joint = self.joint
        written = [joint.tensors[index].path for index in sorted(joint.backward_written)]
        self._refuse_changes(written, " in its backward")
        self._refuse_forward_changes()
        self._refuse_without_gradients()
        self._refuse_offloading()
        with self._errors_located():
            self.buckets.enter(self._sums(self.pieces.gradients(joint, self._plan)))
            return self.pieces.sections(joint, self._plan, self.buckets.of, volatile, recomputation)

    def part(
        self, section: LaidOutSection, name: str, effect: Effect, shares: Shares
    ) -> TracedPart:
        return SectionProgram(
            name,
            self.target.actor,
            section,
            self._state,
            self.group.played,
            self.joint,
            effect,
            shares,
            self.call.declared_at,
            self._stored,
            self.weights,
            self.buckets.of,
            self.pieces,
        ).make()

    def gradients(self, backward: LaidOutSection) -> Mapping[str, GradientLayout]:
        if self.target.group is None:
            return {}
        return {
            tensor.path: GradientLayout(version.layout, self.buckets.of.get(tensor.path, 0))
            for tensor, version in backward.gradients
        }

    def noticing(
        self, derivative: TracedVjp, backward: LaidOutSection, writes: Sequence[Write]
    ) -> TracedVjp:
        raise TraceError(
            f"@{writes[0].function} may change what the gradient of {self.call.shown} needs: it is "
            f"called between the forward and cg.backward, and {self._why}",
            loc=writes[0].loc or self.call.loc,
            remedy="call cg.backward first",
        )

    @property
    def _why(self) -> str:
        """The reason in words why the call is cut."""
        if self.target.group is None:
            return "the parameters of its actor rest on the host"
        return "its actor is on a mesh"

    def _refuse_offloading(self) -> None:
        for node in self.joint.graph.nodes:
            if mark_of(node) == OFFLOAD:
                raise TraceError(
                    f"cg.offload is given a value of {self.call.shown}, which is computed in "
                    f"pieces, as {self._why}",
                    loc=self.joint.locations.get(node.name) or self.call.loc,
                    remedy="call cg.keep instead; compile(memory=...) moves pieces to hosts itself",
                )

    def _sums(self, gradients: Iterable[tuple[StateTensor, Version]]) -> Iterator[tuple[str, int]]:
        """The path of each gradient that has to be reduced, and its bytes on a rank."""
        for tensor, version in gradients:
            if version.layout.summands:
                fake = fake_of(version.node)
                count = numel_at_rank(tuple(fake.shape), version.layout, self.group.place)
                yield tensor.path, count * fake.element_size()

    @cached_property
    def _plan(self) -> LayoutPlan:
        joint, group, actor = self.joint, self.group, self.group.actor
        layouts: dict[str, Layout] = {} if actor is None else actor.layouts
        gathered: dict[str, Layout] = {} if actor is None else actor.gathered
        # The cast of a weight is cut as the weight is.
        layouts |= {cast_path(path): layout for path, layout in layouts.items()}
        gathered |= {cast_path(path): layout for path, layout in gathered.items()}
        fetched = {
            # What draws stays in one part, so that one key seeds all of it.
            path: None if joint.draws else layer_of(path)
            for path in self._at_rest.difference(gathered)
        }
        return LayoutPlan(
            group.place,
            self._ranks,
            group.inputs,
            tuple(layouts.items()),
            tuple((path, layout, layer_of(path)) for path, layout in gathered.items()),
            tuple(sorted(fetched.items())),
            None if actor is None else actor.plan.attention,
            () if actor is None else actor.plan.sequence,
        )

    @contextmanager
    def _errors_located(self) -> Iterator[None]:
        """Let layout errors that name no line name the line of the call.

        They are of a torch function, or the op belongs to no line of the method.
        """
        try:
            yield
        except LayoutError as error:
            if error.loc is not None:
                raise
            loc = self.call.error_loc
            raise LayoutError(error.reason, loc=loc, remedy=error.remedy) from None

    @cached_property
    def _state(self) -> Mapping[int, Sequence[StateTensor]]:
        """The tensors of each rank that gets a graph here."""
        actor = self.group.actor
        return {rank: () if actor is None else actor.state(rank).tensors for rank in self._ranks}

    @cached_property
    def _stored(self) -> Stored | None:
        actor, loc = self.group.actor, self.call.declared_at
        return None if actor is None else Stored(actor, loc, self.buckets.of, self.resting)

    @property
    def _ranks(self) -> tuple[int, ...]:
        """The ranks that get a graph here. For a torch function, this includes the first rank."""
        group = self.group
        if group.actor is not None:
            return group.played
        return tuple(dict.fromkeys((group.place.ranks[0], *group.played)))

    def _refuse_forward_changes(self) -> None:
        joint = self.joint
        self._refuse_changes([rebind.slot.path for rebind in joint.rebound])
        written = [joint.tensors[index].path for index in sorted(joint.written)]
        for path in (path for path in written if path in self._at_rest):
            raise self.call.refusal(
                f"it writes to '{path}', which rests on the host, so it would write to a copy",
                "mark the method with @cg.opaque, which finds trained parameters on the device; or "
                'leave parameters there by store="host-state"',
            )

    @property
    def _at_rest(self) -> set[str]:
        """The paths of the parameters that rest on the host."""
        return {path for state in self.resting.values() for path in state.paths}

    def _refuse_changes(self, changed: Sequence[str], where: str = "") -> None:
        """Refuse a call that gives the state at these paths new tensors, or writes in `where`."""
        if changed:
            raise self.call.refusal(
                f"it changes '{changed[0]}'{where}, and {self._why}",
                _WRITE_LATER if where else _WRITE_IN_PLACE,
            )

    def _refuse_without_gradients(self) -> None:
        if not self.joint.input_grads and not self.joint.state_grads:
            raise TraceError(
                f"{self.call.shown} cannot be differentiated: a loss depends on it, and its "
                "backward gives no gradient to any argument or parameter",
                loc=self.call.error_loc,
                remedy="leave its result out of the loss, or call .detach() on it in the method",
            )


_WRITE_IN_PLACE = (
    "write in place, as by self.seen.add_(x); or mark the method @cg.opaque, which every rank "
    "calls on its pieces"
)
_WRITE_LATER = (
    "write in the forward: keep what counts, such as a batch norm, out of checkpointed functions, "
    "and state out of hooks and of the backwards of torch.autograd.Function"
)
