"""Sort the ops of a program over all ranks into kinds that are ordered in different ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...ir.attributes import Action, Effect, Task
from ...ir.ops import (
    Assemble,
    Call,
    Collective,
    Constant,
    Op,
    Recv,
    Return,
    Send,
    Slice,
    View,
    Wait,
)
from ...ir.ops.module import Module, Program
from ..frontend.effect_order import dependencies, effect_of
from ..frontend.stored_values import Way, ways_of
from .rounds import Rounds
from .stage_groups import StageGroups

_LAZY = (Wait, View, Slice, Assemble, Constant)


@dataclass(slots=True)
class ProgramWork:
    """The ops of a program over all ranks, sorted into kinds.

    A *node* has its place in the global order: a call, a collective, or a send with its receive.
    A *lazy* op costs next to nothing, or depends on no node; each rank runs it just before its
    first use. An *early* send or collective depends on no node either; it is issued a little before
    its first use. A *late* collective takes received values, as a gather at the end of a transfer
    to a group does. It is issued just before its first use, since its ranks wait for the messages
    there. A send of a received value, as in a ring, follows the call ahead of it in its microbatch:
    to issue it, the rank waits for the value, and it is to work while the value comes. So does a
    collective of a backward that takes what the forward has saved follow the call ahead of it in
    its task: its result is large, and is not to be there before it is needed. All other
    ops go with an op of these kinds: a receive with its send, a wait with its future.

    Attributes:
        program: the program with the ops.
        nodes: the indices of the nodes, ascending.
        follows: for each op the nodes that it follows, without the order of the schedule.
        lazy: the indices of the lazy ops.
        early: the indices of the early ops, ascending.
        late: the indices of the late collectives, which are nodes.
        anchors: for each task its calls on actors, ascending; the schedule orders these nodes.
        stages: for each stage its round, and the rank that represents its group.
        costs: for each call that does work of an actor, its units of time.
        actors: for each call of an actor's function, the actor.
        computing: the calls that do work of an actor.
        ahead: the nodes that begin to gather stored parameters, or read those on hosts.
        uses: the nodes that make parameters from what has been gathered or fetched.
        behind: the nodes that take in reduced gradients.
    """

    program: Program
    nodes: list[int] = field(default_factory=list)
    follows: list[Sequence[int]] = field(default_factory=list)
    lazy: set[int] = field(default_factory=set)
    early: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
    anchors: dict[Task, list[int]] = field(default_factory=dict)
    stages: dict[int, tuple[int, int]] = field(default_factory=dict)
    costs: dict[int, int] = field(default_factory=dict)
    actors: dict[int, str] = field(default_factory=dict)
    computing: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)
    uses: set[int] = field(default_factory=set)
    behind: set[int] = field(default_factory=set)


def sort_work(module: Module) -> ProgramWork:
    """Sort the ops of a module in phase ASYNC."""
    program = module.program
    work = ProgramWork(program)
    rounds, groups = Rounds(), StageGroups()
    sends: dict[tuple[int, int], int] = {}
    # For each op, the nodes that its users have to follow.
    reach: list[Sequence[int]] = []
    edges = dependencies(program.ops, module.functions)
    ahead: dict[tuple[int, int | None], int] = {}
    for index, op in enumerate(program.ops):
        before = edges[index]
        if type(op) is Send:
            sends[op.chan, op.seq] = index
            if _is_received(program.ops, edges, before):
                before = (*before, *_called_ahead(op, ahead))
        elif type(op) is Recv:
            before = (*before, sends[op.chan, op.seq])
        task = op.task
        forward = task is not None and task.action is Action.FORWARD
        is_backward = isinstance(op, Collective) and task is not None and not forward
        if is_backward and _is_saved(program.ops, edges, before, task):
            own = (i for i in _called_ahead(op, ahead) if program.ops[i].task == task)
            before = (*before, *own)
        round_ = rounds.enter(op, before, forward)
        if task is not None and forward:
            groups.enter(task.stage, op, module.functions, round_)
        if len(before) == 1:
            follows = reach[before[0]]
        else:
            follows = list({node for earlier in before for node in reach[earlier]})
        work.follows.append(follows)
        is_node = _classify(work, module, index, op, follows)
        if type(op) is Call and op.place is not None:
            ahead.update(dict.fromkeys(((rank, op.mb) for rank in op.place.ranks), index))
        reach.append((index,) if is_node else follows)
    work.stages = groups.stages()
    work.late = _late(program.ops, edges).intersection(work.nodes)
    if any(f.parameter is not None for f in module.functions.values()):
        _find_stored(work, module)
    if any(f.effect is Effect.REDUCE for f in module.functions.values()):
        work.behind.update(i for i in work.nodes if _takes_reduced(work.program.ops[i], module))
    for anchors in work.anchors.values():
        # A task takes one unit, however many calls it has.
        work.costs.update(dict.fromkeys(anchors[:-1], 0))
    return work


def _is_received(
    ops: Sequence[Op], edges: Sequence[tuple[int, ...]], before: Sequence[int]
) -> bool:
    """True if one of some ops gives a received value, or a part of one."""
    return any(
        isinstance(ops[i], Recv)
        or (isinstance(ops[i], (Wait, Slice, Assemble)) and _is_received(ops, edges, edges[i]))
        for i in before
    )


def _is_saved(
    ops: Sequence[Op], edges: Sequence[tuple[int, ...]], before: Sequence[int], task: Task | None
) -> bool:
    """True if other tasks have made what some ops of a task give, or what it is a part of."""
    return all(
        _is_saved(ops, edges, edges[i], task)
        if isinstance(ops[i], (Slice, Assemble, View))
        else ops[i].task != task
        for i in before
    )


def _called_ahead(op: Op, ahead: Mapping[tuple[int, int | None], int]) -> Iterator[int]:
    """The last call ahead of an op on each of its ranks, in its microbatch if it is of one."""
    place = op.operands[0].type.place
    for rank in place.ranks if place is not None else ():
        if (rank, op.mb) in ahead:
            yield ahead[rank, op.mb]


def _find_stored(work: ProgramWork, module: Module) -> None:
    """Find the nodes that gather parameters, and those that take in reduced gradients."""
    ops = work.program.ops
    ways = ways_of(ops, module.functions)
    kinds = {Way.PIECE: work.ahead, Way.GATHERED: work.uses, Way.REDUCED: work.behind}
    for index in work.nodes:
        op = ops[index]
        if isinstance(op, Collective):
            if any(ways.get(value) is Way.PIECE for value in op.operands):
                work.ahead.add(index)
        elif isinstance(op, Call) and not module.functions[op.fn.name].is_work:
            taken = {ways[value] for value in op.results if value in ways}
            if len(taken) == 1 and (way := taken.pop()) in kinds:
                kinds[way].add(index)


def _takes_reduced(op: Op, module: Module) -> bool:
    """True if an op replaces accumulated gradients by reduced ones."""
    if not isinstance(op, Call) or not op.operands:
        return False
    return module.functions[op.fn.name].effect is Effect.REDUCE


def _late(ops: Sequence[Op], edges: Sequence[tuple[int, ...]]) -> set[int]:
    """The indices of collectives that take received values."""
    late: set[int] = set()

    def is_received(index: int) -> bool:
        op = ops[index]
        if isinstance(op, Wait):
            return any(
                earlier in late or isinstance(ops[earlier], Recv) for earlier in edges[index]
            )
        return isinstance(op, (Slice, Assemble)) and any(map(is_received, edges[index]))

    for index, op in enumerate(ops):
        if isinstance(op, Collective) and any(map(is_received, edges[index])):
            late.add(index)
    return late


def _classify(
    work: ProgramWork, module: Module, index: int, op: Op, follows: Sequence[int]
) -> bool:
    """Enter an op into the sets of its kind; return whether it is a node."""
    if isinstance(op, (Recv, Return)):
        return False
    if isinstance(op, _LAZY):
        work.lazy.add(index)
        return False
    function = module.functions[op.fn.name] if isinstance(op, Call) else None
    actor = None if function is None else function.actor
    if not follows and actor is None and not op.synchronizes:
        if isinstance(op, (Send, Collective)):
            work.early.append(index)
            return False
        if effect_of(op, module.functions) is Effect.PURE:
            work.lazy.add(index)
            return False
    work.nodes.append(index)
    if actor is not None:
        work.actors[index] = actor
    if function is not None and function.is_work:
        work.costs[index] = 1
        work.computing.add(index)
        if op.task is not None:
            work.anchors.setdefault(op.task, []).append(index)
    return True
