"""The loop on rank 0, whatever is served: takes commands, submits work, collects results."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from . import wire
from .collector import settle
from .features import Features
from .requests import Limits, Request
from .wire import Kind, Link

log = logging.getLogger("serve")

Ticket = TypeVar("Ticket")
"""Work in flight, as a scheduler gives it."""
BUDGET = 64
"""Commands that a step takes while there is other work, so that a burst does not delay decodes."""
BACKLOG = 4096
"""Commands at which the socket is read no further until some are taken."""
BEAT = 1.0
"""Seconds between counts that are sent while there is work."""
QUIET = 1.0
"""Seconds without work after which an engine counts as idle, at least: a client may ask again."""
LONGEST_QUIET = 10.0
"""Such seconds at most, for a slice may have been long by chance."""
GLANCE = 0.02
"""Seconds for requests to come out of the socket before an idle engine is improved further."""
PATIENCE = 300.0
"""Seconds after which an execution that has not ended is taken for a hang; the process ends."""


class Landing(Protocol):
    """A result, as a loop needs it."""

    def done(self) -> bool: ...
    def when_done(self, call: Any) -> None: ...


class Growing(Protocol):
    """An engine, as a loop needs it."""

    limits: Limits
    longest_slice: float

    def due(self, idle: bool) -> bool: ...
    def improve(self) -> bool: ...
    def when_ready(self, call: Callable[[], None]) -> None: ...


class Loop(ABC, Generic[Ticket]):
    """Serves one front with one engine.

    Args:
        lanes: queues of work, each of which ends in the order of submission.
        patience: as `PATIENCE`.

    Attributes:
        link: to the front.
        features: switches, whose changes are counted.
    """

    def __init__(
        self, engine: Growing, features: Features, lanes: int, patience: float = PATIENCE
    ) -> None:
        self._engine, self.features = engine, features
        self._commands: deque[tuple[Kind, Any]] = deque()
        self._lanes: list[deque[tuple[Ticket, Any, float]]] = [deque() for _ in range(lanes)]
        self._wake = asyncio.Event()
        self._patience = patience
        self._busy = self._since = 0.0  # seconds with work in flight; since when there is some
        self._quiet_at = 0.0  # when it counts as idle
        self._timer: asyncio.TimerHandle | None = None
        self._fault: Exception | None = None
        self._is_paused = False
        self.link = Link(self._on_frame, lambda link: self._wake.set(), self._wake.set)

    # -- what is served ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """True if there are no requests."""

    @abstractmethod
    def obey(self, command: Request | int) -> None:
        """Take a request, or the id of one that is cancelled."""

    @abstractmethod
    def tickets(self) -> Iterable[Ticket]:
        """All work that can be submitted now; each piece is before the next is asked for."""

    @abstractmethod
    def start(self, ticket: Ticket) -> tuple[int, Landing]:
        """Submit work; its lane and its result."""

    @abstractmethod
    def read(self, result: Any) -> Any:
        """The values of a result; its error, if it has one, ends its requests alone."""

    @abstractmethod
    def complete(self, ticket: Ticket, values: Any) -> None:
        """Take what the execution of a ticket has given."""

    @abstractmethod
    def drop(self, ticket: Ticket, message: str) -> None:
        """End the requests of work that has failed."""

    @abstractmethod
    def send(self) -> None:
        """Send what has happened, unless the front does not read."""

    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """Counts for the front."""

    def connected(self, path: Path) -> None:
        """Prepare, once the front is there, whose socket is at a path."""

    def turn(self) -> None:
        """Do whatever else has to be done in a turn of the loop."""

    def tell(self, now: float) -> None:
        """Log whatever is to be told while there is work."""

    def ended(self) -> None:
        """Clean up, after the front has gone."""

    # -- life --------------------------------------------------------------------------------------

    async def run(self, path: Path) -> None:
        """Connect to the front, and serve until it closes the socket.

        Raises:
            TimeoutError: an execution has not ended for `patience` seconds.
            WireError: the front has sent a frame that is no command.
        """
        await asyncio.get_running_loop().create_unix_connection(lambda: self.link, str(path))
        self.connected(path)
        self.link.send(Kind.HELLO, wire.pack_hello(self._engine.limits))
        self._quiet_at = monotonic() + QUIET
        self._engine.when_ready(partial(self._wake_from_thread, asyncio.get_running_loop()))
        self.send_stats()
        self._settle()
        collections = gc.get_stats()[2]["collections"]
        while not self.link.is_closed and self._fault is None:
            self._wake.clear()
            self._take_commands()
            self._collect()
            self.turn()
            if self._engine.due(self._is_quiet()):
                self.send()
                self._improve()
            else:
                for ticket in self.tickets():
                    self._submit(ticket)
            self.send()
            if not self.features.gc_freeze:
                self.features.changes["gc_freeze"] = gc.get_stats()[2]["collections"] - collections
            if self._commands or self._wake.is_set():
                await asyncio.sleep(0)  # gives other tasks a turn, as the set event would not
            else:
                await self._wake.wait()
        if self._timer is not None:
            self._timer.cancel()
        self.ended()
        self.link.close()
        if self._fault is not None:
            raise self._fault

    # -- commands ----------------------------------------------------------------------------------

    def _on_frame(self, link: Link, kind: Kind, payload: bytes) -> None:
        try:
            if kind is Kind.ADD:
                self._commands.extend((kind, request) for request in wire.unpack_requests(payload))
            elif kind is Kind.CANCEL:
                self._commands.extend((kind, id_) for id_ in wire.numbers(payload))
            else:
                raise wire.WireError(f"rank 0 takes no frames of kind {kind.name}")
        except ValueError as error:
            self._fault = error
        if len(self._commands) > BACKLOG and not self._is_paused:
            self._is_paused = True
            link.pause(True)
        self._wake.set()

    def _take_commands(self) -> None:
        """Take a step's share of the commands; all of them while there is nothing else to do."""
        is_idle = self.is_idle
        taken = 0
        while self._commands:
            if taken >= BUDGET and not is_idle:
                if self.features.cmd_budget:
                    break
                self.features.changes["cmd_budget"] += 1
            self.obey(self._commands.popleft()[1])
            taken += 1
        if self._is_paused and len(self._commands) < BACKLOG // 2:
            self._is_paused = False
            self.link.pause(False)
        if taken and is_idle and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BEAT, self._beat)

    # -- work --------------------------------------------------------------------------------------

    def _submit(self, ticket: Ticket) -> None:
        try:
            lane, result = self.start(ticket)
        except Exception as error:
            self._fail(ticket, error)
            return
        now = monotonic()
        if not any(self._lanes):
            self._since = now
        self._lanes[lane].append((ticket, result, now))
        result.when_done(self._wake.set)

    def _wake_from_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._wake.set)

    def _improve(self) -> None:
        """Let the engine prepare for other work for a moment, once what is in flight has ended.

        Nothing else is submitted until then, and this process does nothing else meanwhile.
        """
        if any(self._lanes):
            return
        try:
            if self._engine.improve():
                self._settle()
        except Exception as error:
            self._fault = error
        # Requests that have come meanwhile are still in the socket.
        self._quiet_at = max(self._quiet_at, monotonic() + GLANCE)
        self._wake.set()

    def _settle(self) -> None:
        if self.features.gc_freeze:
            settle()

    def _is_quiet(self) -> bool:
        """True if there has been no work for a while; if there is none, looks again after it."""
        if not self.is_idle:
            self._quiet_at = self._quiet_from_now()
            return False
        left = self._quiet_at - monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._wake.set)
        return left <= 0

    def _quiet_from_now(self) -> float:
        """When the engine counts as idle if nothing comes.

        That is as long as a request that comes then may wait, for the same reason as in `due`.
        """
        return monotonic() + min(max(QUIET, self._engine.longest_slice), LONGEST_QUIET)

    def _collect(self) -> None:
        was_busy = any(self._lanes)
        for queue in self._lanes:
            while queue and queue[0][1].done():
                ticket, result, _ = queue.popleft()
                try:
                    values = self.read(result)
                except Exception as error:
                    self._fail(ticket, error)
                else:
                    self.complete(ticket, values)
        if was_busy and not any(self._lanes):
            self._busy += monotonic() - self._since
            self._quiet_at = self._quiet_from_now()

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        log.warning("an execution has failed: %s", error, exc_info=error)
        self.drop(ticket, f"{type(error).__name__}: {error}"[:500])
        self._wake.set()

    # -- counts ------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send counts while there is work, and check that it moves on."""
        self._timer = None
        now = monotonic()
        oldest = min((queue[0][2] for queue in self._lanes if queue), default=now)
        if now - oldest > self._patience:
            self._fault = TimeoutError(f"an execution has not ended for {now - oldest:.0f} s")
            self._wake.set()
        if not self.link.is_full:
            self.send_stats()
        self.tell(now)
        if not self.is_idle:
            self._timer = asyncio.get_running_loop().call_later(BEAT, self._beat)

    def send_stats(self) -> None:
        now = monotonic()
        busy = self._busy + (now - self._since if any(self._lanes) else 0.0)
        stats = {
            **self.counts(),
            "busy_seconds": busy,
            "pid": os.getpid(),
            "features": dict(self.features.changes),
        }
        self.link.send(Kind.STATS, json.dumps(stats).encode())
