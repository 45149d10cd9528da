"""Run scheduled programs on an abstract machine in each order that hosts and devices allow.

It is an oracle for the checks, and shares no code with them: it knows the data types of the IR and
what the documents say of their meaning.

- A host puts the ops of its rank on queues, one after the other, and need not wait for them.
- A queue does what is on it in that order. An op *begins* when those ahead of it are *over*, and
  what it waits for. A communication begins when its own rank has come to it, also among those of
  its channel; it is over when the other ends allow. A receive into a slot begins when what came in
  the slot before has been given back.
- A value has a term, which says how it was computed, and lies in cells, each of which is a piece of
  memory. The term of a value is lost if one of its cells is written again or given back. The state
  of an actor lies in cells, too.
- Two ops on one cell of which one writes must not be under way at the same time: a race.

An op depends on what is over and never on what is not. So an action that is possible stays
possible until it happens, and all maximal runs are one set of actions in different orders.
Therefore a few runs show what all interleavings can do. If one run stands still, all do. Two ops
can be under way at the same time just if the one that began first in some run is held there and the
other one begins all the same; so `judge` holds each op once for which there is a conflict. Without
races every interleaving orders conflicting ops alike, and so computes the same values as one of
them. `explore` believes none of that, and plays all interleavings one by one: a test compares both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from cg.ir.ops import Alloc, Call, Collective, Op, Recv, Send, Wait
from cg.ir.ops.module import (
    FunctionKind,
    Module,
)

from .abstract_machine import HOSTS_TRANSPORTS, Hosts, Machine, Model, Phase
from .abstract_memory import Memory, Term, Terms
from .abstract_programs import Programs


@dataclass(frozen=True)
class Verdict:
    """What can happen to programs.

    Attributes:
        faults: standstills, races and the like, in words; none if all is well.
        outputs: what each rank returns, by terms.
        states: the state in which actors are left.
    """

    faults: tuple[str, ...]
    outputs: Mapping[int, tuple[Term, ...]] = field(default_factory=dict)
    states: Mapping[Hashable, int] = field(default_factory=dict)


def judge(
    module: Module, terms: Terms, *, driven: bool = False, hosts: Hosts = Hosts.AHEAD
) -> Verdict:
    """What can happen in any interleaving of the programs of a module.

    Args:
        terms: those of verdicts that are compared.
        driven: whether one rank starts executions of the programs.
        hosts: of the machine that is to have no race.
    """
    loose = Model(hosts, buffered=True)
    programs = Programs(module)
    faults = [
        f"standstill of {model}"
        for model in _models(programs, driven)
        if not Machine(programs, model).run()
    ]
    faults += [f"slot {slot} of channel {chan} is never given back" for chan, slot in programs.kept]
    faults += _torn_graphs(module)
    memory = Memory.of(programs, terms)
    machine = Machine(programs, loose)
    machine.run(memory=memory)
    faults += memory.faults
    faults += _races(programs, loose)
    states = {programs.state_cells[cell]: term for cell, term in memory.states.items()}
    return Verdict(tuple(dict.fromkeys(faults)), memory.outputs, states)


_LOOSE = Model(buffered=True)


def _torn_graphs(module: Module) -> Iterator[str]:
    """Graphs that are several parts of a program, or that hold what only a host can do.

    A device replays a graph as a whole, and runs no Python meanwhile.
    """
    for program in module.programs:
        ops = [op for op in program.ops if not isinstance(op, Alloc)]
        parts = [number for number, _ in groupby(op.graph for op in ops) if number is not None]
        if len(parts) != len(set(parts)):
            yield f"rank {program.rank}: a graph is several parts of the program"
        hosts = {v for op in ops if _is_of_hosts(op, module) for v in op.results}
        for op in ops:
            is_opaque = isinstance(op, Call) and (
                op.key is not None or module.functions[op.fn.name].kind is FunctionKind.OPAQUE
            )
            waits = isinstance(op, Wait) and not hosts.isdisjoint(op.operands)
            if op.graph is not None and (is_opaque or waits or _is_of_hosts(op, module)):
                yield f"rank {program.rank}: {op.opcode} is replayed, which its host has to do"


def _is_of_hosts(op: Op, module: Module) -> bool:
    if not isinstance(op, Send | Recv | Collective):
        return False
    return module.channels[op.chan or 0].via in HOSTS_TRANSPORTS


def _models(programs: Programs, driven: bool) -> Iterator[Model]:
    """The machines that may come to a standstill: on those nothing is buffered."""
    channels = programs.module.channels.values()
    yield Model(Hosts.AHEAD)
    yield Model(Hosts.WAITING)
    if any(channel.collective for channel in channels):
        yield Model(Hosts.WAITING, one_queue=True)
    if any(channel.via not in HOSTS_TRANSPORTS for channel in channels):
        yield Model(Hosts.STRICT)
        whole = any(w.message is not None and w.op.graph is not None for w in programs.works)
        if driven and not whole:
            yield Model(Hosts.ANNOUNCED)


def _races(programs: Programs, model: Model) -> Iterator[str]:
    """Pairs of ops that can be under way together, though one of them writes what both touch."""
    for held, rivals in _conflicts(programs).items():
        machine = Machine(programs, model)
        machine.run(held)
        for number in sorted(rivals & machine.beside):
            yield _race(programs, held, number)


def _race(programs: Programs, one: int, other: int) -> str:
    first, second = programs.works[one], programs.works[other]
    return f"race on rank {first.rank}: {_named(first.op)} beside {_named(second.op)}"


def _named(op: Op) -> str:
    values = op.results or op.operands
    return f"{op.opcode} of %{values[0].name}" if values else op.opcode


def _conflicts(programs: Programs) -> dict[int, set[int]]:
    """For each work those of other queues, or of its batch, that must not be beside it."""
    found: dict[int, set[int]] = {}
    for line in programs.lines.values():
        for one in line:
            first = programs.works[one]
            rivals = {other for other in line if first.rivals(programs.works[other])}
            if rivals:
                found[one] = rivals
    return found


def explore(module: Module, terms: Terms) -> tuple[set[str], set[Hashable]]:
    """Play all interleavings: the faults of any, and the ends that there are, each in terms.

    It takes time exponential in the ops that are side by side.
    """
    programs = Programs(module)
    faults: set[str] = set()
    ends: set[Hashable] = set()
    conflicts = _conflicts(programs)
    start = Machine(programs, _LOOSE), Memory.of(programs, terms)
    seen: set[Hashable] = set()
    pending = [start]
    while pending:
        machine, memory = pending.pop()
        key = machine.key(), memory.key()
        if key in seen:
            continue
        seen.add(key)
        faults.update(memory.faults)
        begun = [n for n, phase in enumerate(machine.phases) if phase is Phase.BEGUN]
        for one in begun:
            for other in begun:
                if other in conflicts.get(one, ()):
                    faults.add("race")
        before = len(pending)
        pending += _steps(machine, memory)
        if len(pending) == before:
            if any(phase is not Phase.OVER for phase in machine.phases):
                faults.add("standstill")
            ends.add(memory.end_key())
    return faults, ends


def _steps(machine: Machine, memory: Memory) -> Iterator[tuple[Machine, Memory]]:
    """What may come next, one action each."""
    for rank in machine.at:
        if machine.can_put(rank):
            other = machine.copy()
            other.put(rank)
            yield other, memory
    for number in range(len(machine.phases)):
        if machine.can_begin(number):
            other, after = machine.copy(), memory.copy()
            other.phases[number] = Phase.BEGUN
            after.begin(number)
            yield other, after
        if machine.can_end(number):
            other, after = machine.copy(), memory.copy()
            other.phases[number] = Phase.OVER
            after.end(number)
            yield other, after
