"""Run scheduled programs on paper: the ops that ranks will run, on a virtual clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

from ...ir.attributes import Action, Effect, Task, Traffic
from ...ir.ops import Call, Collective, CopyStart, Op, Recv, RowCollective, Send
from ...ir.ops.module import Module
from ...ir.pipeline.costs import Costs
from ...ir.text.diagnostics import error
from ...ir.types import tensor_bytes
from ...ir.verify.communication import Progress, Stall, TimeSpan
from ...ir.verify.message_matching import Message
from .memory_plan import memory_plan
from .program_times import ProgramTimes, RankTimes


@dataclass(frozen=True)
class ProgramSimulation(ProgramTimes):
    """The simulated run of the programs of a step.

    Attributes:
        messages: the messages with their times, by channel and number.
    """

    messages: tuple[Message, ...] = ()


def simulate_programs(module: Module, costs: Costs) -> ProgramSimulation:
    """Run the programs of a scheduled module on paper, in time linear in their ops.

    The model is that of `ir/verify/communication.py`, which is also `check-deadlock`'s: a message
    travels once both ends have been posted and the messages before it on their streams have
    arrived; with `costs.buffered` it need not wait for its receive, if it has a slot.

    A call takes the time in `costs.functions` for its function. Without one, an actor's call takes
    its share of the time of its task: `tf`, `tb` or `tw`, divided by the number of such calls of
    the task on its rank. Each rank of a group does all of them. A W without B, as on the first
    stage, is a whole backward and takes `tb + tw`, and so is a B without W that adds to gradients.

    After each call its rank is idle for `costs.overhead`, and before each send, collective or copy
    to or from the host for `costs.post`; with `costs.speed` a copy occupies it for its use of
    memory, too. All other ops take no time. A message takes the time that
    the link of its channel, or else `costs.link`, gives for its bytes. Without links, a message
    from a task to ranks of another stage takes `tcomm`, a gather of stored parameters takes
    `tgather`, a reduction of their gradients takes `treduce`, and other messages take no time. A
    copy to the host, or back, takes the time that `costs.host` gives.

    Raises:
        IRError: the programs wait for each other for ever, or their ends do not match.
    """
    work = _work(module, costs)
    progress = Progress(module, _occupied(work, costs), _transfer(module, costs), costs.buffered)
    if not progress.run():
        raise error(
            "these programs wait for each other for ever",
            help="the pass check-deadlock shows which ops do",
        )
    overhead = costs.overhead
    spans: dict[int, list[TimeSpan]] = defaultdict(list)
    for span in progress.spans:
        time = work.get(id(span.op))
        if time is not None:
            spans[span.rank].append(replace(span, end=span.start + time) if overhead else span)
    stalls: dict[int, list[Stall]] = defaultdict(list)
    for stall in progress.stalls:
        stalls[stall.rank].append(stall)
    ranks = [program.rank or 0 for program in module.programs]
    return ProgramSimulation(
        tuple(_times(module, rank, spans[rank], stalls[rank]) for rank in ranks),
        tuple(span for rank in ranks for span in spans[rank]),
        tuple(progress.messages[key] for key in sorted(progress.messages)),
    )


def _times(
    module: Module, rank: int, spans: Sequence[TimeSpan], stalls: Sequence[Stall]
) -> RankTimes:
    start, end = (spans[0].start, spans[-1].end) if spans else (0.0, 0.0)
    busy = sum(span.end - span.start for span in spans)
    exposed = 0.0
    for stall in stalls:
        travelling = min(stall.end, end) - max(stall.start, stall.message.start, start)
        exposed += max(0.0, travelling)
    blocked = max(0.0, end - start - busy)
    return RankTimes(rank, start, end, busy, blocked, exposed, memory_plan(module, rank).peak)


def _work(module: Module, costs: Costs) -> dict[int, float]:
    """The time of each call that takes time, by identity."""
    calls = [[op for op in program.ops if isinstance(op, Call)] for program in module.programs]
    tasks = {
        call.task
        for program_calls in calls
        for call in program_calls
        if call.task and module.functions[call.fn.name].is_work
    }
    split = any(task.action is Action.WEIGHT for task in tasks)
    whole = {
        call.task
        for program_calls in calls
        for call in program_calls
        if call.task in tasks
        and call.task.action is Action.BACKWARD
        and call.task.beside(Action.WEIGHT) not in tasks
        and module.functions[call.fn.name].effect is Effect.ACCUMULATE
    }
    work: dict[int, float] = {}
    for program_calls in calls:
        known = costs.functions
        work.update(
            (id(call), known[call.fn.name]) for call in program_calls if call.fn.name in known
        )
        sharing = [call for call in program_calls if _shares(module, costs, call)]
        counts = Counter(call.task for call in sharing)
        for call in sharing:
            if call.task is not None:
                is_split = split and call.task not in whole
                work[id(call)] = _time(costs, call.task, is_split, tasks) / counts[call.task]
    return work


def _time(costs: Costs, task: Task, split: bool, tasks: Container[Task]) -> float:
    """The time of a task; `tasks` are all tasks of the module."""
    time = costs.of(task.action, task.stage, split)
    if task.action is Action.WEIGHT and task.beside(Action.BACKWARD) not in tasks:
        time += costs.of(Action.BACKWARD, task.stage, split)
    return time


def _occupied(work: Mapping[int, float], costs: Costs) -> Callable[[Op], float]:
    """A function that gives the time for which an op occupies its rank."""

    def time(op: Op) -> float:
        if isinstance(op, Call):
            return work.get(id(op), 0.0) + costs.overhead
        if isinstance(op, CopyStart):
            return costs.copy_load(tensor_bytes(op.result.type))
        return costs.post if isinstance(op, Send | Collective) else 0.0

    return time


def _shares(module: Module, costs: Costs, call: Call) -> bool:
    """True if a call takes its share of the time of its task."""
    if call.task is None or call.fn.name in costs.functions:
        return False
    return module.functions[call.fn.name].is_work


def _transfer(module: Module, costs: Costs) -> Callable[[Message], float]:
    hosts = _hosts(module)

    def time(message: Message) -> float:
        op = next(op for op in message.ends.values() if not isinstance(op, Recv))
        if isinstance(op, CopyStart):
            return costs.host.time(tensor_bytes(op.result.type))
        link = costs.channels.get(message.chan, costs.link)
        if link is not None:
            return link.time(_volume(message))
        traffic = module.channels[message.chan].traffic
        if traffic is Traffic.GATHER:
            return costs.tgather
        if traffic is Traffic.REDUCE:
            return costs.treduce
        if op.task is None or hosts[op.task.stage].issuperset(message.ends):
            return 0.0
        stage = op.task.stage
        if op.task.action is Action.FORWARD:
            return costs.between(stage)
        return costs.between(stage - 1) if stage else 0.0

    return time


def _hosts(module: Module) -> Mapping[int, set[int]]:
    """The ranks of each stage."""
    hosts: dict[int, set[int]] = defaultdict(set)
    for program in module.programs:
        for op in program.ops:
            if isinstance(op, Call) and op.task is not None:
                hosts[op.task.stage].add(program.rank or 0)
    return hosts


def _volume(message: Message) -> int:
    """The bytes that a link carries for a message, or for each rank of a collective in a ring."""
    ends = message.ends.values()
    largest = max(tensor_bytes(value.type) for op in ends for value in (*op.operands, *op.results))
    op = next(iter(ends))
    if not isinstance(op, Collective) or op.exchange.is_whole:
        return largest
    members = len(op.group.ranks)
    if isinstance(op, RowCollective):
        largest = int(largest * op.expected_share)
    return op.exchange.rounds * largest * (members - 1) // members
