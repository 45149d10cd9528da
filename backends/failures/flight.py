"""Describe where ranks are, and which waits for which.

A position is a few integers. The plan is static, so everything else about a stalled step follows
from the module and the positions of all ranks. `where_ranks_are` makes the lines of all messages of
waits that do not end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...ir.ops import Call, Collective, Op, Recv, Send
from ...ir.ops.module import Module
from ...ir.text.plan_file import PlanFileError
from ...ir.text.printer import format_op
from .participants import is_device_only

ASKING: Final = 0.4
"""Seconds that ranks get to say where they are."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The position of a rank in its program.

    Attributes:
        rank: whose position it is.
        execution: number of the execution in progress, or of the last one.
        op: index in the rank's program of the op that it is at.
        awaited: index of the communication op whose completion it waits for, or None where it
            does not wait.
        running: True while an execution is in progress.
        is_ending: True if the rank has done its part, and waits until all have ended theirs.
        reporter: the rank that is to report the end of its program, if it waits for that report.
        seconds: how long ago it last began to wait or went on; None where that is not known.
    """

    rank: int
    execution: int
    op: int
    awaited: int | None = None
    running: bool = True
    reporter: int | None = None
    seconds: float | None = field(default=None, compare=False)
    is_ending: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Activity:
    """A process's description of what it does.

    Attributes:
        text: one line or more, in words; each line names its rank.
        thread: the id of the thread that does it; None for the main thread.
    """

    text: str
    thread: int | None = None


@dataclass(frozen=True, slots=True)
class Sight:
    """The answer of a process that another process has asked what it does.

    Attributes:
        text: what the process does, in words, with the line that its Python is at.
        function: of a process that gave no answer, the function that cg has called there, from its
            stack. The stack does not show the actor, but the program does.
    """

    text: str
    function: str = ""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that waits.

    Attributes:
        rank: the rank.
        reason: where it waits and for what, in words.
        on: the ranks that have to act before it can go on.
    """

    rank: int
    reason: str
    on: tuple[int, ...]


class FlightRecord:
    """Explains the positions of the ranks in one execution of a scheduled module.

    Args:
        module: the scheduled module.
        positions: the positions of ranks, as far as they are known.
        devices: the ranks whose hosts put their programs on devices, and do not wait for the
            devices.
        label: names the execution at the begin of each line, where there are several.

    Attributes:
        module: the scheduled module.
    """

    def __init__(
        self,
        module: Module,
        positions: Sequence[Position],
        devices: Collection[int] = (),
        label: str = "",
    ) -> None:
        self.module = module
        self._devices = devices
        self._label = label
        self._positions = {position.rank: position for position in positions}

    def blocked(self) -> list[Blocked]:
        """The ranks that wait, in ascending order."""
        entries = []
        for rank in sorted(self._positions):
            position = self._positions[rank]
            if position.running and position.reporter is not None:
                entries.append(self._explain_report(position, position.reporter))
            elif position.running and position.awaited is not None:
                entries.append(self._explain(position, position.awaited))
        return entries

    def cycle(self) -> tuple[int, ...]:
        """Ranks that wait for each other in a cycle, each for the next; () if there is no cycle."""
        try:
            edges = {blocked.rank: blocked.on for blocked in self.blocked()}
        except _UNREADABLE:  # `lines` says so
            return ()
        for start in edges:
            path: list[int] = []
            if _follow(start, edges, path, set()):
                return tuple(path)
        return ()

    def lines(self) -> dict[int, str]:
        """A line for every known rank."""
        positions = sorted(self._positions.items())
        try:
            blocked = {entry.rank: entry.reason for entry in self.blocked()}
            return {
                rank: self._label + (blocked.get(rank) or self._describe_free(position))
                for rank, position in positions
            }
        except _UNREADABLE as error:
            return {
                rank: f"{self._label}rank {rank} is at op {position.op} of its program, but not "
                f"all programs can be read: {error}"
                for rank, position in positions
            }

    def cycle_line(self) -> str | None:
        """The cycle in words; None if there is none."""
        cycle = self.cycle()
        if not cycle:
            return None
        return f"{self._label}cycle: " + " -> ".join(f"rank {r}" for r in (*cycle, cycle[0]))

    def describe(self) -> str:
        """Describe every known rank in a line, and the cycle if there is one."""
        return where_ranks_are([self])

    def _describe_free(self, position: Position) -> str:
        if not position.running and position.rank in self._devices:
            return (
                f"the host of rank {position.rank} has put all of execution {position.execution} "
                "on its device, which may not have ended it"
            )
        if not position.running:
            waits = "at its end for the others" if position.is_ending else "for nobody"
            return (
                f"rank {position.rank} has done its part of execution {position.execution}, and "
                f"waits {waits}"
            )
        op = self.module.program_of(position.rank).ops[position.op]
        since = "" if position.seconds is None else f" for {position.seconds:.1f} s at most"
        if isinstance(op, Call):
            return f"rank {position.rank} runs {_called(op, self.module, since)}"
        return f"rank {position.rank} runs{since and since + ':'} {_place(op)}"

    def _explain(self, position: Position, awaited: int) -> Blocked:
        program = self.module.program_of(position.rank)
        at, op = program.ops[position.op], program.ops[awaited]
        head = f"rank {position.rank} waits at {_place(at)}"
        if at is not op:
            head += f" for `{format_op(op)}`" if op.loc == at.loc else f" for {_place(op)}"
        if isinstance(op, Collective):
            return self._explain_collective(position, op, head)
        assert isinstance(op, (Send, Recv))
        message = f"message {op.seq} of channel {op.chan}"
        counterpart = self._find(op.peer, op)
        if counterpart is None:
            return Blocked(position.rank, f"{head}: rank {op.peer} never has {message}", (op.peer,))
        peer_opcode = "recv" if isinstance(op, Send) else "send"
        if op.peer not in self._positions:
            reason = f"{head}: it needs rank {op.peer}'s {peer_opcode} of {message}"
            return Blocked(position.rank, reason, (op.peer,))
        if self._issued(position, op.peer, counterpart):
            holder = op.peer if isinstance(op, Send) else position.rank
            reason = f"{head}: {message} is posted on both sides"
            if op.slot is not None:
                reason += f", but rank {holder} has not freed slot {op.slot}"
            return Blocked(position.rank, reason, (holder,))
        reason = f"{head}: rank {op.peer} has not come to its {peer_opcode} of {message}"
        return Blocked(position.rank, reason, (op.peer,))

    def _explain_report(self, position: Position, reporter: int) -> Blocked:
        """Explain a wait for the report of a rank that sends this one nothing else.

        So the last call of that rank is named. Where devices run the whole module, ranks report
        ahead of it.
        """
        program = self.module.program_of(reporter)
        if is_device_only(self.module):
            reason = f"rank {position.rank} waits for rank {reporter} to come to this execution"
            return Blocked(position.rank, reason, (reporter,))
        calls = [op for op in program.ops if isinstance(op, Call)]
        reason = f"rank {position.rank} waits for rank {reporter} to end its program"
        if calls:
            reason += f", whose last call is {_place(calls[-1])}"
        return Blocked(position.rank, reason, (reporter,))

    def _explain_collective(self, position: Position, op: Collective, head: str) -> Blocked:
        missing, unknown = [], []
        for rank in op.group.ranks:
            counterpart = self._find(rank, op)
            if counterpart is not None and rank not in self._positions:
                unknown.append(rank)
            elif counterpart is None or not self._issued(position, rank, counterpart):
                missing.append(rank)
        collective = f"{op.opcode} {op.seq} of channel {op.chan}"
        clauses = (
            [f"{_names(missing)} has not come to {collective}"] if missing or not unknown else []
        )
        if unknown:
            clauses.append(f"it is not known whether {_names(unknown)} has come to {collective}")
        reason = f"{head}: {', and '.join(clauses)}"
        return Blocked(position.rank, reason, tuple(sorted((*missing, *unknown))))

    def _find(self, rank: int, op: Send | Recv | Collective) -> int | None:
        """Index of the op of `rank` that matches `op`."""
        op_type = _COUNTERPART.get(type(op), type(op))
        for index, candidate in enumerate(self.module.program_of(rank).ops):
            if (
                isinstance(candidate, op_type)
                and isinstance(candidate, (Send, Recv, Collective))
                and (candidate.chan, candidate.seq) == (op.chan, op.seq)
            ):
                return index
        return None

    def _issued(self, asking: Position, rank: int, index: int) -> bool:
        """True if `rank` has issued its op `index` in the execution that `asking` is in."""
        position = self._positions[rank]
        if position.execution != asking.execution:
            return position.execution > asking.execution
        return not position.running or position.op > index


_UNREADABLE = (OSError, PlanFileError)
"""The errors of programs in a file that somebody has changed since it was loaded."""

_COUNTERPART: dict[type[Op], type[Op]] = {Send: Recv, Recv: Send}


def method_of(op: Call, module: Module) -> tuple[str | None, str]:
    """The actor of a call, if it has one, and the method or function."""
    function = module.functions[op.fn.name]
    if function.actor is None:
        return None, function.name
    # A name of Python has no dots: the part after one tells the functions of a method apart.
    return function.actor, function.name.removeprefix(f"{function.actor}.").partition(".")[0]


def where_ranks_are(
    records: Sequence[FlightRecord],
    sights: Mapping[int, Sight] = {},  # it is not changed
    otherwise: Mapping[int, str] = {},  # nor is it
) -> str:
    """Describe ranks in a line or more each, in their order, and cycles behind that.

    Args:
        records: of the executions in progress.
        sights: what was found out about ranks that were asked; it says more than their positions.
        otherwise: words for ranks that have no position and no sight.
    """
    modules = list({id(record.module): record.module for record in records}.values())
    texts: dict[int, list[str]] = {}
    for record in records:
        for rank, line in record.lines().items():
            texts.setdefault(rank, []).append(line)
    for rank, text in otherwise.items():
        texts.setdefault(rank, [text])
    for rank, sight in sights.items():
        texts[rank] = [_describe_sight(rank, sight, modules)]
    lines = [line for rank in sorted(texts) for line in texts[rank]]
    lines += [cycle for record in records if (cycle := record.cycle_line()) is not None]
    return "\n".join(f"  {line}" for line in lines)


def _describe_sight(rank: int, sight: Sight, modules: Sequence[Module]) -> str:
    """A rank's own description; without one, the calls that its stack may belong to.

    Args:
        rank: the rank.
        sight: what was found out about it.
        modules: the scheduled modules that it may be executing.
    """
    calls: dict[str, None] = {}
    for module in modules if sight.function else ():
        for op in module.program_of(rank).ops:
            if isinstance(op, Call) and method_of(op, module)[1] == sight.function:
                calls[_called(op, module)] = None
    if not calls:
        return sight.text
    first, *rest = sight.text.split("\n")
    return "\n".join([f"{first}; it runs {', or '.join(calls)}", *rest])


def _called(op: Call, module: Module, since: str = "") -> str:
    """The method, where it is, how long it has run, and the call."""
    actor, method = method_of(op, module)
    name = f"{actor}.{method}" if actor else method
    loc = module.functions[op.fn.name].loc
    at = "" if loc is None else f" ({loc.file}:{loc.line})"
    return f"{name}{at}{since}, called at {_place(op)}"


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks) or "nobody"


def _place(op: Op) -> str:
    """The user's line, if it is known, and the op."""
    return f"`{format_op(op)}`" if op.loc is None else f"{op.loc} (`{format_op(op)}`)"


def _follow(rank: int, edges: dict[int, tuple[int, ...]], path: list[int], dead: set[int]) -> bool:
    """Walk along `edges` until a rank comes up again; leaves just the cycle in `path`."""
    if rank in path:
        del path[: path.index(rank)]
        return True
    if rank in dead:
        return False
    path.append(rank)
    for successor in edges.get(rank, ()):
        if _follow(successor, edges, path, dead):
            return True
    path.pop()
    dead.add(rank)
    return False
