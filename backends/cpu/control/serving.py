"""Waiting of processes that drive and serve graphs: by bell, by clock, and in asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from os import sched_yield
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from ...errors import PeerLost
from ..memory.layout import ROW, STATE
from ..waiting.contention import Contention
from ..waiting.node import MachineNode
from ..waiting.waiting import SLEEP, nap
from .rank_status import State

if TYPE_CHECKING:
    from ...driven.futures import Future

_TURNS: Final = 1000
"""Fruitless turns before the process sleeps. A turn takes a quarter of a microsecond or more; a
yield of the core between two turns takes half a microsecond if nothing else wants to run."""

_FEW_TURNS: Final = 1
"""The same under contention, where no turn yields."""

_YIELD_EVERY: Final = 4
"""Turns per yield while the process has its core to itself. Where two ranks share a core, each turn
without a yield would delay the other by as much."""

_QUICK: Final = 6e-6
_MOST_TURNS: Final = 32
"""The first seconds of each wait, and the most turns in them, without a yield while the process has
its core to itself. A message that comes during a yield is seen late, and similar round trips would
yield at the same turn each time."""

_MOST_LOOKS: Final = 256
"""The most turns without a yield, over any number of waits: only a yield shows whether another
process wants the core."""

_ALONE: Final = 2e-6
"""Seconds that a yield takes at most if it has found nobody else to run."""

_TICKS: Final = 64
"""Turns of an event loop in which a future is polled, before the process waits for the bell."""

_TIMER: Final = 1e-3
"""Seconds after which an event loop looks again, where no bell rings for all that is awaited."""


class Serving:
    """Waiting of one process; `Waiting` in `backends/driven/outcomes.py` describes the methods.

    Args:
        node: this machine.
        hear: takes in what other machines tell (`Control.hear`).
        where: says where ranks are (`Control.where`).
    """

    def __init__(
        self, node: MachineNode, hear: Callable[[], None], where: Callable[..., str]
    ) -> None:
        self._node = node
        self._hear = hear
        self.where = where
        self._flag = node.waiting(node.rank)
        self._turns = _TURNS
        self._contention = Contention()
        self._is_alone = False
        self._first_yield = self._looks = 0
        self._yielded_at, self._yielded = 0, 0.0
        self._suspected_at = 0
        self._pumps: dict[asyncio.AbstractEventLoop, _Pump] = {}

    def pause(self, polls: int, seconds: float | None) -> None:
        """Give way after `polls` fruitless turns.

        Raises:
            PeerLost: a rank has ended, and nothing has come from it since that was noticed.
        """
        if polls <= self._turns:
            if polls == 1:
                self.rest()
                if self._turns == _FEW_TURNS:
                    if self._contention.is_on(perf_counter()):
                        return
                    self._turns = _TURNS
                self._yielded_at = self._turns  # this wait has not yielded yet
            self._looks += 1
            is_early = polls < self._first_yield or polls % _YIELD_EVERY
            if self._is_alone and is_early and self._looks < _MOST_LOOKS:
                return
            self._looks = 0
            began = perf_counter()
            sched_yield()
            ended = perf_counter()
            self._is_alone = ended - began < _ALONE
            turns = polls - self._yielded_at
            if 0 < turns <= _YIELD_EVERY:  # both yields are of this wait
                quick = _QUICK * turns / max(began - self._yielded, 1e-9)
                self._first_yield = int(min(quick, _MOST_TURNS))
            elif self._first_yield < _MOST_TURNS:  # the last wait was too short to measure turns
                self._first_yield += 1
            self._yielded_at, self._yielded = polls, ended
            if self._contention.note(began, ended):
                self._turns = _FEW_TURNS
        else:
            self._sleep(polls, seconds)

    def _sleep(self, polls: int, seconds: float | None) -> None:
        """Ask to be woken at the first call, and sleep at the next one.

        In between, the caller looks for messages that came before others saw the request.
        """
        node = self._node
        lost = self._lost()
        if lost is not None:
            if polls == self._suspected_at + 1:
                raise lost
            self._suspected_at = polls
            return
        if not node.words[self._flag]:
            node.words[self._flag] = 1
            node.fence()
            return
        longest = SLEEP if node.is_rung else nap((polls - self._turns) // 2)
        try:
            node.bell.wait(longest if seconds is None else min(longest, seconds))
        finally:
            self.rest()

    def rest(self) -> None:
        words = self._node.words
        if words[self._flag]:
            words[self._flag] = 0

    def pause_simply(self, polls: int) -> None:
        """Give way, without a deadline."""
        self.pause(polls, None)

    @contextmanager
    def serving(self) -> Iterator[None]:
        words, at = self._node.words, self._node.rank * ROW + STATE
        before, words[at] = words[at], State.SERVING
        try:
            yield
        finally:
            words[at] = before

    def watch(self, turn: Callable[[], bool], future: Future) -> Generator[Any, None, None]:
        for _ in range(_TICKS):
            if not turn():
                began = perf_counter()
                if self._contention.is_on(began):
                    break
                sched_yield()  # a rank that is waited for may share the core
                self._contention.note(began, perf_counter())
            if future.is_done:
                return
            yield
        loop = asyncio.get_running_loop()
        self._pumps = {loop: pump for loop, pump in self._pumps.items() if not loop.is_closed()}
        pump = self._pumps.get(loop)
        if pump is None:
            pump = self._pumps[loop] = _Pump(self._node, loop, turn, self._lost)
        yield from pump.wait(future)

    def _lost(self) -> PeerLost | None:
        """The error for a rank that has ended while others need it, if there is one.

        A rank that ends in order has seen the driver close all graphs. This rank may hear of that
        end before the driver's command has come here.
        """
        node = self._node
        if len(node.leaders) > 1:
            self._hear()
        for rank in range(node.size):
            dead = rank in node.bell.dead
            if dead or node.words[rank * ROW + STATE] == State.DESERTED:
                how = "has died" if dead else "has ended"
                return PeerLost(
                    f"rank {rank} {how} while graphs are open. The driver ends a graph by close(), "
                    "and every other rank serves until then; start the job again",
                    rank,
                    dead,
                )
        return None


class _Pump:
    """Moves executions on inside an event loop, when the bell rings."""

    def __init__(
        self,
        node: MachineNode,
        loop: asyncio.AbstractEventLoop,
        turn: Callable[[], bool],
        lost: Callable[[], PeerLost | None],
    ) -> None:
        self._node = node
        self._loop = loop
        self._turn = turn
        self._lost = lost
        self._waiting: dict[asyncio.Future[None], Future] = {}
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, future: Future) -> Generator[Any, None, None]:
        """Wait until `future` is done."""
        woken = self._loop.create_future()
        self._waiting[woken] = future
        if len(self._waiting) == 1:
            self._loop.add_reader(self._node.bell.fileno(), self._wake)
        self._look()
        try:
            yield from woken
        finally:
            self._waiting.pop(woken, None)
            if not self._waiting:
                self._disarm()

    def _wake(self) -> None:
        """The bell has rung."""
        self._node.bell.wait(0)
        self._look()

    def _look(self) -> None:
        """Ask to be woken, then look for messages that came before others saw the request."""
        if self._timer is not None:
            self._timer.cancel()
        error: Exception | None = None
        try:
            while True:
                self._node.words[self._node.waiting(self._node.rank)] = 1
                self._node.fence()
                if not self._turn():
                    break
            error = self._lost()
            if error is not None:
                self._turn()  # for messages that the rank sent before it ended
        except Exception as raised:
            error = raised
        for woken, future in self._waiting.items():
            if woken.done():
                continue
            if future.is_done:
                woken.set_result(None)
            elif error is not None:
                woken.set_exception(error)
        self._timer = self._loop.call_later(SLEEP if self._node.is_rung else _TIMER, self._look)

    def _disarm(self) -> None:
        self._loop.remove_reader(self._node.bell.fileno())
        self._node.words[self._node.waiting(self._node.rank)] = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
