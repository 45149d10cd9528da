"""Error agreement: all ranks of a failed execution come to raise one error."""

from __future__ import annotations

import pickle
from time import monotonic
from typing import Final

from ...base import Pause
from ...errors import Failure, RemoteError, TransportError, message_text, traceback_text, type_name
from ..memory.layout import ERROR_BYTES, ERROR_KEY, ERROR_ROOM, FAILED, REFUSED, ROW, error_at
from ..waiting.node import MachineNode
from .link import Failed, NewsLink
from .rank_status import BarrierWord, State, StatusTable, named

GRACE: Final = 1.0
"""Seconds that a failed execution waits for the other ranks, so that all agree on the error."""


class ErrorAgreement:
    """Lets all ranks of a failed execution raise one error.

    It publishes this rank's errors, and collects those of other ranks.

    Inside a machine an error lies in the control block, or, if it is large, in a segment. Each rank
    of another machine is sent a copy of its own.

    Args:
        node: this machine.
        table: the rows of all ranks.
        link: the link to other machines, if there are any.
    """

    def __init__(self, node: MachineNode, table: StatusTable, link: NewsLink | None) -> None:
        self._node = node
        self._table = table
        self._link = link
        self._words = node.words
        self._mine = node.rank * ROW
        self._key: int | None = None
        self._from_afar: dict[int, Failed] = {}

    def agree(
        self, epoch: int, error: BaseException | None, refused: bool, pause: Pause
    ) -> BaseException:
        """Say that the execution has failed, wait for the others, and choose the error.

        Args:
            epoch: the execution's epoch.
            error: what was raised here; None where only another rank has failed.
            refused: whether it was raised before this rank began its program.
            pause: how to wait.

        Returns:
            The error of the lowest rank on which one occurred; a `TransportError` if none has come
            within `GRACE`.
        """
        rank, size = self._node.rank, self._node.size
        content = None if error is None else pickled(error, rank)
        self.publish(epoch, content, refused)
        self._table.set_state(State.FAILED)
        if self._link is not None:
            self._link.tell_all(Failed(rank, epoch, content, refused))
        until = monotonic() + GRACE
        polls = 0
        while monotonic() < until and not all(
            self._has_voted(voter, epoch) for voter in range(size)
        ):
            polls += 1
            pause(polls)
        contents = ((r, c) for r in range(size) if (c := self.content(r, epoch)))
        origin, first = next(contents, (rank, None))
        if first is None:
            return TransportError(
                f"{named(epoch)} has failed on another rank, and its error has not come within "
                f"{GRACE} s; see the output of the other ranks"
            )
        if error is None:
            return unpickled(first, origin)
        if origin == rank:
            return error
        agreed = unpickled(first, origin)
        is_the_same = type(error) is type(agreed) and str(error) == str(agreed)
        return error if is_the_same else agreed  # all ranks may raise the same error by themselves

    def _has_voted(self, rank: int, epoch: int) -> bool:
        """Return whether a rank has ended the execution, by success or by failure, or by dying."""
        has_committed = self._table.reached(rank, BarrierWord.COMMIT) >= epoch
        return has_committed or self.last_failed(rank) == epoch or self._table.has_ended(rank)

    def publish(self, epoch: int, content: bytes | None, refused: bool = False) -> None:
        """Say that the execution has failed here; None if another rank failed first."""
        node, words, row = self._node, self._words, self._mine
        if refused:
            words[row + REFUSED] = epoch
        words[row + ERROR_BYTES] = 0 if content is None else len(content)
        if content is not None and len(content) <= ERROR_ROOM:
            at = error_at(node.rank, node.size)
            node.block[at : at + len(content)] = content
        elif content is not None:
            segment = node.segments.create(len(content))
            segment.memory[: len(content)] = content
            self._key = words[row + ERROR_KEY] = segment.key
        node.fence()
        words[row + FAILED] = epoch
        node.wake_all()

    def note(self, failed: Failed) -> None:
        """Keep in mind that an execution has failed on a rank of another machine."""
        if failed.epoch > self.last_failed(failed.rank) or failed.error is not None:
            self._from_afar[failed.rank] = failed

    def is_refused(self, epoch: int) -> bool:
        """Return whether a rank, as far as is known here, has failed before its program began."""
        words = self._words
        if any(words[rank * ROW + REFUSED] == epoch for rank in self._node.local):
            return True
        return any(far.refused and far.epoch == epoch for far in self._from_afar.values())

    def last_failed(self, rank: int) -> int:
        """The last epoch that has failed on a rank; 0 if none."""
        if self._node.is_local(rank):
            return self._words[rank * ROW + FAILED]
        far = self._from_afar.get(rank)
        return 0 if far is None else far.epoch

    def content(self, rank: int, epoch: int) -> bytes | None:
        """The pickled error that occurred on a rank in an epoch, if one did."""
        if self.last_failed(rank) != epoch:
            return None
        if not self._node.is_local(rank):
            return self._from_afar[rank].error
        self._node.fence()
        nbytes = self._words[rank * ROW + ERROR_BYTES]
        if nbytes <= ERROR_ROOM:
            at = error_at(rank, self._node.size)
            return bytes(self._node.block[at : at + nbytes]) or None
        key = self._words[rank * ROW + ERROR_KEY]
        try:
            return self._node.segments.open(self._node.pids[rank], key, nbytes)[:nbytes]
        except OSError as gone:
            failure = Failure("an error", f"the rank has ended since ({gone})", rank, op="")
            return pickle.dumps(RemoteError(failure), 5)

    def withdraw(self) -> None:
        """Withdraw this rank's error: all ranks know it, or never will."""
        if self._key is not None:
            self._node.segments.seal(self._key)
            self._key = None


def pickled(error: BaseException, rank: int) -> bytes:
    """An error as bytes; one that cannot be pickled becomes a `RemoteError` with its text."""
    try:
        content = pickle.dumps(error, 5)
        pickle.loads(content)
    except Exception:  # whatever a user's exception class does when it is pickled
        failure = Failure(
            type_name(error), message_text(error), rank, op="", traceback=traceback_text(error)
        )
        return pickle.dumps(RemoteError(failure), 5)
    return content


def unpickled(content: bytes, rank: int) -> BaseException:
    """The error that was pickled; one that cannot be unpickled here becomes a `RemoteError`."""
    try:
        error = pickle.loads(content)
    except Exception as problem:  # a class that only its own rank can import
        failure = Failure("an error", f"it cannot be unpickled here: {problem}", rank, op="")
        return RemoteError(failure)
    if not isinstance(error, BaseException):
        return TransportError(str(error))
    if not isinstance(error, RemoteError):  # a RemoteError names its rank itself
        error.add_note(f"raised on rank {rank}")
    return error
