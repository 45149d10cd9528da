"""Run scheduled programs on paper: the very ops that ranks will run, on a virtual clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..ir.attributes import Action
from ..ir.communication import Message, Progress, Span, Stall
from ..ir.costs import Costs
from ..ir.diagnostics import error
from ..ir.module import Module
from ..ir.ops import AllReduce, Barrier, Broadcast, Call, Collective, Op, Recv, Value
from ..ir.types import FutureType, TensorType
from .footprint import peak_bytes


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What a rank does with its time, in milliseconds.

    Attributes:
        start, end: of its first and last work; both 0 if it has none.
        busy: for how long it works.
        blocked: for how long, between `start` and `end`, it waits.
        exposed: for how long of that the message that it waits for is travelling; for the rest,
            another rank has not sent it yet.
        peak_bytes: of the tensors that it holds; see `peak_bytes`.
    """

    rank: int
    start: float
    end: float
    busy: float
    blocked: float
    exposed: float
    peak_bytes: int = 0

    @property
    def span(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ProgramSimulation:
    """What the programs of a step come to.

    Attributes:
        ranks: for each rank what it does with its time.
        spans: when each op ran that takes time, by rank in program order.
    """

    ranks: tuple[RankTimes, ...]
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """The longest time from a rank's first work to the end of its last, in milliseconds."""
        return max(rank.span for rank in self.ranks)

    @property
    def end(self) -> float:
        """When the last rank is done, in milliseconds."""
        return max(rank.end for rank in self.ranks)

    @property
    def bubble_ratio(self) -> float:
        """The share of the makespan for which a rank that has work is, on average, idle."""
        working = [rank for rank in self.ranks if rank.busy]
        if not working:
            return 0.0
        return 1.0 - sum(rank.busy for rank in working) / len(working) / self.makespan


def simulate_programs(module: Module, costs: Costs) -> ProgramSimulation:
    """Run the programs of a scheduled module on paper, in time linear in their ops.

    The model is that of `ir/communication.py`, which is also `check-deadlock`'s: a message travels
    once both ends have been posted and the messages before it on their streams have arrived.

    A call takes what `costs.functions` says of its function. If that says nothing, an actor's
    call takes its share of the time of its task, which is `tf`, `tb` or `tw` over the number of
    such calls. All other ops take no time. A message takes what the link of its channel, or else
    `costs.link`, says of its bytes; without these, one that a task sends takes `tcomm`, and others
    no time.

    Raises:
        IRError: the programs wait for each other for ever, or their ends do not match.
    """
    work = _work(module, costs)
    progress = Progress(module, lambda op: work.get(id(op), 0.0), _transfer(module, costs))
    if not progress.run():
        raise error(
            "these programs wait for each other for ever",
            help="the pass check-deadlock shows which ops do",
        )
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in progress.spans:
        spans[span.rank].append(span)
    stalls: dict[int, list[Stall]] = defaultdict(list)
    for stall in progress.stalls:
        stalls[stall.rank].append(stall)
    ranks = [
        _times(program.rank or 0, spans[program.rank or 0], stalls[program.rank or 0])
        for program in module.programs
    ]
    return ProgramSimulation(
        tuple(
            replace(times, peak_bytes=peak_bytes(module, program))
            for times, program in zip(ranks, module.programs, strict=True)
        ),
        tuple(span for times in ranks for span in spans[times.rank]),
    )


def _times(rank: int, spans: Sequence[Span], stalls: Sequence[Stall]) -> RankTimes:
    start, end = (spans[0].start, spans[-1].end) if spans else (0.0, 0.0)
    busy = sum(span.end - span.start for span in spans)
    exposed = 0.0
    for stall in stalls:
        travelling = min(stall.end, end) - max(stall.start, stall.message.start, start)
        exposed += max(0.0, travelling)
    return RankTimes(rank, start, end, busy, max(0.0, end - start - busy), exposed)


def _work(module: Module, costs: Costs) -> dict[int, float]:
    """How long each op takes that takes time, by identity."""
    calls: list[Call] = [
        op for program in module.programs for op in program.ops if isinstance(op, Call)
    ]
    split = any(call.task is not None and call.task.action is Action.WEIGHT for call in calls)
    sharing = [call for call in calls if _shares(module, costs, call)]
    counts = Counter(call.task for call in sharing)
    work = {
        id(call): costs.functions[call.fn.name] for call in calls if call.fn.name in costs.functions
    }
    for call in sharing:
        if call.task is not None:
            time = costs.of(call.task.action, call.task.stage, split)
            work[id(call)] = time / counts[call.task]
    return work


def _shares(module: Module, costs: Costs, call: Call) -> bool:
    """Whether a call takes its share of the time of its task."""
    if call.task is None or call.fn.name in costs.functions:
        return False
    return module.functions[call.fn.name].actor is not None


def _transfer(module: Module, costs: Costs) -> Callable[[Message], float]:
    def time(message: Message) -> float:
        op = next(op for op in message.ends.values() if not isinstance(op, Recv))
        link = costs.channels.get(message.chan, costs.link)
        if link is not None:
            return link.time(_volume(op))
        if op.task is None:
            return 0.0
        stage = op.task.stage
        if op.task.action is Action.FORWARD:
            return costs.between(stage)
        return costs.between(stage - 1) if stage else 0.0

    return time


def _volume(op: Op) -> int:
    """Bytes that a link carries for a message, or for each rank of a collective (as rings do)."""
    largest = max((_nbytes(value) for value in (*op.operands, *op.results)), default=0)
    if isinstance(op, Barrier):
        return 0
    if not isinstance(op, Collective) or isinstance(op, Broadcast):
        return largest
    others = len(op.group.ranks) - 1
    rounds = 2 if isinstance(op, AllReduce) else 1
    return rounds * largest * others // len(op.group.ranks)


def _nbytes(value: Value) -> int:
    type_ = value.type.value if isinstance(value.type, FutureType) else value.type
    return type_.nbytes if isinstance(type_, TensorType) else 0
