"""Rank status: the rows of the control block, where ranks tell others what they do."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from time import monotonic_ns
from typing import Final

from ...failures.flight import Position
from ..memory.layout import (
    AT,
    AWAITED,
    BEAT,
    CALLS,
    DIGEST,
    DOING_ROOM,
    EPOCH,
    EXECUTION,
    PLAN,
    PLANS,
    REACHED,
    ROW,
    RUNNING,
    STATE,
    STATUS_WORDS,
    doing_at,
)
from ..waiting.node import MachineNode

_STALE: Final = 500_000_000
"""Nanoseconds after which a rank that has not reported is taken to be at work, not waiting."""

_NOWHERE = (1 << 64) - 1
"""The position of a rank that has not waited in its execution, and so has not reported."""


class State(enum.IntEnum):
    """The state of a rank."""

    IDLE = 0
    RUNNING = 1
    FAILED = 2
    EXITED = 3
    SERVING = 4
    DESERTED = 5
    """It has ended while it had open graphs, which others drive or serve."""


_RUNNING: Final = State.RUNNING
IDLE: Final = State.IDLE
"""States of each execution; to look up a member in its class costs as much as three calls."""


class BarrierWord(enum.IntEnum):
    """The barriers of an execution; each value is the place of the barrier's word in a row."""

    COMMIT = 0
    RECOVER = 1
    RESUME = 2
    INPUTS = 3


COMMIT: Final = BarrierWord.COMMIT
"""The barrier of each execution; see `IDLE`."""


def named(epoch: int) -> str:
    """An execution as messages name it: executions count from 0, and epochs from 1."""
    return f"execution {epoch - 1}"


class StatusTable:
    """Reads all rows, and writes this rank's.

    The rows of ranks of other machines are copies, written by the leader of this one.
    """

    def __init__(self, node: MachineNode) -> None:
        self._node = node
        self._words = node.words
        self._mine = own_row = node.rank * ROW
        self._barriers = [
            [rank * ROW + REACHED + barrier for rank in range(node.size)] for barrier in BarrierWord
        ]
        self._reached = [words[node.rank] for words in self._barriers]
        others = [rank for rank in range(node.size) if rank != node.rank]
        here = [rank for rank in node.local if rank != node.rank]
        self._others = [[words[rank] for rank in others] for words in self._barriers]
        self._others_here = [[words[rank] for rank in here] for words in self._barriers]
        self._plans = [[rank * ROW + PLANS + odd for rank in here] for odd in (0, 1)]
        self._my_plans = (own_row + PLANS, own_row + PLANS + 1)
        self._doing = ""

    # -- this rank's ------------------------------------------------------------------------

    def enter(self, epoch: int, plan: int, doing: str) -> None:
        """Say that this rank is in an execution of a plan, and what it executes, in words."""
        words, row = self._words, self._mine
        if doing is not self._doing:
            self._tell(self._node.rank, doing)
            self._doing = doing
        words[row + PLAN] = words[self._my_plans[epoch & 1]] = plan
        words[row + AT] = _NOWHERE
        if self._node.order is not None:
            self._node.order()  # a rank that sees the epoch also sees its plan
        words[row + EPOCH] = epoch
        words[row + STATE] = _RUNNING

    def call(self, number: int, epoch: int, doing: str) -> None:
        """Say that this rank is in collective call `number` of the world, which `doing` names."""
        self._tell(self._node.rank, doing)
        self._doing = doing
        self._node.fence()  # a rank that sees the number also sees the words
        self._words[self._mine + CALLS] = number << 32 | epoch

    def give(self, digest: int) -> None:
        """Publish the digest of this rank's arguments; 0 if they are not compared."""
        self._words[self._mine + DIGEST] = digest
        self._node.fence()  # a rank that sees this one at the barrier also sees it

    def set_state(self, state: State) -> None:
        """Say what this rank is doing."""
        self._words[self._mine + STATE] = state

    def reach(self, barrier: BarrierWord, epoch: int) -> None:
        """Say that this rank has come to a barrier; later reads see all that came before."""
        self._words[self._reached[barrier]] = epoch
        self._node.fence()

    def report(self, position: Position | None) -> None:
        """Say where this rank is in its program, and that it is waiting now."""
        words, row = self._words, self._mine
        words[row + BEAT] = monotonic_ns()
        if position is not None:
            words[row + EXECUTION] = max(position.execution, 0)
            words[row + AT] = position.op
            words[row + AWAITED] = 0 if position.awaited is None else position.awaited + 1
            words[row + RUNNING] = position.running

    def status(self) -> tuple[int, ...]:
        """The words about this rank that other machines are told."""
        return tuple(self._words[self._mine : self._mine + STATUS_WORDS])

    # -- those of ranks of other machines ---------------------------------------------------

    def note_reached(
        self, ranks: Sequence[int], barrier: int, epoch: int, digests: Sequence[int] = ()
    ) -> None:
        """Keep in mind that ranks of another machine have come to a barrier, and their digests."""
        words = self._words
        if barrier == BarrierWord.INPUTS:
            for rank, digest in zip(ranks, digests, strict=True):
                self._note_digest(rank, epoch, digest)
            self._node.fence()  # as in `give`
        for rank in ranks:
            at = self._barriers[barrier][rank]
            words[at] = max(words[at], epoch)

    def note_status(self, rank: int, status: Sequence[int], doing: str = "") -> None:
        """Note where a rank of another machine is.

        The state is written last, as in `enter`, and the number of calls before the epoch, as
        `Control.look` needs it. The leader of the rank's machine tells the barriers, too, and a
        later message of one of the two may arrive earlier. So the status has the barriers that the
        rank has reached, and its digest.
        """
        words, row = self._words, rank * ROW
        self._tell(rank, doing)
        self._note_digest(rank, status[REACHED + BarrierWord.INPUTS], status[DIGEST])
        self._node.fence()  # as in `give`
        for index, word in reversed(list(enumerate(status[:DIGEST]))):
            at = row + index
            words[at] = max(words[at], word) if index >= REACHED else word
        words[row + BEAT] = monotonic_ns()

    def _note_digest(self, rank: int, epoch: int, digest: int) -> None:
        """Note a rank's digest for an execution, unless one for a later execution is known."""
        if epoch > self.reached(rank, BarrierWord.INPUTS):
            self._words[rank * ROW + DIGEST] = digest

    # -- everybody's ------------------------------------------------------------------------

    def missing(self, barrier: BarrierWord, epoch: int) -> list[int]:
        """The ranks that have not come to a barrier of this epoch."""
        words = self._words
        return [word // ROW for word in self._barriers[barrier] if words[word] < epoch]

    def have_come(self, barrier: BarrierWord, epoch: int) -> bool:
        """Return whether all ranks have come to a barrier that this rank has reached."""
        words = self._words
        for word in self._others[barrier]:  # noqa: SIM110 # a generator costs as much again
            if words[word] < epoch:
                return False
        return True

    def are_here(self, barrier: BarrierWord, epoch: int) -> bool:
        """Return the same of the ranks of this machine."""
        words = self._words
        for word in self._others_here[barrier]:  # noqa: SIM110 # as above
            if words[word] < epoch:
                return False
        return True

    def reached(self, rank: int, barrier: BarrierWord) -> int:
        """The last epoch in which a rank has come to a barrier."""
        return self._words[self._barriers[barrier][rank]]

    def state(self, rank: int) -> State:
        """The state of a rank."""
        return State(self._words[rank * ROW + STATE])

    def epoch(self, rank: int) -> int:
        """The last epoch that a rank has entered."""
        return self._words[rank * ROW + EPOCH]

    def calls(self, rank: int) -> tuple[int, int]:
        """The number of collective calls of a rank, and its epoch in the last of them."""
        word = self._words[rank * ROW + CALLS]
        return word >> 32, word & 0xFFFF_FFFF

    def digest(self, rank: int) -> int:
        """The digest of a rank's arguments to its execution."""
        return self._words[rank * ROW + DIGEST]

    def give_the_same(self, ranks: Sequence[int]) -> bool:
        """Return whether ranks that have come to `INPUTS` have equal digests."""
        self._node.fence()  # a rank that sees another one there also sees its digest
        return len({self.digest(rank) for rank in ranks}) <= 1

    def doing(self, rank: int) -> str:
        """The work of a rank, in the words that it last gave."""
        at = doing_at(rank, self._node.size)
        content = bytes(self._node.block[at : at + DOING_ROOM])
        return content.partition(b"\0")[0].decode(errors="replace")

    def plan(self, rank: int) -> int:
        """The plan of the last epoch that a rank has entered."""
        return self._words[rank * ROW + PLAN]

    def of_another_plan(self, epoch: int) -> int | None:
        """A rank of this machine that has ended this epoch with another plan than this rank."""
        words, odd = self._words, epoch & 1
        if self._node.order is not None:
            self._node.fence()  # a rank that sees another one at the end also sees its plan
        own_plan = words[self._my_plans[odd]]
        for word in self._plans[odd]:
            if words[word] != own_plan:
                return word // ROW
        return None

    def plan_of(self, rank: int, epoch: int) -> int:
        """The plan of a rank of this machine in an epoch, which is one of its last two."""
        return self._words[rank * ROW + PLANS + (epoch & 1)]

    def has_reported(self, rank: int) -> bool:
        """Return whether a rank has said where it is since it entered its execution."""
        return self._words[rank * ROW + AT] != _NOWHERE

    def awaits_inputs(self, rank: int) -> bool:
        """Return whether a rank waits until all have come to its execution with their arguments."""
        epoch = self.epoch(rank)
        has_come = (
            self.reached(rank, BarrierWord.INPUTS) >= epoch > self.reached(rank, BarrierWord.COMMIT)
        )
        return has_come and bool(self.missing(BarrierWord.INPUTS, epoch))

    def is_ending(self, rank: int) -> bool:
        """Return whether a rank has done its part of the last execution that it has entered."""
        return self.reached(rank, BarrierWord.COMMIT) >= self.epoch(rank)

    def has_died(self, rank: int) -> bool:
        """Return whether the process of a rank has ended, and this process has noticed."""
        return rank in self._node.bell.dead

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank has said goodbye, or has died."""
        return self.state(rank) in (State.EXITED, State.DESERTED) or self.has_died(rank)

    def positions(self) -> list[Position]:
        """The positions of all ranks, as far as they have told."""
        now = monotonic_ns()
        return [self._position(rank, now) for rank in range(self._node.size)]

    def whereabouts(self, rank: int) -> str:
        """Describe where a rank is, even if it executes another plan, or none."""
        if self.has_ended(rank):
            return f"rank {rank} has ended"
        state = self.state(rank)
        if state is State.SERVING:
            return f"rank {rank} serves graphs, until their driver closes them"
        if state is State.IDLE:
            last = self.reached(rank, BarrierWord.COMMIT)
            after = f"after {named(last)}" if last else "before the first"
            return f"rank {rank} is outside of executions, {after}"
        if self.awaits_inputs(rank):
            late = ", ".join(
                f"rank {absent}" for absent in self.missing(BarrierWord.INPUTS, self.epoch(rank))
            )
            return f"rank {rank} is at the begin of {named(self.epoch(rank))}, and waits for {late}"
        if not self.has_reported(rank):
            return (
                f"rank {rank} is at work in {named(self.epoch(rank))}, and has not waited for "
                "another rank in it"
            )
        return (
            f"rank {rank} is in {named(self.epoch(rank))} ({state.name.lower()}) of plan "
            f"{self.plan(rank):016x}, at op {self._words[rank * ROW + AT]}"
        )

    def _tell(self, rank: int, doing: str) -> None:
        at = doing_at(rank, self._node.size)
        content = doing.encode(errors="replace")[: DOING_ROOM - 1] + b"\0"
        self._node.block[at : at + len(content)] = content

    def _position(self, rank: int, now: int) -> Position:
        row, words = rank * ROW, self._words
        waits = now - words[row + BEAT] < _STALE
        awaited = words[row + AWAITED] - 1
        # A rank that has just failed, perhaps by the same deadline, is still where it was then.
        is_inside = words[row + STATE] in (_RUNNING, State.FAILED)
        return Position(
            rank,
            words[row + EXECUTION],
            words[row + AT],
            awaited if waits and awaited >= 0 else None,
            bool(words[row + RUNNING]) and is_inside,
            is_ending=is_inside and self.is_ending(rank),
        )
