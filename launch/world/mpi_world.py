"""The world of the ranks that an MPI launcher started."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from time import sleep
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ...backends.agreement.gather import SAME_CALLS
from ...backends.cpu.control.control import Control
from ...backends.device import Device
from ...backends.errors import PlanMismatch
from ...backends.failures.flight import ASKING, Activity, Sight, where_ranks_are
from ...ir.text.differences import named
from ..job.failure import DRAIN_SECONDS, KILL_SECONDS, record
from .stacks import Stacks
from .waiting import Notice, Notices, WorldError, ending_after, user_line, wait_until

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

T = TypeVar("T")

STALL = 5.0
"""Seconds after which a waiting rank tells the others where it waits."""
LEAVING = 0.2
"""Seconds after which a rank that has ended tells the others so."""
HEAD = 4096
"""Bytes of the first message of a broadcast: the length in 8 bytes, then the pickle's start."""


@dataclass
class _CollectiveWait:
    """A collective call of this rank, while it lasts."""

    request: Request
    sequence: int
    call: str
    told: bool = False
    """True if this rank has told the others that it waits."""


class MpiWorld:
    """A `World` over a private duplicate of MPI's COMM_WORLD.

    Besides what `World` asks for, it says how ranks share machines: `local_rank` among
    `local_size` ranks of this machine, which are `local_ranks`; `node_comm` joins them. `nodes`
    has for each rank the number of the machine whose memory it can share. `device` is set when the
    world has started.
    """

    is_virtual = False

    def __init__(self, mpi: Any, timeout: float | None) -> None:
        """Duplicate the communicators; all ranks together.

        Args:
            mpi: the module `mpi4py.MPI`, initialised.
            timeout: seconds before waiting for another rank is an error; None: never.

        Raises:
            TimeoutError: not every rank has come here in time.
        """
        self._mpi = mpi
        self.rank: int = mpi.COMM_WORLD.rank
        self.size: int = mpi.COMM_WORLD.size
        self._timeout = timeout
        self._sequence = 0
        self._broken = ""
        self._closed = False
        self.device: Device | None = None
        self._notices: Notices | None = None
        self._endings: list[Callable[[], bool]] = []
        self._stacks: Stacks | None = None
        self._control: Control | None = None
        self._ending = Lock()
        self._side = self._duplicate()
        self._notices = Notices(mpi, self._side)
        self.comm = self._duplicate()
        # These two block; that is safe, since every rank has come this far.
        self.node_comm = cast("Intracomm", self.comm.Split_type(mpi.COMM_TYPE_SHARED))
        self.local_ranks: tuple[int, ...] = tuple(self.node_comm.allgather(self.rank))
        self.local_rank: int = self.node_comm.rank
        self.local_size: int = self.node_comm.size
        firsts = self.allgather(self.local_ranks[0])
        numbers = {first: number for number, first in enumerate(sorted(set(firsts)))}
        self.nodes: Sequence[int] = tuple(numbers[first] for first in firsts)
        self._stacks = self._meet_stacks()

    def plays(self, rank: int) -> bool:
        """True if `rank` is this process."""
        return rank == self.rank

    def barrier(self) -> None:
        """Wait until every rank has come here; raises as `broadcast` does."""
        self._complete(self.comm.Ibarrier(), "barrier")

    def broadcast(self, value: T | None, root: int) -> T:
        """Give `root`'s value, pickled, to every rank; `value` is ignored elsewhere.

        Raises:
            TimeoutError: a rank has not come in time; the message names it.
            WorldError: a rank is in another call, or its program has ended.
            PlanMismatch: a rank is in an execution of a step instead.
        """
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast: root {root} is not a rank of {self.size}")
        call = f"broadcast from rank {root}"
        head = bytearray(HEAD)
        body = bytearray()
        if self.rank == root:
            body = bytearray(pickle.dumps(value, protocol=5))
            head[:8] = len(body).to_bytes(8, "little")
            head[8:] = body[: HEAD - 8].ljust(HEAD - 8, b"\0")
        self._complete(self.comm.Ibcast([head, self._mpi.BYTE], root), call)
        length = int.from_bytes(head[:8], "little")
        self._refuse_other_calls(call, [] if length else [root])
        if length > HEAD - 8:
            body = body or bytearray(length)
            self._complete(self.comm.Ibcast([body, self._mpi.BYTE], root), call)
        else:
            body = head[8 : 8 + length]
        return cast(T, value if self.rank == root else pickle.loads(body))

    def allgather(self, value: T) -> list[T]:
        """The values of all ranks, pickled, by rank; raises as `broadcast` does."""
        pickled = bytearray(pickle.dumps(value, protocol=5))
        lengths = bytearray(8 * self.size)
        length = bytearray(len(pickled).to_bytes(8, "little"))
        byte = self._mpi.BYTE
        self._complete(self.comm.Iallgather([length, byte], [lengths, 8, byte]), "allgather")
        counts = [
            int.from_bytes(lengths[8 * rank : 8 * rank + 8], "little") for rank in range(self.size)
        ]
        self._refuse_other_calls("allgather", [r for r, count in enumerate(counts) if not count])
        everything = bytearray(sum(counts))
        request = self.comm.Iallgatherv([pickled, byte], [everything, counts, byte])
        self._complete(request, "allgather")
        values: list[T] = []
        start = 0
        for count in counts:
            values.append(pickle.loads(everything[start : start + count]))
            start += count
        return values

    def left_ranks(self) -> tuple[int, ...]:
        """The ranks whose program has ended, as far as is known; cheap.

        Transports that wait for a rank by other means than MPI ask this now and then.
        """
        if self._notices is None:
            return ()
        self._notices.collect()
        return tuple(sorted(r for r, notice in self._notices.latest.items() if notice.left))

    def end_job(self, message: str) -> None:
        """End all ranks, since this one cannot go on; `message` says why.

        Where two threads have come upon the same failure, the first one says so.
        """
        if not self._ending.acquire(blocking=False):
            sleep(KILL_SECONDS)  # the first one ends this process meanwhile
        sys.stdout.flush()
        sys.stderr.write(f"[rank {self.rank}] {message}\n")
        sys.stderr.flush()
        record(message)
        sleep(DRAIN_SECONDS)
        self._mpi.COMM_WORLD.Abort(1)

    def answer_by(self, teller: Callable[[], Activity | None]) -> None:
        """Let `teller` say what this process does, when other ranks ask."""
        if self._stacks is not None:
            self._stacks.answer_by(teller)

    def look(self, ranks: Sequence[int], seconds: float) -> Mapping[int, Sight]:
        """Ask other ranks of this machine what they do, and wait `seconds` for answers."""
        return {} if self._stacks is None else self._stacks.look(ranks, seconds)

    def observe(self, control: Control) -> None:
        """Let `control` know of this rank's collective calls, and look around while it waits."""
        self._control = control

    def at_end(self, is_done: Callable[[], bool]) -> None:
        """Wait in `close` until `is_done` returns true."""
        self._endings.append(is_done)

    def close(self) -> None:
        """Meet the other ranks at the program's end, then finalise MPI; idempotent.

        Raises:
            TimeoutError: another rank's program has not ended in time.
            WorldError: an earlier call failed, so that the ranks cannot meet.
        """
        if self._closed or self._mpi.Is_finalized():
            return
        self._refuse_if_broken()
        wait = _CollectiveWait(self._side.Ibarrier(), self._sequence, "")
        if not wait_until(wait.request.Test, self._timeout, partial(self._tell, wait)):
            raise TimeoutError(
                f"the program of rank {self.rank} ended {self._timeout:g} s ago, but another "
                f"rank's still runs. {SAME_CALLS}; CG_TIMEOUT sets the limit"
                f"{self._where(self._silent(self._sequence, left=True))}"
            )
        self._closed = True
        self.left_ranks()  # MPI wants every message to be received
        if not wait_until(self._is_through, self._timeout, lambda _: None):
            raise TimeoutError(
                f"the program of rank {self.rank} has ended, as those of all ranks, but messages "
                f"to it have not come in {self._timeout:g} s; CG_TIMEOUT sets the limit"
            )
        with ending_after(self._timeout):
            self._mpi.Finalize()

    def _is_through(self) -> bool:
        self._endings = [is_done for is_done in self._endings if not is_done()]
        return not self._endings

    def _meet_stacks(self) -> Stacks | None:
        """Let ranks of this machine ask each other where they are; None if the system cannot."""
        try:
            stacks = Stacks(self.rank)
        except (OSError, RuntimeError):  # no files in memory, or no more threads
            stacks = None
        addresses = self.allgather(None if stacks is None else stacks.address)
        if stacks is not None:
            near = {r: to for r in self.local_ranks if (to := addresses[r]) and r != self.rank}
            stacks.meet(near)
        return stacks

    def _duplicate(self) -> Intracomm:
        comm, request = self._mpi.COMM_WORLD.Idup()
        self._complete(request, "the start of the world")
        return cast("Intracomm", comm)

    def _complete(self, request: Request, call: str) -> None:
        self._refuse_if_broken()
        self._sequence += 1
        wait = _CollectiveWait(request, self._sequence, call)
        try:
            if self._control is not None:
                self._control.enter(self._sequence, f"{call} at {user_line()}")
            if not wait_until(request.Test, self._timeout, partial(self._glance, wait)):
                raise TimeoutError(self._who_is_missing(call))
        except (TimeoutError, WorldError, PlanMismatch) as error:
            self._broken = str(error)
            raise
        except self._mpi.Exception as error:
            self._broken = f"{call} at {user_line()} failed in MPI: {error}. {SAME_CALLS}"
            raise WorldError(self._broken) from error

    def _glance(self, wait: _CollectiveWait, waited: float) -> None:
        """Raise if this call cannot complete any more.

        A rank may leave after it has made the call: the root of a broadcast may have ended long
        before the last rank receives it.
        """
        if self._control is not None:
            self._control.look()
        self._tell(wait, waited)
        latest = {} if self._notices is None else self._notices.latest
        ahead = sum(notice.sequence > wait.sequence for notice in latest.values())
        level = sum(notice.sequence == wait.sequence for notice in latest.values())
        overdue = waited > 2 * self._patience(wait) and ahead + level == self.size - 1
        for rank, notice in latest.items():
            if notice.left and notice.sequence < wait.sequence:
                why = f"the program of rank {rank} has ended"
            elif notice.sequence == wait.sequence and notice.call not in ("", wait.call):
                why = f"rank {rank} is in {notice.call} at {notice.where}"
            elif overdue and notice.sequence > wait.sequence:
                why = f"rank {rank} has gone on to {notice.call} at {notice.where}"
            else:
                continue
            raise WorldError(
                f"rank {self.rank} waits in {wait.call} at {user_line()}, but {why}. {SAME_CALLS}"
            )

    def _tell(self, wait: _CollectiveWait, waited: float) -> None:
        """Tell the other ranks, once, that this one waits or has left; read what they tell."""
        if self._notices is None:
            return
        if waited >= self._patience(wait) and not wait.told:
            wait.told = True
            self._notices.post(Notice(wait.sequence, wait.call, user_line()))
        self._notices.collect()

    def _patience(self, wait: _CollectiveWait) -> float:
        patience = STALL if wait.call else LEAVING
        return patience if self._timeout is None else min(patience, self._timeout / 4)

    def _who_is_missing(self, call: str) -> str:
        missing = self._silent(self._sequence)
        who = named(missing) if missing and self._notices is not None else "the other ranks"
        return (
            f"rank {self.rank} gave up {call} at {user_line()} after {self._timeout:g} s: {who} "
            "did not come. Look at what is slow or stuck there; CG_TIMEOUT sets the limit"
            f"{self._where(missing)}"
        )

    def _silent(self, sequence: int, left: bool = False) -> list[int]:
        """The ranks that have not told of this call or, with `left`, that they have ended."""
        latest = {} if self._notices is None else self._notices.latest
        heard = {r for r, n in latest.items() if n.sequence >= sequence and (n.left or not left)}
        return [rank for rank in range(self.size) if rank not in heard | {self.rank}]

    def _where(self, ranks: Sequence[int]) -> str:
        """Describe where other ranks are, in a line or more each.

        Before there is a control of executions, those of this machine alone are known.
        """
        if self._timeout is None:
            return ""
        seconds = min(ASKING, self._timeout)
        if self._control is not None:
            text = self._control.where(ranks, seconds=seconds)
        else:
            text = where_ranks_are((), self.look(ranks, seconds))
        return text and f"\n{text}"

    def _refuse_other_calls(self, call: str, empty: Sequence[int]) -> None:
        """Raise if ranks have given no bytes: a pickle has some.

        To MPI, messages of the barrier that another rank is in may be those of this call.
        """
        if empty:
            self._broken = (
                f"rank {self.rank} is in {call} at {user_line()}, but {named(empty)} in a barrier. "
                f"{SAME_CALLS}: look for an error that one rank alone has caught"
            )
            raise WorldError(self._broken)

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise WorldError(f"the ranks are out of step since an earlier error: {self._broken}")
