"""Executions from begin to end, over all ranks: they end together, or fail with one error.

Each rank has a row in its machine's control block and writes no other. A meeting is a number that
each rank sets in its row when it comes, so an end of a step is one store and a scan. Failures,
deaths and deadlines are looked for only by ranks that have waited for some time.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable, Iterable, Sequence
from time import monotonic, monotonic_ns

from ..errors import (
    Failure,
    PlanMismatch,
    RemoteError,
    StepTimeout,
    TransportError,
    traceback_text,
    type_name,
)
from ..flight import Position
from .layout import (
    AT,
    AWAITED,
    BEAT,
    EPOCH,
    ERROR_BYTES,
    ERROR_KEY,
    ERROR_ROOM,
    EXECUTION,
    FAILED,
    PLAN,
    REACHED,
    ROW,
    RUNNING,
    STATE,
    STATUS_WORDS,
    error_at,
)
from .link import Failed, Link, Reached, Status
from .node import Node
from .waiting import Waiter, WaitPolicy

GRACE = 1.0
"""Seconds that a failed execution waits for the other ranks, so that all agree on the error."""

_STALE = 500_000_000
"""Nanoseconds after which a rank that has not reported is taken to be at work, not waiting."""

_TELL_EVERY = 0.5
"""Seconds between two reports of a waiting rank to other machines."""


class State(enum.IntEnum):
    """What a rank is doing, as its row says."""

    IDLE = 0
    RUNNING = 1
    FAILED = 2
    EXITED = 3


class Meeting(enum.IntEnum):
    """Where ranks wait for each other."""

    COMMIT = 0
    RECOVER = 1
    RESUME = 2


Watch = Callable[[], Position]
Describe = Callable[[Sequence[Position]], str]


class PeerLost(TransportError):
    """A rank has ended while others still needed it."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class Control:
    """This rank's part in the control of executions. Making one is collective.

    Attributes:
        pause: how to wait (`Pause`); raises what has gone wrong elsewhere.
        epoch: number of the execution in progress or of the last one, from 1.
        failed: whether the last execution has failed, so that `recover` is due.
    """

    def __init__(self, node: Node, policy: WaitPolicy | None = None) -> None:
        self._node = node
        self._words = node.words
        self._row = node.rank * ROW
        self._link = Link(node) if len(node.leaders) > 1 else None
        self._errors_from_afar: dict[int, tuple[int, bytes | None]] = {}
        self._relayed: set[tuple[int, int]] = set()
        self._error_key: int | None = None
        self._agreed: BaseException | None = None
        self._guarded = False
        self._watch: Watch | None = None
        self._describe: Describe | None = None
        self._timeout: float | None = None
        self._deadline = self._told = 0.0
        self.epoch = 0
        self.failed = False
        self.pause = Waiter(node, policy or WaitPolicy.suiting(node), self.check)

    # -- one execution ----------------------------------------------------------------------

    def begin(
        self,
        plan: int,
        watch: Watch,
        describe: Describe | None = None,
        timeout: float | None = None,
    ) -> int:
        """Enter the next execution.

        Args:
            plan: what identifies the plan, the same on all ranks; its low 64 bits are compared.
            watch: tells where this rank is in its program.
            describe: explains the positions of all ranks, for the message of a timeout.
            timeout: seconds until `check` raises `StepTimeout`; None for no limit.

        Returns:
            The execution's epoch.

        Raises:
            RuntimeError: the last execution has failed, and `recover` has not been called.
        """
        if self.failed:
            raise RuntimeError("the last execution has failed on all ranks: recover() first")
        self.epoch += 1
        self._watch, self._describe, self._timeout = watch, describe, timeout
        self._deadline = float("inf") if timeout is None else monotonic() + timeout
        words, row = self._words, self._row
        words[row + PLAN] = plan & 0xFFFF_FFFF_FFFF_FFFF
        if self._node.order is not None:
            self._node.order()  # who sees the epoch also sees its plan
        words[row + EPOCH] = self.epoch
        words[row + STATE] = State.RUNNING
        self._guarded = True
        return self.epoch

    def commit(self, progress: Iterable[Callable[[], None]] = ()) -> None:
        """End the execution: return once every rank has come here.

        Args:
            progress: what to call while waiting, so that the others can end.

        Raises:
            RemoteError, StepTimeout, PeerLost, PlanMismatch: as `check`.
        """
        self._meet(Meeting.COMMIT, tuple(progress))
        self._words[self._row + STATE] = State.IDLE
        self._guarded = False

    def check(self) -> None:
        """Look for what has gone wrong elsewhere; called by ranks that have waited for a while.

        Raises:
            RemoteError: the execution has failed on another rank (or what else failed there).
            StepTimeout: the time is up; the message says where every rank is.
            PeerLost: a rank that has not finished this execution has ended.
            PlanMismatch: a rank executes another plan.
        """
        self._report()
        self._hear()
        if not self._guarded:
            return
        if any(self._has_failed(rank) for rank in range(self._node.size)):
            raise self._settle(None)
        self._check_peers()
        if monotonic() > self._deadline:
            raise StepTimeout(
                f"the step has not ended after {self._timeout} s; here is where every rank is:\n"
                f"{self.flight_record()}"
            )

    # -- failure ----------------------------------------------------------------------------

    def fail(self, error: BaseException) -> BaseException:
        """Tell every rank that the execution has failed here.

        Returns:
            The error that all ranks raise: of the errors that occurred, that of the lowest rank.
            Ranks that need longer than `GRACE` to notice may see another one.
        """
        if self._agreed is not None:
            return self._agreed
        return self._settle(error)

    def recover(self, resets: Iterable[Callable[[], None]] = (), timeout: float = 60.0) -> None:
        """Start afresh after a failed execution; every rank calls it.

        Args:
            resets: run when all ranks are here, and before any goes on.
            timeout: seconds to wait for the others.

        Raises:
            StepTimeout: a rank has not come.
            PeerLost: a rank has ended.
        """
        self._guarded = False
        self._deadline, self._timeout = monotonic() + timeout, timeout
        self._meet(Meeting.RECOVER)
        for reset in resets:
            reset()
        self._seal_error()
        self._meet(Meeting.RESUME)
        self._agreed = None
        self.failed = False
        self._words[self._row + STATE] = State.IDLE

    def positions(self) -> list[Position]:
        """Where every rank is, as far as it has told."""
        now = monotonic_ns()
        return [self._position(rank, now) for rank in range(self._node.size)]

    def flight_record(self) -> str:
        """Where every rank is, in words."""
        self._report()
        positions = self.positions()
        here = [p for p in positions if self._words[p.rank * ROW + EPOCH] == self.epoch]
        lines = [self._describe(here)] if self._describe is not None else []
        for position in positions:
            if position not in here or self._describe is None:
                lines.append(f"  {self._whereabouts(position.rank)}")
        return "\n".join(lines)

    def close(self) -> None:
        """Say that this rank has ended; idempotent."""
        if self._words[self._row + STATE] == State.EXITED:
            return
        self._words[self._row + STATE] = State.EXITED
        self._seal_error()
        self._node.wake_all()
        if self._link is not None:
            self._link.tell_leaders(self._status())

    # -- meetings ---------------------------------------------------------------------------

    def _meet(self, meeting: Meeting, progress: Sequence[Callable[[], None]] = ()) -> None:
        """Wait until every rank has come to `meeting` of this epoch."""
        node, words, epoch = self._node, self._words, self.epoch
        leads = self._link is not None and node.rank == node.leader
        words[self._row + REACHED + meeting] = epoch
        missing = self._missing(meeting)
        if all(not node.is_local(rank) for rank in missing):
            node.wake_all()  # The last to come wakes the others.
        polls = 0
        while missing:
            for move_on in progress:
                move_on()
            if leads:
                self._hear()
                self._relay(meeting)
            missing = [r for r in missing if words[r * ROW + REACHED + meeting] < epoch]
            if missing:
                polls += 1
                self._wait_for(meeting, polls)
        if leads:
            self._relay(meeting)

    def _wait_for(self, meeting: Meeting, polls: int) -> None:
        """Pause once; raise only if somebody is still missing after that."""
        try:
            self.pause(polls)
            if not self._guarded:
                self._check_meeting(meeting, self._missing(meeting))
        except (StepTimeout, TransportError, PlanMismatch):
            if self.failed or self._missing(meeting):
                raise

    def _missing(self, meeting: Meeting) -> list[int]:
        """Ranks that have not come; after this rank's own store is visible to all."""
        self._node.fence()
        words, at = self._words, REACHED + meeting
        return [r for r in range(self._node.size) if words[r * ROW + at] < self.epoch]

    def _relay(self, meeting: Meeting) -> None:
        """As the leader: tell the other machines once all ranks of this one have come."""
        assert self._link is not None
        news = (meeting, self.epoch)
        if news in self._relayed:
            return
        local = self._node.local
        if all(self._words[r * ROW + REACHED + meeting] >= self.epoch for r in local):
            self._link.tell_leaders(Reached(local, meeting, self.epoch))
            self._relayed = {old for old in self._relayed if old[1] == self.epoch} | {news}

    def _check_meeting(self, meeting: Meeting, missing: Sequence[int]) -> None:
        """Outside of executions: has a missing rank ended, or is the time up?"""
        for rank in missing:
            if self._has_ended(rank):
                raise self._lost(rank)
        if monotonic() > self._deadline:
            raise StepTimeout(
                f"rank {self._node.rank} has waited {self._timeout} s for the other ranks to "
                f"recover from a failed step; missing are:\n{self.flight_record()}"
            )

    # -- what others do ---------------------------------------------------------------------

    def _check_peers(self) -> None:
        words, plan = self._words, self._words[self._row + PLAN]
        for rank in range(self._node.size):
            row = rank * ROW
            if words[row + REACHED + Meeting.COMMIT] >= self.epoch:
                continue
            if self._has_ended(rank):
                raise self._lost(rank)
            self._check_left_behind(rank)
            running = words[row + STATE] == State.RUNNING
            if not running or words[row + EPOCH] != self.epoch:
                continue
            self._node.fence()
            if words[row + PLAN] != plan:
                raise self._mismatch(sorted((self._node.rank, rank)))

    def _mismatch(self, ranks: Sequence[int]) -> PlanMismatch:
        first, second = (f"{self._words[r * ROW + PLAN]:016x} on rank {r}" for r in ranks)
        return PlanMismatch(
            f"execution {self.epoch} is of plan {first}, and of plan {second}. Every rank must "
            "call the same compiled steps, with inputs of the same types, in the same order; look "
            "for a call that depends on the rank"
        )

    def _check_left_behind(self, rank: int) -> None:
        """A rank may give up the end of a step in the very moment in which the others reach it."""
        words, row = self._words, rank * ROW
        failed, last = words[row + FAILED], self.epoch - 1
        if failed and failed == last and words[row + REACHED + Meeting.RESUME] < last:
            raise PeerLost(
                f"rank {rank} has given up execution {last}, which the other ranks have finished. "
                "Use a longer timeout; start the job again",
                rank,
            )

    def _has_ended(self, rank: int) -> bool:
        ended = self._words[rank * ROW + STATE] == State.EXITED
        return ended or rank in self._node.bell.dead

    def _lost(self, rank: int) -> PeerLost:
        how = "has died" if rank in self._node.bell.dead else "has ended"
        last = self._words[rank * ROW + REACHED + Meeting.COMMIT]
        return PeerLost(
            f"rank {rank} {how} after execution {last}, and the other ranks are in execution "
            f"{self.epoch}. All ranks must make the same calls; start the job again",
            rank,
        )

    def _position(self, rank: int, now: int) -> Position:
        row, words = rank * ROW, self._words
        waits = now - words[row + BEAT] < _STALE
        awaited = words[row + AWAITED] - 1
        return Position(
            rank,
            words[row + EXECUTION],
            words[row + AT],
            awaited if waits and awaited >= 0 else None,
            bool(words[row + RUNNING]) and words[row + STATE] == State.RUNNING,
        )

    def _whereabouts(self, rank: int) -> str:
        row, words = rank * ROW, self._words
        state = State(words[row + STATE])
        if self._has_ended(rank):
            return f"rank {rank} has ended"
        if state is State.IDLE:
            last = words[row + REACHED + Meeting.COMMIT]
            return f"rank {rank} is outside of executions, after execution {last}"
        return (
            f"rank {rank} is in execution {words[row + EPOCH]} ({state.name.lower()}) of plan "
            f"{words[row + PLAN]:016x}, at op {words[row + AT]}"
        )

    # -- telling and hearing ----------------------------------------------------------------

    def _report(self) -> None:
        """Write this rank's position into its row."""
        words, row = self._words, self._row
        words[row + BEAT] = monotonic_ns()
        if self._watch is not None:
            position = self._watch()
            words[row + EXECUTION] = max(position.execution, 0)
            words[row + AT] = position.op
            words[row + AWAITED] = 0 if position.awaited is None else position.awaited + 1
            words[row + RUNNING] = position.running
        if self._link is not None and monotonic() > self._told + _TELL_EVERY:
            self._told = monotonic()
            self._link.tell_leaders(self._status())

    def _status(self) -> Status:
        row = self._row
        return Status(self._node.rank, tuple(self._words[row : row + STATUS_WORDS]))

    def _hear(self) -> None:
        """Take in the news from other machines."""
        if self._link is None:
            return
        words = self._words
        for news in self._link.receive():
            if isinstance(news, Reached):
                for rank in news.ranks:
                    words[rank * ROW + REACHED + news.meeting] = news.epoch
            elif isinstance(news, Status):
                for index, word in reversed(list(enumerate(news.words))):
                    words[news.rank * ROW + index] = word
                words[news.rank * ROW + BEAT] = monotonic_ns()
            else:
                known = self._errors_from_afar.get(news.rank, (0, None))
                if news.epoch > known[0] or news.error is not None:
                    self._errors_from_afar[news.rank] = (news.epoch, news.error)
            self._node.wake_all()

    def _has_failed(self, rank: int) -> bool:
        if self._node.is_local(rank):
            return self._words[rank * ROW + FAILED] == self.epoch
        return self._errors_from_afar.get(rank, (0, None))[0] == self.epoch

    # -- agreeing on an error ---------------------------------------------------------------

    def _settle(self, error: BaseException | None) -> BaseException:
        """Say that the execution has failed, wait for the others, and choose the error."""
        self._guarded = False
        self.failed = True
        content = None if error is None else _pickled(error, self._node.rank)
        self._publish(content)
        until = monotonic() + GRACE
        polls = 0
        while monotonic() < until and not all(map(self._has_voted, range(self._node.size))):
            polls += 1
            self.pause(polls)
        origins = [r for r in range(self._node.size) if self._error_of(r) is not None]
        if error is not None and origins[:1] == [self._node.rank]:
            self._agreed = error
        else:
            self._agreed = _unpickled(self._error_of(origins[0]), origins[0])
        return self._agreed

    def _publish(self, content: bytes | None) -> None:
        words, row, node = self._words, self._row, self._node
        words[row + ERROR_BYTES] = 0
        if content is not None:
            if len(content) <= ERROR_ROOM:
                at = error_at(node.rank, node.size)
                node.block[at : at + len(content)] = content
            else:
                segment = node.segments.create(len(content))
                segment.memory[: len(content)] = content
                self._error_key = words[row + ERROR_KEY] = segment.key
            words[row + ERROR_BYTES] = len(content)
        if node.order is not None:
            node.order()
        words[row + FAILED] = self.epoch
        words[row + STATE] = State.FAILED
        node.wake_all()
        if self._link is not None:
            self._link.tell_all(Failed(node.rank, self.epoch, content))

    def _has_voted(self, rank: int) -> bool:
        committed = self._words[rank * ROW + REACHED + Meeting.COMMIT] >= self.epoch
        return committed or self._has_failed(rank) or self._has_ended(rank)

    def _error_of(self, rank: int) -> bytes | None:
        """The pickled error that began on `rank` in this epoch."""
        if not self._has_failed(rank):
            return None
        if not self._node.is_local(rank):
            return self._errors_from_afar[rank][1]
        row = rank * ROW
        nbytes = self._words[row + ERROR_BYTES]
        if not nbytes:
            return None
        if nbytes <= ERROR_ROOM:
            at = error_at(rank, self._node.size)
            return bytes(self._node.block[at : at + nbytes])
        key = self._words[row + ERROR_KEY]
        try:
            return self._node.segments.open(self._node.pids[rank], key, nbytes)[:nbytes]
        except OSError as gone:
            failure = Failure("an error", f"the rank has ended since ({gone})", rank, op="")
            return pickle.dumps(RemoteError(failure), 5)

    def _seal_error(self) -> None:
        if self._error_key is not None:
            self._node.segments.seal(self._error_key)
            self._error_key = None


def _pickled(error: BaseException, rank: int) -> bytes:
    """An error as bytes; one that cannot be pickled goes as a `RemoteError` with its text."""
    try:
        content = pickle.dumps(error, 5)
        pickle.loads(content)
    except Exception:  # whatever a user's exception class does when it is pickled
        failure = Failure(
            type_name(error), str(error), rank, op="", traceback=traceback_text(error)
        )
        return pickle.dumps(RemoteError(failure), 5)
    return content


def _unpickled(content: bytes | None, rank: int) -> BaseException:
    assert content is not None
    try:
        error = pickle.loads(content)
    except Exception as problem:  # a class that only its own rank can import
        failure = Failure("an error", f"it cannot be unpickled here: {problem}", rank, op="")
        return RemoteError(failure)
    return error if isinstance(error, BaseException) else TransportError(str(error))
