"""Find the stage of the pipeline that each op of a microbatch belongs to, and the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.attributes import Action, Task
from ...ir.diagnostics import Diagnostic, IRError, error
from ...ir.module import Module
from ...ir.ops import Call, Collective, Constant, Copy, Op, Recv, Send, Transfer, Value, View, Wait

_TRANSPARENT = (Constant, View, Copy, Transfer, Send, Recv, Wait, Collective)


class Rounds:
    """Tells loops over microbatches apart that cannot be one pipeline.

    A step may run through its microbatches, do something with all of them (an update, say), and
    run through microbatches again with the result. Each such run is a round, with a pipeline of
    its own. An op of a round's forward never follows an op outside of the microbatches that
    follows an op of that same round.
    """

    def __init__(self) -> None:
        # 2r: in round r. 2r + 1: after ops of round r, but outside of it. -1: before all.
        self._states: list[int] = []
        # The first stage of each round.
        self._first: dict[int, int] = {}

    def enter(self, op: Op, before: Sequence[int], forward: bool) -> int:
        """The round of the next op, which follows those with the indices `before`."""
        states = self._states
        state = max([states[index] for index in before], default=-1)
        if forward:
            state = max(state + state % 2, 0)
            if op.task is not None:
                state = self._after_earlier_stages(op.task.stage, state)
        elif op.mb is None and state >= 0 and not isinstance(op, _TRANSPARENT):
            state |= 1
        states.append(state)
        return state // 2

    def _after_earlier_stages(self, stage: int, state: int) -> int:
        """The state of work of a stage: of no earlier round than the stages before it.

        A rank may run work of theirs first that the schedule has put into the same task.
        """
        floors = [2 * round_ for round_, first in self._first.items() if first <= stage]
        state = max([state, *floors])
        self._first[state // 2] = min(stage, self._first.get(state // 2, stage))
        return state


def backward_of(task: Task | None) -> Task | None:
    """The task of the derivative of work of `task`."""
    return None if task is None else Task(task.stage, Action.BACKWARD, task.microbatch)


def weight_of(task: Task) -> Task:
    """The task of what the derivative of work of `task` may put off."""
    return Task(task.stage, Action.WEIGHT, task.microbatch)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage as one microbatch opens it: the actor (or, without one, the rank) and the loop."""

    actor: str | None
    rank: int
    loop: int

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.actor is None else f"actor {self.actor}"


def label(module: Module) -> bool:
    """Give every forward call of a microbatch its task; return whether anything changed.

    A call joins the latest stage of its actor unless an operand comes from a later stage, in
    which case it opens a new one. A call without an actor joins the stage of its latest operand if
    that stage is on its rank; replicated work on inputs alone belongs to no stage.

    Args:
        module: in phase TRACED.

    Raises:
        IRError: two microbatches do not go through the same stages.
    """
    program = module.program
    labeller = _Labeller(module)
    changed = False
    for op in program.ops:
        stage = labeller.enter(op)
        task = None
        if stage is not None and op.mb is not None:
            task = Task(stage, Action.FORWARD, op.mb)
        changed = changed or task != op.task
        op.task = task
    labeller.finish()
    return changed


class _Labeller:
    """Walks the program; knows the stages so far and where each microbatch is among them.

    A *loop* is a loop over microbatches as the user wrote it. Loops need not have anything in
    common, not even the number of microbatches, also where they are one round.
    """

    def __init__(self, module: Module) -> None:
        self._program = module.program
        self._functions = module.functions
        self._stages: list[_Stage] = []
        self._by_loop: dict[int, list[int]] = {}
        # For each loop and microbatch: the op that opened each of its stages.
        self._opened: dict[tuple[int, int], list[Op]] = {}
        self._latest: dict[tuple[int, _Stage], int] = {}
        # For each value the number of its loop, its microbatch and its stage.
        self._made_by: dict[Value, tuple[int, int | None, int]] = {}
        self._loop = 0
        self._mb: int | None = None
        self._is_between = False

    def enter(self, op: Op) -> int | None:
        """The stage of the next op of the program, None if it has none."""
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
        """Notice when the next loop over microbatches begins: they are numbered from 0 again."""
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
        """The last of the stages, in this microbatch and loop, that the operands come from."""
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
            if self._stages[latest].rank in place.ranks:
                return latest
            if not place.is_single:
                return None
        stage = _Stage(actor, place.ranks[0], self._loop)
        known = self._latest.get((mb, stage))
        if known is None or (latest is not None and latest > known):
            known = self._open(op, mb, stage)
            self._latest[mb, stage] = known
        return known

    def _open(self, op: Call, mb: int, stage: _Stage) -> int:
        """The number of the stage that a microbatch opens now."""
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
        """The first microbatch of a loop, which the others are compared with."""
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
