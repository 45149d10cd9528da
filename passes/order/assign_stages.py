"""Label the forward work of every microbatch with its task of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...ir.attributes import Action, Task
from ...ir.ops import Call, Op, Value
from ...ir.ops.module import Module
from ...ir.phases import Phase
from ...ir.text.diagnostics import Diagnostic, IRError, error
from ...ir.types import Mesh, TensorType, format_ranks
from ..base import Pass


@dataclass(frozen=True)
class AssignStages(Pass):
    """Cut the step into stages, and label each forward call with stage and microbatch.

    A stage is a maximal run of one actor's work in a microbatch, on one rank or on a group of
    ranks. A call joins the latest stage of its actor. If one of its operands comes from a later
    stage, it opens a new stage instead. A call without an actor joins the stage of its latest
    operand if that stage is on one of its ranks; otherwise it opens a stage on its rank or group.
    Replicated work on inputs alone belongs to no stage. A group is a mesh, or the ranks of a tensor
    that is laid out. All microbatches go through the same stages. `differentiate` labels the
    backward of a call with the same stage, and `schedule` orders the work by these labels.

    Before::

        %h = call(%x) {fn = @stage0.forward, mb = 0} : f32[2,8]@0
        %l = call(%h) {fn = @stage1.loss, mb = 0} : f32[]@1

    After::

        %h = call(%x) {fn = @stage0.forward, mb = 0, task = 0F0} : f32[2,8]@0
        %l = call(%h) {fn = @stage1.loss, mb = 0, task = 1F0} : f32[]@1
    """

    name: ClassVar[str] = "assign-stages"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.TRACED,)

    def run(self, module: Module) -> bool:
        labeller = _Labeller(module)
        changed = False
        for op in module.program.ops:
            stage = labeller.enter(op)
            task = None
            if stage is not None and op.mb is not None:
                task = Task(stage, Action.FORWARD, op.mb)
            changed = changed or task != op.task
            op.task = task
        labeller.finish()
        return changed


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of a loop: the stage of an actor or, without an actor, of ranks."""

    actor: str | None
    ranks: tuple[int, ...]
    loop: int

    def __str__(self) -> str:
        if self.actor is not None:
            return f"actor {self.actor}"
        is_single = len(self.ranks) == 1
        return f"rank {self.ranks[0]}" if is_single else f"ranks {format_ranks(self.ranks)}"


class _Labeller:
    """Labels the ops of a program; tracks the stages so far, and those that microbatches reached.

    A *loop* is a loop over microbatches as the user wrote it. Loops need not have the same stages,
    or the same number of microbatches, even if they belong to one round.
    """

    def __init__(self, module: Module) -> None:
        self._program = module.program
        self._functions = module.functions
        self._stages: list[_Stage] = []
        self._by_loop: dict[int, list[int]] = {}
        # For each loop and microbatch the ops that opened its stages.
        self._opened: dict[tuple[int, int], list[Op]] = {}
        self._latest: dict[tuple[int, _Stage], int] = {}
        # For each value the number of its loop, its microbatch and its stage.
        self._made_by: dict[Value, tuple[int, int | None, int]] = {}
        self._loop = 0
        self._mb: int | None = None
        self._is_between = False

    def enter(self, op: Op) -> int | None:
        """The stage of the next op of the program; None if it has no stage."""
        self._follow_loops(op)
        latest = self._latest_operand(op)
        stage = None
        if isinstance(op, Call) and op.mb is not None:
            actor = self._functions[op.fn.name].actor
            if actor is not None or latest is not None:
                stage = self._stage_of_call(op, op.mb, actor, latest)
        reached = latest if stage is None else stage
        if reached is not None:
            self._made_by.update(dict.fromkeys(op.results, (self._loop, op.mb, reached)))
        return stage

    def _follow_loops(self, op: Op) -> None:
        """Count the loops over microbatches; each numbers its microbatches from 0."""
        if op.mb is None:
            self._is_between = True
            return
        if self._mb is not None:
            again = self._is_between and op.mb == self._mb
            self._loop += again or op.mb < self._mb
        self._mb, self._is_between = op.mb, False

    def finish(self) -> None:
        """Check that every microbatch of a loop has gone through all its stages."""
        for (loop, mb), openers in self._opened.items():
            missing = self._by_loop[loop][len(openers) :]
            if missing:
                first, there = self._reference(loop)
                raise self._mismatch(
                    f"microbatch {mb} never comes to {self._stages[missing[0]]}, "
                    f"microbatch {first} does",
                    openers[-1],
                    there[len(openers)],
                )

    def _latest_operand(self, op: Op) -> int | None:
        """The latest stage that an operand comes from, within this microbatch and loop."""
        latest = None
        for value in op.operands:
            loop, mb, stage = self._made_by.get(value, (0, None, -1))
            here = mb is not None and mb == op.mb and loop == self._loop
            if here and (latest is None or stage > latest):
                latest = stage
        return latest

    def _stage_of_call(
        self, op: Call, mb: int, actor: str | None, latest: int | None
    ) -> int | None:
        place = op.place
        if place is None:
            return None
        if actor is None and latest is not None:
            if any(rank in place.ranks for rank in self._stages[latest].ranks):
                return latest
            if not place.is_single and not _is_of_group(op):
                return None
        stage = _Stage(actor, place.ranks, self._loop)
        known = self._latest.get((mb, stage))
        if known is None or (latest is not None and latest > known):
            known = self._open(op, mb, stage)
            self._latest[mb, stage] = known
        return known

    def _open(self, op: Call, mb: int, stage: _Stage) -> int:
        """The number of the stage that a microbatch opens with this call."""
        numbers = self._by_loop.setdefault(stage.loop, [])
        openers = self._opened.setdefault((stage.loop, mb), [])
        first, there = self._reference(stage.loop)
        position = len(openers)
        openers.append(op)
        if mb == first:
            self._stages.append(stage)
            numbers.append(len(self._stages) - 1)
        if position >= len(numbers):
            raise self._mismatch(
                f"microbatch {mb} comes to {stage}, microbatch {first} does not", op, there[-1]
            )
        expected = self._stages[numbers[position]]
        if expected != stage:
            raise self._mismatch(
                f"microbatch {mb} comes to {stage} where microbatch {first} comes to {expected}",
                op,
                there[position],
            )
        return numbers[position]

    def _reference(self, loop: int) -> tuple[int, list[Op]]:
        """The first microbatch of a loop, with which the others are compared, and its openers."""
        return next((mb, ops) for (other, mb), ops in self._opened.items() if other == loop)

    def _mismatch(self, message: str, op: Op, reference: Op) -> IRError:
        return error(
            message,
            op=op,
            program=self._program,
            help="all microbatches must pass through the same actors in the same order; move "
            "what differs out of cg.microbatches, or into a method of the actor",
            notes=(Diagnostic("compare this call of the other microbatch", op=reference),),
        )


def _is_of_group(op: Call) -> bool:
    """True if a call on several ranks is the work of a group, and not replicated work."""
    types = [value.type for value in (*op.operands, *op.results)]
    laid_out = any(isinstance(type_, TensorType) and type_.layout is not None for type_ in types)
    return laid_out or isinstance(op.place, Mesh)
