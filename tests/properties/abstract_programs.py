"""Programs as an abstract machine sees them: works on queues, and the cells that these touch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from cg.ir.attributes import Effect, Stream
from cg.ir.ops import (
    Alloc,
    AllReduce,
    Assemble,
    Broadcast,
    Call,
    Collective,
    Constant,
    Copy,
    CopyStart,
    Free,
    Op,
    Recv,
    Reserve,
    Send,
    Slice,
    Value,
    View,
    Wait,
)
from cg.ir.ops.module import (
    Function,
    Module,
    Program,
)
from cg.ir.types import FutureType, TensorType

Message = tuple[int, int]
"""The channel and the number of a message."""


@dataclass(slots=True)
class Cell:
    """A piece of memory of one rank.

    Attributes:
        given: whether the program has been given it, and so must leave it alone.
        slot: the receive that brings what lies in it in a slot of its channel.
        extent: the pieces of memory that it is, where other cells may be the same.
        is_part: whether it is part of another cell, which holds that memory.
        freed: the op that gives it back: the last `free` of a value that lies in it.
    """

    given: bool = False
    slot: Recv | None = None
    extent: tuple[int, ...] = ()
    is_part: bool = False
    freed: int | None = None


@dataclass(slots=True)
class Work:
    """An op of one rank, as its queue does it.

    Attributes:
        queue: what does it, after those put there before.
        needs: the ops that have to be over before.
        reads, writes: cells.
        message: of a communication.
        frees: the cells that it gives back.
        batch: of a message.
        behind: the op that gives back the memory that this one takes; -1 if none does.
    """

    rank: int
    op: Op
    queue: Hashable
    needs: tuple[int, ...] = ()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    message: Message | None = None
    frees: tuple[int, ...] = ()
    batch: int | None = None
    behind: int | None = None

    def rivals(self, other: Work) -> bool:
        """True if both touch a cell, one of them writes it, and no queue keeps them apart."""
        if self is other or (self.queue == other.queue and self.batch is None):
            return False
        if not self.writes.isdisjoint(other.writes):
            return True
        return not (self.writes.isdisjoint(other.reads) and self.reads.isdisjoint(other.writes))


class Programs:
    """The programs of a module, as works, queues and cells.

    Attributes:
        works: of all ranks.
        lines: for each rank its works, in the order of its host.
        cells: by number.
        lies: the cells of each value.
        made: the work that makes a value.
        ends: for each message its works, by rank.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.works: list[Work] = []
        self.lines: dict[int, list[int]] = {}
        self.cells: list[Cell] = []
        self.lies: dict[Value, tuple[int, ...]] = {}
        self.made: dict[Value, int] = {}
        self.promised: dict[Value, int] = {}
        self.ends: dict[Message, dict[int, int]] = defaultdict(dict)
        self.states: dict[tuple[int, object], int] = {}
        self._pieces = 0
        for program in module.programs:
            self._read(program)
        self._find_frees()
        self._link_slots()
        self.state_cells = {cell: key for key, cell in self.states.items()}

    # -- reading -------------------------------------------------------------------------------

    def _read(self, program: Program) -> None:
        rank = program.rank or 0
        line = self.lines[rank] = []
        self._arena = self._divide_arena(program)
        for value in program.params:
            self.lies[value] = (self._cell(given=True),)
        for op in program.ops:
            work = Work(rank, op, (rank, _stream_of(op)))
            number = len(self.works)
            self.works.append(work)
            line.append(number)
            self._place(op, rank)
            self._touch(work)
            if isinstance(op, Send | Recv | Collective):
                work.message = (op.chan or 0, op.seq or 0)
                work.batch = op.batch if isinstance(op, Send | Recv) else None
                self.ends[work.message][rank] = number
            for value in op.results:
                self.made[value] = number
                if isinstance(value.type, FutureType):
                    self.promised[value] = number
            if isinstance(op, Wait):
                work.needs = tuple(self.made[v] for v in op.operands if v in self.made)
            elif isinstance(op, Free):
                work.needs = tuple(self.made[v] for v in op.operands[1:] if v in self.made)

    def _divide_arena(self, program: Program) -> dict[Op, tuple[int, ...]]:
        """The pieces of a rank's arena that each `alloc` takes."""
        spans = {
            op: (op.offset, op.offset + op.result.type.nbytes)
            for op in program.ops
            if isinstance(op, Alloc) and isinstance(op.result.type, TensorType)
        }
        bounds = pairwise(sorted({at for span in spans.values() for at in span}))
        pieces = {bound: self._piece() for bound in bounds}
        return {
            op: tuple(
                piece for (low, high), piece in pieces.items() if first <= low and high <= end
            )
            for op, (first, end) in spans.items()
        }

    def _cell(self, **attributes: object) -> int:
        self.cells.append(Cell(**attributes))  # type: ignore[arg-type]
        return len(self.cells) - 1

    def _place(self, op: Op, rank: int) -> None:
        """Say in which cells the results of an op lie."""
        first = self.lies.get(op.operands[0], ()) if op.operands else ()
        if isinstance(op, Recv):
            (value,) = op.results
            own = (self._cell(slot=op if op.slot is not None else None),)
            self.lies[value] = first if op.operands else own
        elif isinstance(op, Send):
            self.lies[op.results[0]] = ()
        elif isinstance(op, CopyStart):
            self.lies[op.results[0]] = (self._cell(),)
        elif isinstance(op, Collective):
            shared = isinstance(op, Broadcast) or (isinstance(op, AllReduce) and op.donated)
            self.lies[op.results[0]] = (self._cell(), *(first if shared else ()))
        elif isinstance(op, Wait | View):
            self.lies.update(dict.fromkeys(op.results, first))
        elif isinstance(op, Slice):
            self.lies[op.results[0]] = (self._cell(), *first)
        elif isinstance(op, Copy):
            into = self.lies[op.operands[1]] if len(op.operands) > 1 else (self._cell(),)
            self.lies[op.results[0]] = into
        elif isinstance(op, Constant):
            self.lies[op.results[0]] = (self._cell(given=op.ref is not None),)
        elif isinstance(op, Alloc):
            self.lies[op.results[0]] = (self._cell(extent=self._arena[op]),)
        elif isinstance(op, Reserve):
            pieces = tuple(self._piece() for _ in op.regions)
            self.lies[op.results[0]] = (self._cell(extent=pieces),)
            for value, piece in zip(op.results[1:], pieces, strict=True):
                self.lies[value] = (self._cell(extent=(piece,), is_part=True),)
        elif isinstance(op, Assemble):
            in_place = len(op.operands) == len(op.regions) + 1
            self.lies[op.results[0]] = first if in_place else (self._cell(),)
        elif isinstance(op, Call):
            aliases = self.module.functions[op.fn.name].aliases
            for number, value in enumerate(op.results):
                others = [self.lies[op.operands[i]] for o, i in aliases if o == number]
                self.lies[value] = (self._cell(), *(c for cells in others for c in cells))

    def _touch(self, work: Work) -> None:
        """Say which cells an op reads and writes."""
        op = work.op
        reads: set[int] = set()
        writes: set[int] = set()
        taken = () if isinstance(op, Wait | View | Free | Recv | Alloc) else op.operands
        if isinstance(op, Copy):
            taken = op.operands[:1]
        elif isinstance(op, Assemble) and len(op.operands) == len(op.regions) + 1:
            taken = op.operands[1:]
        for value in taken:
            reads.update(self.lies[value])
        if isinstance(op, Recv | Alloc | Reserve) or (isinstance(op, Copy) and op.operands[1:]):
            for value in op.results:
                writes.update(self.lies[value])
        elif isinstance(op, AllReduce) and op.donated:
            writes.update(self.lies[op.results[0]])
        elif not isinstance(op, Wait | View | Send | Assemble):
            for value in op.results:
                writes.update(self.lies[value][:1])
        elif isinstance(op, Assemble) and taken is op.operands:
            writes.update(self.lies[op.results[0]])
        if isinstance(op, Call):
            for key, how in state_of(self.module.functions[op.fn.name]):
                cell = self.states.setdefault((work.rank, key), len(self.cells))
                if cell == len(self.cells):
                    self._cell()
                (reads if how == "read" else writes).add(cell)
        work.reads, work.writes = self._with_pieces(reads), self._with_pieces(writes)

    def _piece(self) -> int:
        """A new piece of memory, as a number below 0."""
        self._pieces -= 1
        return self._pieces

    def _with_pieces(self, cells: set[int]) -> frozenset[int]:
        """Cells, and the pieces of memory that they are."""
        pieces = {piece for cell in cells for piece in self.cells[cell].extent}
        return frozenset(cells | pieces)

    def _find_frees(self) -> None:
        """Memory is given back at the last `free` of a value that lies in it."""
        for number, work in enumerate(self.works):
            if isinstance(work.op, Free):
                for cell in self.lies[work.op.operands[0]]:
                    self.cells[cell].freed = number
        for number, work in enumerate(self.works):
            if isinstance(work.op, Free):
                lies = self.lies[work.op.operands[0]]
                cells = {c for c in lies if self.cells[c].freed == number}
                work.frees = tuple(c for c in cells if not self.cells[c].given)
                whole = {c for c in work.frees if not self.cells[c].is_part}
                work.writes = self._with_pieces(whole) | frozenset(work.frees)

    def _link_slots(self) -> None:
        last: dict[tuple[int, int], int | None] = {}
        for message in sorted(self.ends):
            for number in self.ends[message].values():
                op = self.works[number].op
                if isinstance(op, Recv) and op.slot is not None and not op.operands:
                    key = (op.chan, op.slot)
                    (cell,) = self.lies[op.result]
                    if key in last:
                        before = last[key]
                        self.works[number].behind = -1 if before is None else before
                    last[key] = self.cells[cell].freed
        self.kept = [key for key, freed in last.items() if freed is None]


def _stream_of(op: Op) -> Stream:
    """The stream of an op; where the program does not say, the usual one of its kind."""
    if op.stream is not None:
        return op.stream
    if isinstance(op, Send):
        return Stream.SEND
    if isinstance(op, Recv):
        return Stream.RECV
    return Stream.COLLECTIVE if isinstance(op, Collective) else Stream.COMPUTE


def state_of(function: Function) -> Iterator[tuple[object, str]]:
    """The pieces of state that a call touches, and how: read, add or write."""
    owners: list[tuple[object, Effect]] = [(function.actor, function.effect)]
    for other, effect in function.shares.effects:
        owners.append((frozenset((function.actor, other)), effect))
    buckets = function.buckets or (0,)
    for owner, effect in owners:
        if effect in (Effect.READ, Effect.UPDATE, Effect.ACCUMULATE):
            yield (owner, "weights"), "read"
        if effect is Effect.READ:
            yield (owner, "statistics"), "read"
        if effect is Effect.UPDATE:
            yield (owner, "statistics"), "write"
        if effect in (Effect.ACCUMULATE, Effect.REDUCE):
            for bucket in buckets:
                how = "add" if effect is Effect.ACCUMULATE else "write"
                yield (owner, f"gradients {bucket}"), how
        if effect is Effect.WRITE:
            for name in ("weights", "statistics", *(f"gradients {b}" for b in range(_BUCKETS))):
                yield (owner, name), "write"


_BUCKETS = 4
"""A write may touch all buckets of gradients; modules of tests have no more than these."""
