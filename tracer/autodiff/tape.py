"""Tape: the calls of a step through which gradients flow, and those that a loss reaches."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from ...ir.ops import Backward, Call, Op, Value
from ...ir.types import ObjectType, TensorType
from ..functions.call import Callee


@dataclass(eq=False, slots=True)
class Entry:
    """An op through which gradients flow.

    Attributes:
        op: a call, or a collective.
        callee: what a call calls; None for a collective.
        needed: which of the operands require a gradient.
        at: its index in the program.
        spent: the backward that has gone through it.
    """

    op: Op
    callee: Callee | None
    needed: tuple[bool, ...]
    at: int
    spent: Backward | None = None


@dataclass(frozen=True, slots=True)
class Reached:
    """A call that a backward goes through, and the masks of its derivative."""

    entry: Entry
    call: Call
    callee: Callee
    grad_outputs: tuple[int, ...]
    grad_inputs: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Tape:
    """Record, in order, the ops through which gradients flow, as autograd's graph does."""

    _entries: list[Entry] = field(default_factory=list)
    _makers: dict[Value, int] = field(default_factory=dict)
    _cuts: dict[Value, Op] = field(default_factory=dict)
    _untold: dict[Value, tuple[Op, Callee | None]] = field(default_factory=dict)

    @property
    def is_cut(self) -> bool:
        """True if any value lacks a gradient that plain Python would give it."""
        return bool(self._cuts)

    def cut(self, op: Op, starts: bool = False) -> None:
        """Take note that the results of an op lack a gradient.

        They do if the op is a call that takes values with gradients and is opaque, so that it
        `starts` the lack, or if an operand of the op does.
        """
        cause = op if starts else None
        for value in op.operands:
            cause = cause or self._cuts.get(value)
        if cause is not None:
            for value in op.results:
                if isinstance(value.type, ObjectType) or _is_floating(value):
                    self._cuts[value] = cause

    def cause_of_cut(self, value: Value) -> Op | None:
        """The opaque call through which plain Python would send the gradient of a value."""
        return self._cuts.get(value)

    @property
    def is_untold(self) -> bool:
        """True if any value may lack a gradient, which only the run of an opaque call can tell."""
        return bool(self._untold)

    def leave_untold(self, op: Op, source: Callee | None = None) -> None:
        """Take note that the results of an op may lack a gradient that plain Python would give.

        They may if the op calls `source`, which is opaque, so that nobody has seen what it does
        with its actor's parameters; or if an operand of the op may.
        """
        if source is None and not any(value in self._untold for value in op.operands):
            return
        for value in op.results:
            if isinstance(value.type, ObjectType) or _is_floating(value):
                self._untold[value] = (op, source)

    def opaque_sources(self, losses: list[Value]) -> list[tuple[Call, Callee]]:
        """The opaque calls whose results may, for all that is known, send losses gradients."""
        found: dict[int, tuple[Call, Callee]] = {}
        seen = set(losses)
        stack = list(losses)
        while stack:
            op, source = self._untold.get(stack.pop(), (None, None))
            if op is None:
                continue
            if source is not None and isinstance(op, Call):
                found[id(op)] = (op, source)
            new = [value for value in op.operands if value not in seen]
            seen.update(new)
            stack += new
        return list(found.values())

    def record(self, entry: Entry) -> None:
        """Take note of an op, some of whose results require gradients."""
        self._makers.update(dict.fromkeys(entry.op.results, len(self._entries)))
        self._entries.append(entry)

    def maker(self, value: Value) -> Entry | None:
        """The entry that made a value; None if none did, as for an input of the step."""
        index = self._makers.get(value)
        return None if index is None else self._entries[index]

    def reach(self, losses: list[Value]) -> tuple[list[Entry], list[Reached], list[Value]]:
        """Find what a backward from the losses goes through.

        Returns:
            All entries and, of these, the calls with exact masks, both latest first; and the
            values that require a gradient and that no entry has made.
        """
        reached = set(losses)
        heap: list[int] = []
        strays: list[Value] = []
        for loss in losses:
            self._push(loss, heap, strays)
        entries: list[Entry] = []
        calls: list[Reached] = []
        last = None
        # The latest first: when an entry's turn comes, all that uses its results has had its own.
        while heap:
            index = -heappop(heap)
            if index == last:
                continue
            last = index
            entry = self._entries[index]
            entries.append(entry)
            if isinstance(entry.op, Call) and entry.callee is not None:
                calls.append(_masks(entry, entry.op, entry.callee, reached))
            for value, needed in zip(entry.op.operands, entry.needed, strict=True):
                if needed and value not in reached:
                    reached.add(value)
                    self._push(value, heap, strays)
        return entries, calls, strays

    def _push(self, value: Value, heap: list[int], strays: list[Value]) -> None:
        index = self._makers.get(value)
        if index is None:
            strays.append(value)
        else:
            heappush(heap, -index)


def _is_floating(value: Value) -> bool:
    type_ = value.type
    return isinstance(type_, TensorType) and type_.dtype.is_differentiable


def _masks(entry: Entry, call: Call, callee: Callee, reached: set[Value]) -> Reached:
    outputs = tuple(i for i, value in enumerate(call.results) if value in reached)
    inputs = tuple(i for i, needed in enumerate(entry.needed) if needed)
    return Reached(entry, call, callee, outputs, inputs)
