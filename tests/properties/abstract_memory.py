"""The memory of an abstract machine: symbolic values, and the cells where they lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from cg.ir.ops import (
    AllGather,
    Alloc,
    AllReduce,
    AllToAll,
    Assemble,
    Barrier,
    Broadcast,
    Call,
    Collective,
    Constant,
    Copy,
    CopyStart,
    Free,
    Gather,
    Op,
    Recv,
    ReduceScatter,
    Return,
    RowCollective,
    Scatter,
    Send,
    Slice,
    Value,
    View,
    Wait,
)
from cg.ir.ops.module import (
    FunctionKind,
)

from .abstract_programs import Programs, Work, state_of

Term = int | None
"""A way in which a value is computed, by number; None: nobody knows what is there."""


@dataclass(slots=True)
class Datum:
    """A value: its term, and the versions of the cells where it lies."""

    term: Term
    stamps: tuple[tuple[int, int], ...]


class Terms:
    """Numbers for terms, equal for equal ones; those of several machines can share them."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, *term: Hashable) -> int:
        return self._numbers.setdefault(term, len(self._numbers))


@dataclass(slots=True)
class Memory:
    """What lies in the cells of a machine.

    Attributes:
        data: of values, once they are made.
        versions: how often each cell was written.
        states: the terms of actors' states, by cell.
        outputs: what each rank returns.
        faults: what has gone wrong.
    """

    programs: Programs
    terms: Terms
    data: dict[Value, Datum] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    states: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, tuple[Term, ...]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    _read: dict[int, tuple[Term, ...]] = field(default_factory=dict)
    _made: dict[int, Term] = field(default_factory=dict)
    _taken: set[int] = field(default_factory=set)
    _sums: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    @staticmethod
    def of(programs: Programs, terms: Terms) -> Memory:
        memory = Memory(programs, terms)
        for program in programs.module.programs:
            for value in program.params:
                term = terms.of("input", program.rank, value.name)
                memory.data[value] = Datum(term, memory._stamps(value))
        return memory

    def copy(self) -> Memory:
        """A memory of its own with the same in it."""
        made = Memory(self.programs, self.terms)
        made.data, made.states = dict(self.data), dict(self.states)
        made.versions.update(self.versions)
        made.outputs, made.faults = dict(self.outputs), list(self.faults)
        made._read, made._made = dict(self._read), dict(self._made)
        made._taken, made._sums = set(self._taken), dict(self._sums)
        return made

    def key(self) -> Hashable:
        """Equal for memories with the same in them."""
        data = frozenset((value, datum.term, datum.stamps) for value, datum in self.data.items())
        return data, frozenset(self.versions.items()), self.end_key(), tuple(self.faults)

    def end_key(self) -> Hashable:
        """Equal for memories in which the same has come out."""
        return frozenset(self.outputs.items()), frozenset(self.states.items())

    def _stamps(self, value: Value) -> tuple[tuple[int, int], ...]:
        """The versions of the cells where a value lies, as they are now."""
        cells: set[int] = set()
        for cell in self.programs.lies[value]:
            cells |= {cell, *self.programs.cells[cell].extent}
        return tuple([(cell, self.versions[cell]) for cell in sorted(cells)])

    def _fault(self, work: Work, what: str) -> None:
        self.faults.append(f"rank {work.rank}: {work.op.opcode} {what}")

    def begin(self, number: int) -> None:
        """Let a work take what it reads, and lay its hands on what it writes."""
        work = self.programs.works[number]
        op = work.op
        self._read[number] = tuple(self._take(work, value) for value in _read_by(op))
        for cell in work.writes:
            self.versions[cell] += 1
            if cell >= 0 and self.programs.cells[cell].given and not isinstance(op, Constant):
                self._fault(work, "writes to what the program has been given")
        if isinstance(op, Alloc):
            pieces = {cell for cell in work.writes if cell < 0}
            if pieces & self._taken:
                self._fault(work, "takes memory that another value has")
            self._taken |= pieces
        elif isinstance(op, Free):
            self._taken -= work.writes
            if all(self.programs.cells[c].given for c in self.programs.lies[op.operands[0]]):
                self._fault(work, "gives back what the program has been given")
        elif isinstance(op, Call):
            self._call(number, work, op)
        elif isinstance(op, Return):
            self._hand_out(work, op.operands)
            self.outputs[work.rank] = self._read[number]

    def _take(self, work: Work, value: Value) -> Term:
        datum = self.data.get(value)
        if datum is None:
            self._fault(work, f"takes %{value.name} before it is made")
            return None
        if any(self.versions[cell] != version for cell, version in datum.stamps):
            self._fault(work, f"takes %{value.name}, which is not there any more")
        if datum.term is None:
            self._fault(work, f"takes %{value.name}, which nobody has written")
        return datum.term

    def _hand_out(self, work: Work, values: Sequence[Value]) -> None:
        for value in values:
            if any(self.programs.cells[cell].slot for cell in self.programs.lies[value]):
                self._fault(work, f"hands out %{value.name}, which lies in a slot")

    def _call(self, number: int, work: Work, op: Call) -> None:
        function = self.programs.module.functions[op.fn.name]
        if function.kind is FunctionKind.OPAQUE:
            self._hand_out(work, op.operands)
        cells, how = [], []
        for key, each in state_of(function):
            cells.append(self.programs.states[work.rank, key])
            how.append(each)
        taken = tuple(self._state(c) for c, each in zip(cells, how, strict=True) if each != "add")
        term = self.terms.of("call", op.fn.name, op.key, self._read[number], taken)
        self._made[number] = term
        for cell, each in zip(cells, how, strict=True):
            if each == "write":
                key = self.programs.state_cells[cell]
                self.states[cell] = self.terms.of("written", term, key)
            elif each == "add":
                self.states[cell] = self._added(self._state(cell), term)

    def _state(self, cell: int) -> int:
        key = self.programs.state_cells[cell]
        return self.states.setdefault(cell, self.terms.of("state", *key))

    def _added(self, to: int, term: int) -> int:
        """The sum of a state and a term; sums of the same terms are one, whatever their order."""
        base, parts = self._sums.get(to, (to, ()))
        parts = tuple(sorted((*parts, term)))
        made = self.terms.of("sum", base, parts)
        self._sums[made] = base, parts
        return made

    def end(self, number: int) -> None:
        """Let a work have made its results."""
        work = self.programs.works[number]
        for index, value in enumerate(work.op.results):
            self.data[value] = self._made_by(number, work, index, value)

    def _made_by(self, number: int, work: Work, index: int, value: Value) -> Datum:
        op, read = work.op, self._read[number]
        if isinstance(op, Wait):
            datum = self.data.get(op.operands[0])
            return Datum(None, ()) if datum is None else datum
        if isinstance(op, View):
            datum = self.data.get(op.operands[0]) or Datum(None, ())
            part = op.dim, op.start, op.length
            return Datum(self.terms.of("view", part, datum.term), datum.stamps)
        # What lies where an operand lies is lost if that has changed since that was made.
        known = {c: n for v in op.operands if v in self.data for c, n in self.data[v].stamps}
        stamps = tuple(
            [(c, n if c in work.writes else known.get(c, n)) for c, n in self._stamps(value)]
        )
        return Datum(self._term(number, work, index, value, read), stamps)

    def _term(
        self, number: int, work: Work, index: int, value: Value, read: tuple[Term, ...]
    ) -> Term:
        op, of = work.op, self.terms.of
        if isinstance(op, Call):
            return of("result", self._made[number], index)
        if isinstance(op, Copy | CopyStart):
            return read[0]
        if isinstance(op, Constant):
            return of("constant", str(op.fill), str(op.ref), str(value.type))
        if isinstance(op, Slice):
            return of("slice", str(op.region), read)
        if isinstance(op, Assemble):
            return of("assemble", str(op.regions), read)
        if isinstance(op, Recv):
            return self._received(work, op)
        if isinstance(op, Send):
            return of("sent")
        if isinstance(op, Collective):
            return self._exchanged(work, op)
        return None

    def _received(self, work: Work, op: Recv) -> Term:
        assert work.message is not None, "a receive has a message"
        for number in self.programs.ends[work.message].values():
            send = self.programs.works[number].op
            if isinstance(send, Send):
                if send.slot != op.slot:
                    self._fault(work, "looks into another slot than the message came in")
                (term,) = self._read[number]
                return term
        return None

    def _exchanged(self, work: Work, op: Collective) -> Term:
        assert work.message is not None, "a collective has a message"
        ends = self.programs.ends[work.message]
        given = tuple(
            self._read.get(ends[rank], (None,)) if rank in ends else None for rank in op.group.ranks
        )
        how = (
            op.opcode,
            str(getattr(op, "op", "")),
            getattr(op, "dim", None),
            getattr(op, "root", None),
        )
        if isinstance(op, Broadcast):
            return self._read[ends[op.root]][0]
        if isinstance(op, Barrier) or (isinstance(op, Gather) and op.root != work.rank):
            return self.terms.of("done")
        if isinstance(op, RowCollective):  # zeros for rows of others, so each has its own
            return self.terms.of(op.opcode, op.experts, op.lead, given, work.rank)
        own = work.rank if isinstance(op, ReduceScatter | AllToAll | Scatter) else None
        assert isinstance(op, AllReduce | AllGather | Gather) or own is not None
        return self.terms.of(how, given, own)


def _read_by(op: Op) -> tuple[Value, ...]:
    """The operands that an op reads."""
    if isinstance(op, Wait | View | Free | Recv | Alloc):
        return ()
    if isinstance(op, Copy):
        return op.operands[:1]
    in_place = isinstance(op, Assemble) and len(op.operands) == len(op.regions) + 1
    return op.operands[1:] if in_place else op.operands
