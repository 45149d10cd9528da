"""Add up the terms of microbatches in the order in which they are computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...ir.ops import Call, Value, builtins
from .work import ProgramWork


def sum_as_terms_come(work: ProgramWork, order: Sequence[int], turns: Sequence[int]) -> list[int]:
    """Add each term of a sum over microbatches as soon as it is there, so that it can be freed.

    Backwards are derived from the last microbatch to the first, and sums follow them. Schedules run
    backwards from the first microbatch to the last. So a sum would begin when nearly all its terms
    are there, and all of them would be held until then. A term that is received is added when the
    next term is there, so that no rank waits for the message.

    Args:
        work: the work of the program; the operands of its additions are changed.
        order: the indices of nodes and early ops, in the order in which they run.
        turns: the same indices in the order in which terms are added.

    Returns:
        The indices with the additions in other positions.
    """
    sums = list(_SumFinder(work, order, turns).all())
    if not sums:
        return list(order)
    moved = {index for sum_ in sums for index in sum_.additions}
    behind: dict[int, list[int]] = {}
    for sum_ in sums:
        for index, position in zip(sum_.additions, sum_.positions(), strict=True):
            behind.setdefault(position, []).append(index)
        sum_.chain(work)
    sorted_: list[int] = []
    for position, index in enumerate(order):
        if index not in moved:
            sorted_.append(index)
        sorted_ += behind.get(position, ())
    return sorted_


@dataclass(frozen=True)
class _Term:
    """A term of a sum.

    Attributes:
        maker: the index of the op that makes it.
        arrival: the position in the order at which it is there.
        turn: the same where terms are added in the order in which they come.
        is_received: whether its rank has to wait for it.
    """

    value: Value
    maker: int
    arrival: int
    turn: int
    is_received: bool


@dataclass(frozen=True)
class _Sum:
    """A sum of terms of several microbatches at one place.

    Attributes:
        additions: the indices of its calls, ascending; the last one makes the sum.
        terms: one more than additions, in the order in which they are added.
    """

    additions: list[int]
    terms: list[_Term]

    def positions(self) -> Iterator[int]:
        """For each addition the position in the order behind which it comes."""
        following = [*self.terms[2:], self.terms[-1]]
        latest = self.terms[0].arrival
        for term, next_term in zip(self.terms[1:], following, strict=True):
            latest = max(latest, term.arrival)
            yield max(latest, next_term.arrival) if term.is_received else latest

    def chain(self, work: ProgramWork) -> None:
        """Make each addition add its term to the sum of those before it."""
        ops = work.program.ops
        calls = [ops[index] for index in self.additions]
        are_of_tasks = len({(call.mb, call.task) for call in calls}) > 1
        total = self.terms[0].value
        for call, term in zip(calls, self.terms[1:], strict=True):
            call.operands = (total, term.value)
            if are_of_tasks:
                maker = ops[term.maker]
                call.mb, call.task = maker.mb, maker.task
            (total,) = call.results


class _SumFinder:
    """Finds the sums of a program."""

    def __init__(self, work: ProgramWork, order: Sequence[int], turns: Sequence[int]) -> None:
        self._work = work
        self._ops = work.program.ops
        self._positions = {index: position for position, index in enumerate(order)}
        self._turns = {index: position for position, index in enumerate(turns)}
        self._additions = {index for index in order if self._is_addition(index)}

    def all(self) -> Iterator[_Sum]:
        """The sums of at least three microbatches."""
        if len(self._additions) < 2:
            return
        self._makers = {value: i for i, op in enumerate(self._ops) for value in op.results}
        self._uses = Counter(value for op in self._ops for value in op.operands)
        inner = {
            self._makers[value]
            for index in self._additions
            for value in self._ops[index].operands
            if self._is_partial(value, index)
        }
        for index in sorted(self._additions - inner):
            additions, values = self._parts(index)
            if any(value not in self._makers for value in values):
                continue
            microbatches = {self._ops[self._makers[value]].mb for value in values}
            if len(microbatches) > 2 and None not in microbatches:
                terms = sorted(map(self._term, values), key=lambda t: (t.turn, t.maker))
                yield _Sum(sorted(additions), terms)

    def _parts(self, root: int) -> tuple[list[int], list[Value]]:
        """The additions and the terms of the sum that one addition completes."""
        additions: list[int] = []
        terms: list[Value] = []
        open_ = [root]
        while open_:
            index = open_.pop()
            additions.append(index)
            for value in self._ops[index].operands:
                if self._is_partial(value, index):
                    open_.append(self._makers[value])
                else:
                    terms.append(value)
        return additions, terms

    def _is_addition(self, index: int) -> bool:
        op = self._ops[index]
        return isinstance(op, Call) and builtins.is_addition(op.fn.name)

    def _is_partial(self, value: Value, addition: int) -> bool:
        """Whether a value is a sum that nothing but one addition takes, at its own place."""
        maker = self._makers.get(value)
        if maker is None or maker not in self._additions or self._uses[value] > 1:
            return False
        return self._ops[maker].place == self._ops[addition].place

    def _term(self, value: Value) -> _Term:
        maker = self._makers[value]
        if maker in self._positions:
            return _Term(value, maker, self._positions[maker], self._turns[maker], False)
        follows = self._work.follows[maker]
        arrival = max([self._positions[node] for node in follows], default=0)
        turn = max([self._turns[node] for node in follows], default=0)
        return _Term(value, maker, arrival, turn, True)
