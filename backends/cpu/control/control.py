"""Executions from begin to end, over all ranks: they end together, or fail with one error.

Each rank has a row in its machine's control block and writes no other. A barrier is a number that
each rank sets in its row when it comes, so the end of a step is one store and a scan. Only ranks
that have waited for some time look for failures, deaths and deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Final

from ...errors import PeerLost, PlanMismatch, StepTimeout, TransportError
from ...failures.flight import Activity, FlightRecord, Position
from ..waiting.node import MachineNode
from ..waiting.waiting import SLEEP, Waiter
from .divergence import lost, other_call, other_plan, out_of_step
from .error_agreement import ErrorAgreement
from .hang_reporter import HangReporter
from .link import BarrierReached, NewsLink, Status
from .rank_status import COMMIT, IDLE, BarrierWord, State, StatusTable, named

_TELL_EVERY: Final = 0.5
"""Seconds between two reports of a waiting rank to other machines."""

Watch = Callable[[], Position]
Record = Callable[[Sequence[Position]], FlightRecord]


class Control:
    """This rank's part in the control of executions. Making one is collective.

    Attributes:
        pause: how to wait (`Pause`); raises what has gone wrong elsewhere.
        is_running: whether an execution is in progress on this rank.
        epoch: how many executions have begun, of all steps; the epoch of the last of them.
        failed: whether the last execution has failed, so that `recover` is due.
        refused: whether a rank failed in that execution before it began its program.
        diverged: the error by which ranks have diverged for good; None if they have not.
        purpose: what the world's next calls are for, in words for the other ranks.
        where: describes where ranks are (`HangReporter.where`); for any thread.
    """

    def __init__(self, node: MachineNode, sleep: float = SLEEP) -> None:
        self._node = node
        self._table = StatusTable(node)
        self.where = HangReporter(node, self._table).where
        self._link = NewsLink(node) if len(node.leaders) > 1 else None
        self._errors = ErrorAgreement(node, self._table, self._link)
        self._leads = self._link is not None and node.rank == node.leader
        self._relayed: dict[BarrierWord, int] = {}
        self._agreed: BaseException | None = None
        self.is_running = False
        self._closed = False
        self._watch: Watch | None = None
        self._record: Record | None = None
        self._timeout: float | None = None
        self._deadline = self._told = 0.0
        self._idle_since = monotonic()
        self._comparing = False
        self._calls = 0
        self.epoch = 0
        self.failed = self.refused = self._recovering = False
        self.diverged: PlanMismatch | None = None
        self.purpose = ""
        node.world.answer_by(self._tell)
        self.pause = Waiter(node, self.check, sleep)

    # -- one execution ----------------------------------------------------------------------

    def begin(
        self,
        plan: int,
        watch: Watch,
        record: Record | None = None,
        timeout: float | None = None,
        doing: str = "",
    ) -> int:
        """Enter the next execution.

        Args:
            plan: a number that identifies the plan on all ranks; its low 64 bits are compared.
            watch: tells where this rank is in its program.
            record: makes a flight record of the positions of ranks, for the message of a timeout.
            timeout: seconds until `check` raises `StepTimeout`; None for no limit.
            doing: what is executed, in words for the other ranks.

        Returns:
            The execution's epoch.

        Raises:
            RuntimeError: the last execution has failed, and `recover` has not been called.
        """
        if self.failed:
            raise RuntimeError("the last execution has failed on all ranks: recover() first")
        self._comparing = False
        self.epoch += 1
        self._watch, self._record, self._timeout = watch, record, timeout
        self._deadline = float("inf") if timeout is None else monotonic() + timeout
        self._table.enter(self.epoch, plan & 0xFFFF_FFFF_FFFF_FFFF, doing)
        self.is_running = True
        return self.epoch

    def compare(
        self, digest: int, ranks: Sequence[int], progress: Sequence[Callable[[], None]] = ()
    ) -> bool:
        """Wait for all ranks inside an execution, and compare the digests of `ranks`.

        Args:
            digest: this rank's digest, of 64 bits; 0 if it is none of `ranks`.
            ranks: the ranks to compare.
            progress: as in `commit`.

        Returns:
            Whether the digests are equal; the same on all ranks.

        Raises:
            RemoteError, StepTimeout, PeerLost, PlanMismatch: as `check`.
        """
        self._table.give(digest)
        self._comparing = True  # the program has not begun, so it has no position
        self._wait_at(BarrierWord.INPUTS, progress)
        self._comparing = False
        stranger = self._table.of_another_plan(self.epoch)
        if stranger is not None:
            raise self._other_plan(stranger)
        return self._table.give_the_same(ranks)

    def commit(self, progress: Sequence[Callable[[], None]] = ()) -> None:
        """End the execution: return once every rank has come here.

        Args:
            progress: functions to call while waiting, so that the others can end.

        Raises:
            RemoteError, StepTimeout, PeerLost, PlanMismatch: as `check`.
        """
        self._wait_at(COMMIT, progress)
        stranger = self._table.of_another_plan(self.epoch)
        if stranger is not None:
            raise self._other_plan(stranger)
        self._table.set_state(IDLE)
        self.is_running = False
        self._idle_since = monotonic()

    def check(self) -> None:
        """Look for what has gone wrong elsewhere; called by ranks that have waited for a while.

        Raises:
            RemoteError: the execution has failed on another rank (or another error raised there).
            StepTimeout: the time is up; the message says where every rank is.
            PeerLost: a rank that has not finished this execution has ended.
            PlanMismatch: a rank executes another plan, or has gone on to a call of the world that
                this one has not made.
        """
        self._report()
        self.hear()
        if not self.is_running:
            return
        if any(self._errors.last_failed(rank) == self.epoch for rank in range(self._node.size)):
            raise self._settle(None)
        for rank in self._table.missing(BarrierWord.COMMIT, self.epoch):
            self._check_peer(rank)
        if monotonic() > self._deadline:
            raise StepTimeout(
                f"the step has not ended after {self._timeout} s; here is where every rank is:\n"
                f"{self.flight_record()}"
            )

    # -- failure ----------------------------------------------------------------------------

    def has_failed_elsewhere(self) -> bool:
        """True if another rank of this machine has failed in this execution; for any thread."""
        if not self.is_running:
            return False
        others = (rank for rank in self._node.local if rank != self._node.rank)
        return any(self._errors.last_failed(rank) == self.epoch for rank in others)

    def fail(self, error: BaseException | None, refused: bool = False) -> BaseException:
        """Tell every rank that the execution has failed here.

        Args:
            error: what was raised here; None where that comes of a failure on another rank.
            refused: whether that was before this rank began its program.

        Returns:
            The error that all ranks raise: the one of the lowest rank on which an error occurred.
            Ranks that need longer than `GRACE` to notice may see another one.
        """
        return self._settle(error, refused) if self._agreed is None else self._agreed

    def _settle(self, error: BaseException | None, refused: bool = False) -> BaseException:
        self.is_running = False
        self.failed = True
        self._agreed = self._errors.agree(self.epoch, error, refused, self.pause)
        self.refused = self._errors.is_refused(self.epoch)
        if isinstance(self._agreed, PlanMismatch):
            self.diverged = self._agreed
        return self._agreed

    def recover(self, resets: Iterable[Callable[[], None]] = (), timeout: float = 60.0) -> None:
        """Start afresh after a failed execution; every rank calls it.

        Args:
            resets: called when all ranks are here, before any goes on. They may call the world, in
                the same way on all ranks.
            timeout: seconds to wait for the others.

        Raises:
            StepTimeout: a rank has not come.
            PeerLost: a rank has ended.
        """
        self.is_running = False
        self._deadline, self._timeout = monotonic() + timeout, timeout
        self._wait_at(BarrierWord.RECOVER)
        self._recovering = True
        try:
            for reset in resets:
                reset()
        finally:
            self._recovering = False
        self._errors.withdraw()
        self._wait_at(BarrierWord.RESUME)
        self._agreed = None
        self.failed = False
        self._table.set_state(State.IDLE)
        self._idle_since = monotonic()

    def flight_record(self) -> str:
        """Describe where every rank is."""
        self._report()
        rows, record = self._table, self._record
        if record is None:
            return self.where(range(self._node.size))
        told = [
            position
            for position in rows.positions()
            if rows.epoch(position.rank) == self.epoch and rows.has_reported(position.rank)
        ]
        waits = {p.rank for p in told if p.awaited is not None or not p.running}
        others = [rank for rank in range(self._node.size) if rank not in waits]
        return self.where(others, [record(told)])

    def _tell(self) -> Activity:
        """Answer another rank that asks what this process does; a thread of its own calls it."""
        rank, watch, record = self._node.rank, self._watch, self._record
        if self.is_running and watch is not None and record is not None:
            at = replace(watch(), is_ending=self._table.is_ending(rank))
            if at.running or at.is_ending:  # else the program has not begun, so it has no position
                return Activity(record([at]).describe().strip())
        where = self._table.whereabouts(rank)
        if self._table.state(rank) is State.IDLE:
            where += f", for {monotonic() - self._idle_since:.1f} s at most"
        return Activity(where)

    def close(self, how: State = State.EXITED) -> None:
        """Say that this rank has ended, and how; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._table.set_state(how)
        self._errors.withdraw()
        self._node.wake_all()
        if self._link is not None:
            self._tell_status(self._link)
            self._link.part(self._node.rank)

    def is_silent(self) -> bool:
        """After `close`: return whether no message to or from this rank is under way any more."""
        return self._link is None or self._link.is_silent()

    # -- calls of the world -----------------------------------------------------------------

    def enter(self, number: int, call: str) -> None:
        """Say that this rank is in the world's call `number`.

        Raises:
            TransportError: the ranks have diverged before.
        """
        self._calls = number
        if self.diverged is not None:
            raise out_of_step(self.diverged)
        self._table.call(number, self.epoch, self.purpose or call)

    def look(self) -> None:
        """Look for ranks that will never come to the call in which this rank waits.

        A rank that is in a later execution, and has not made this call, will never make it, because
        an execution ends on all ranks together. Epochs are read before the numbers of calls, so
        that a rank that makes the call now, and goes on, is not mistaken for such a rank.

        Raises:
            PlanMismatch: there is such a rank.
        """
        rows = self._table
        self._tell_others()
        self.hear()
        ahead = [rank for rank in range(self._node.size) if self._is_ahead(rank)]
        self._node.fence()
        strangers = [rank for rank in ahead if rows.calls(rank)[0] < self._calls]
        if strangers:
            self.diverged = other_call(self._table, [self._node.rank, *strangers])
            raise self.diverged

    def _is_ahead(self, rank: int) -> bool:
        """Return whether a rank has begun or recovered from an execution that this one has not."""
        if self._recovering:
            return False  # all ranks are here, and their resets make the same calls
        if self._table.epoch(rank) != self.epoch:
            return self._table.epoch(rank) > self.epoch
        recovers = self._table.reached(rank, BarrierWord.RECOVER) == self.epoch
        return self.failed and recovers and rank != self._node.rank

    # -- barriers ---------------------------------------------------------------------------

    def _wait_at(self, barrier: BarrierWord, progress: Sequence[Callable[[], None]] = ()) -> None:
        """Wait until every rank has come to `barrier` of this epoch."""
        node, rows, epoch = self._node, self._table, self.epoch
        rows.reach(barrier, epoch)
        if rows.are_here(barrier, epoch):
            node.ring_sleepers()  # The last to come wakes the others.
        polls = 0
        while not rows.have_come(barrier, epoch):
            for move_on in progress:
                move_on()
            if self._leads:
                self.hear()
                self._relay(barrier)
            if rows.have_come(barrier, epoch):
                break
            polls += 1
            self._wait_for(barrier, polls)
        if self._leads:
            self._relay(barrier)

    def _wait_for(self, barrier: BarrierWord, polls: int) -> None:
        """Pause once; raise only if somebody is still missing after that."""
        try:
            self.pause(polls)
            if not self.is_running:
                self._check_missing(self._table.missing(barrier, self.epoch))
        except (StepTimeout, TransportError, PlanMismatch):
            if self.failed or self._table.missing(barrier, self.epoch):
                raise

    def _relay(self, barrier: BarrierWord) -> None:
        """As the leader: tell the other machines once all ranks of this one have come."""
        assert self._link is not None
        local = self._node.local
        if self._relayed.get(barrier) == self.epoch:
            return
        if all(self._table.reached(rank, barrier) >= self.epoch for rank in local):
            digests = tuple(self._table.digest(rank) for rank in local)
            self._link.tell_leaders(BarrierReached(local, barrier, self.epoch, digests))
            self._relayed[barrier] = self.epoch

    def _check_missing(self, missing: Sequence[int]) -> None:
        """Outside of executions: raise if a missing rank has ended, or the time is up."""
        for rank in missing:
            if self._table.has_ended(rank):
                raise lost(self._table, rank, self.epoch)
            if self._table.calls(rank)[0] > self._calls and rank in self._table.missing(
                BarrierWord.RECOVER, self.epoch
            ):
                raise other_call(self._table, [self._node.rank, rank])
        if monotonic() > self._deadline:
            raise StepTimeout(
                f"rank {self._node.rank} has waited {self._timeout} s for the other ranks to "
                f"recover from a failed step; here is where every rank is:\n{self.flight_record()}"
            )

    # -- what others do ---------------------------------------------------------------------

    def _other_plan(self, stranger: int) -> PlanMismatch:
        """The error for a rank of this machine that has come to a barrier with another plan."""
        ranks = (self._node.rank, stranger)
        plans = {rank: self._table.plan_of(rank, self.epoch) for rank in ranks}
        return other_plan(self._table, self.epoch, plans)

    def _check_peer(self, rank: int) -> None:
        """Raise if a rank that has not finished this execution cannot do so any more."""
        rows, last = self._table, self.epoch - 1
        calls, epoch = rows.calls(rank)
        if calls > self._calls and epoch < self.epoch:
            # Told even if the rank has ended since, because of it.
            raise other_call(rows, [self._node.rank, rank])
        if rows.has_ended(rank):
            raise lost(self._table, rank, self.epoch)
        if last and self._errors.last_failed(rank) == last > rows.reached(rank, BarrierWord.RESUME):
            # It gave up the end of a step at the very moment at which the others reached it.
            raise PeerLost(
                f"rank {rank} has given up {named(last)}, which the other ranks have finished. Use "
                "a longer timeout; start the job again",
                rank,
            )
        if rows.state(rank) is not State.RUNNING or rows.epoch(rank) != self.epoch:
            return
        self._node.fence()
        if rows.plan(rank) != rows.plan(self._node.rank):
            plans = {peer: rows.plan(peer) for peer in (self._node.rank, rank)}
            raise other_plan(rows, self.epoch, plans)

    def _report(self) -> None:
        """Tell where this rank is."""
        watch = None if self._comparing else self._watch
        self._table.report(None if watch is None else watch())
        self._tell_others()

    def _tell_others(self) -> None:
        """Tell other machines now and then where this rank is."""
        if self._link is None or self._closed:  # nobody receives what follows the last message
            return
        if monotonic() > self._told + _TELL_EVERY:
            self._told = monotonic()
            self._tell_status(self._link)

    def _tell_status(self, link: NewsLink) -> None:
        rank = self._node.rank
        link.tell_leaders(Status(rank, self._table.status(), self._table.doing(rank)))

    def hear(self) -> None:
        """Take in the news from other machines, and let MPI move on.

        A message may wait in this process after MPI has called it sent, until MPI is called again.
        So a rank that waits, and has no request of its own to test, calls this.
        """
        if self._link is None:
            return
        for news in self._link.receive():
            if isinstance(news, BarrierReached):
                self._table.note_reached(news.ranks, news.barrier, news.epoch, news.digests)
            elif isinstance(news, Status):
                self._table.note_status(news.rank, news.words, news.doing)
            else:
                self._errors.note(news)
            self._node.wake_all()
