"""The tape: the ops of a step through which gradients flow, and those that a backward reaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ....ir.ops import Backward, Call, Op, Value
from ....ir.types import ObjectType, TensorType
from ...values.interface import Callee


@dataclass(eq=False, slots=True)
class TapeEntry:
    """An op through which gradients flow.

    Attributes:
        op: a call, a collective or a transfer.
        callee: the function of a call; None for other ops.
        needed: whether each operand requires a gradient.
        at: the op's index in the program.
        spent: the backward that has gone through the op; None before.
    """

    op: Op
    callee: Callee | None
    needed: tuple[bool, ...]
    at: int
    spent: Backward | None = None


@dataclass(frozen=True, slots=True)
class ReachedCall:
    """A call that a backward goes through, and the derivative that it needs.

    Attributes:
        entry: the entry of the call.
        call, callee: the call and its function.
        grad_outputs: the indices of the outputs that get cotangents.
        grad_inputs: the indices of the operands that need cotangents.
    """

    entry: TapeEntry
    call: Call
    callee: Callee
    grad_outputs: tuple[int, ...]
    grad_inputs: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Tape:
    """Records, in order, the ops through which gradients flow, like the graph of autograd."""

    _entries: list[TapeEntry] = field(default_factory=list)
    _makers: dict[Value, int] = field(default_factory=dict)
    _lacking: dict[Value, tuple[Op, Callee | None]] = field(default_factory=dict)

    def record(self, op: Op, callee: Callee | None, needed: tuple[bool, ...], at: int) -> None:
        """Record the last op of the step.

        Gradients flow through an op if any operand needs one. The result of an opaque call may lack
        a gradient that plain Python would give it, since the tracer does not see what the function
        does with its actor's parameters. The same holds for the results that are computed from it.

        Args:
            op: a call, a collective or a transfer.
            callee, needed, at: as in `TapeEntry`.
        """
        if any(needed) if callee is None else callee.differentiable:
            self._makers.update(dict.fromkeys(op.results, len(self._entries)))
            self._entries.append(TapeEntry(op, callee, needed, at))
        source = callee if callee is not None and callee.may_accumulate else None
        if source is None:
            lacking = self._lacking
            if not lacking or not (callee is None or callee.propagates_grad):
                return
            if not any(value in lacking for value in op.operands):
                return
        for value in op.results:
            if isinstance(value.type, ObjectType) or _is_floating(value):
                self._lacking[value] = (op, source)

    def opaque_sources(self, losses: list[Value]) -> list[tuple[Call, Callee]]:
        """The opaque calls, with their functions, through which losses may lose gradients."""
        calls: dict[int, tuple[Call, Callee]] = {}
        visited = set(losses)
        stack = list(reversed(losses))
        while stack:
            op, source = self._lacking.get(stack.pop(), (None, None))
            if op is None:
                continue
            if source is not None and isinstance(op, Call):
                calls[id(op)] = (op, source)
            new = [value for value in reversed(op.operands) if value not in visited]
            visited.update(new)
            stack += new
        return list(calls.values())

    def reach(
        self, losses: list[Value], inputs_of: Callable[[ReachedCall], tuple[int, ...]]
    ) -> tuple[list[TapeEntry], list[ReachedCall], list[Value]]:
        """Find the ops that a backward from the losses goes through.

        Args:
            losses: the values from which the backward starts.
            inputs_of: gives the indices of a call's operands whose cotangents its derivative gives,
                or may give if it is not known yet.

        Returns:
            The entries of all ops, latest first; those of calls, with their masks, latest first;
            and the values that require a gradient and are not results of any entry.
        """
        reached = set(losses)
        heap: list[int] = []
        strays: list[Value] = []
        for loss in losses:
            self._push(loss, heap, strays)
        entries: list[TapeEntry] = []
        calls: list[ReachedCall] = []
        last = None
        # Latest first: all users of an entry's results are visited before the entry itself.
        while heap:
            index = -heappop(heap)
            if index == last:
                continue
            last = index
            entry = self._entries[index]
            entries.append(entry)
            inputs = tuple(i for i, needed in enumerate(entry.needed) if needed)
            if isinstance(entry.op, Call) and entry.callee is not None:
                outputs = tuple(i for i, v in enumerate(entry.op.results) if v in reached)
                may_reach = {i for output in outputs for i in entry.callee.reaching[output]}
                asked = tuple(i for i in inputs if i in may_reach)
                calls.append(ReachedCall(entry, entry.op, entry.callee, outputs, asked))
                inputs = inputs_of(calls[-1])
            for value in map(entry.op.operands.__getitem__, inputs):
                if value not in reached:
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
