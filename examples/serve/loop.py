"""The loop on rank 0: commands of the front in, work to the engine, events out.

One loop of asyncio holds the socket and the futures of the engine, in one thread. The loop sleeps
until a command has come or an execution has ended.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from . import wire
from .features import Features
from .requests import ERROR, UNFOLLOWED, End, Events, Request
from .scheduler import Scheduler, Ticket
from .transports import Feeder, Ring
from .wire import Kind, Link
from .work import Decode, Engine, Result

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from .groups import Guide
    from .structure.guides import Guides

log = logging.getLogger("serve")

BUDGET = 64
"""Commands that a step takes while there is other work, so that a burst does not delay decodes."""
BACKLOG = 4096
"""Commands at which the socket is read no further until some are taken."""
BEAT = 1.0
"""Seconds between counts that are sent while there is work."""
TELL = 10.0
"""Seconds between lines in the log on proposals, while there is work."""
USUAL_CHUNK = 512
"""The longest chunk of an engine on hosts."""
QUIET = 1.0
"""Seconds without work after which an engine counts as idle: a client may ask again at once."""
PATIENCE = 300.0
"""Seconds after which an execution that has not ended is taken for a hang; the process ends."""


class EngineLoop:
    """Serves one front with one engine.

    Args:
        patience: as `PATIENCE`.
        usual_chunk: the longest chunk without `-chunk`.
        vocabulary: gives the tokens of the model as llguidance needs them.
    """

    def __init__(
        self,
        engine: Engine,
        features: Features | None = None,
        patience: float = PATIENCE,
        usual_chunk: int = USUAL_CHUNK,
        vocabulary: Callable[[], LLTokenizer] | None = None,
    ) -> None:
        self.engine, self.features = engine, features or Features()
        self.scheduler = Scheduler(engine.limits, self.features)
        self._commands: deque[tuple[Kind, Any]] = deque()
        queues = engine.limits.groups + 1
        self._lanes: list[deque[tuple[Ticket, Result, float]]] = [deque() for _ in range(queues)]
        self._unsent = Events()
        self._wake = asyncio.Event()
        self._patience, self._usual_chunk = patience, usual_chunk
        self._busy = self._since = 0.0  # seconds with work in flight; since when there is some
        self._quiet_at = 0.0  # when it counts as idle
        self._tells_at = 0.0  # when the log says the next time how many proposals were right
        self._told = 0  # proposals by then
        self._timer: asyncio.TimerHandle | None = None
        self._fault: Exception | None = None
        self._is_paused = False
        self._load = vocabulary
        self._guides: Guides | None = None
        self._opening: dict[int, Request] = {}  # whose guides are not ready for a first token
        self._feeder: Feeder | None = None
        self._ring: Ring | None = None
        self.link = Link(self._on_frame, lambda link: self._wake.set(), self._wake.set)

    async def run(self, path: Path) -> None:
        """Connect to the front, and serve until it closes the socket.

        Raises:
            TimeoutError: an execution has not ended for `patience` seconds.
            WireError: the front has sent a frame that is no command.
        """
        await asyncio.get_running_loop().create_unix_connection(lambda: self.link, str(path))
        if self.features.queue_ipc:
            self._feeder = Feeder(self.link)
        if self.features.shm_ring:
            self._ring = Ring(path.with_suffix(".ring"), creates=True)
        self.link.send(Kind.HELLO, wire.pack_hello(self.engine.limits))
        self._quiet_at = monotonic() + QUIET
        self._send_stats()
        if self.features.gc_freeze:
            gc.collect()
            gc.freeze()
        collections = gc.get_stats()[2]["collections"]
        while not self.link.is_closed and self._fault is None:
            self._wake.clear()
            self._take_commands()
            self._take_guides()
            self._collect()
            self._advance_guides()
            if self.engine.due(self._is_quiet()):
                self._send()
                self._improve()
            else:
                for ticket in self.scheduler.schedule():
                    self._submit(ticket)
            self._send()
            if not self.features.gc_freeze:
                self.features.changes["gc_freeze"] = gc.get_stats()[2]["collections"] - collections
            if self._commands or self._wake.is_set():
                await asyncio.sleep(0)  # gives other tasks a turn, as the set event would not
            else:
                await self._wake.wait()
        if self._timer is not None:
            self._timer.cancel()
        if self._feeder is not None:
            self._feeder.close()
        if self._guides is not None:
            self._guides.close()
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
            self._obey(*self._commands.popleft())
            taken += 1
        if self._is_paused and len(self._commands) < BACKLOG // 2:
            self._is_paused = False
            self.link.pause(False)
        if taken and is_idle and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BEAT, self._beat)

    def _obey(self, kind: Kind, command: Request | int) -> None:
        if isinstance(command, int):
            self._opening.pop(command, None)
            self.scheduler.cancel(command)
        elif command.grammar:
            self._open(command)
        else:
            self._add(command)

    def _add(self, request: Request, guide: Guide | None = None) -> None:
        try:
            self.scheduler.add(request, guide)
        except ValueError as error:  # the front has checked it, so it is the front's mistake
            self._unsent.ends.append(End(request.id, ERROR, 0, str(error)))

    # -- guides ------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True if there are no requests."""
        return self.scheduler.is_idle and not self._opening

    def _open(self, request: Request) -> None:
        """Let a request wait for its guide, beside those that wait for their turn."""
        if self._guides is None:
            from .structure.guides import Guides  # llguidance is for grammars alone

            if self._load is None:
                raise ValueError("an engine without a vocabulary takes no grammars")
            loop, limits = asyncio.get_running_loop(), self.engine.limits
            self._guides = Guides(
                self._load, limits.vocabulary, lambda: loop.call_soon_threadsafe(self._wake.set)
            )
        self._opening[request.id] = request
        self._guides.open(request.id, request.grammar)

    def _take_guides(self) -> None:
        """Go on with the requests whose guides are ready."""
        for guide in () if self._guides is None else self._guides.take():
            request = self._opening.pop(guide.id, None)
            if request is None:
                self.scheduler.guided(guide, guide.id)
            elif guide.error or guide.is_complete:
                reason = UNFOLLOWED if guide.error else "stop"
                self._unsent.ends.append(End(guide.id, reason, 0, guide.error))
            else:
                self._add(request, guide)

    def _advance_guides(self) -> None:
        if self._guides is not None:
            self._guides.advance(self.scheduler.take_advances())

    # -- work --------------------------------------------------------------------------------------

    def _submit(self, ticket: Ticket) -> None:
        self._count(ticket)
        try:
            result = self.engine.submit(ticket.work)
        except Exception as error:
            self._fail(ticket, error)
            return
        index = ticket.work.group if isinstance(ticket.work, Decode) else -1
        now = monotonic()
        if not any(self._lanes):
            self._since = now
        self._lanes[index].append((ticket, result, now))
        result.when_done(self._wake.set)

    def _improve(self) -> None:
        """Let the engine prepare for other work, once what is in flight has ended.

        Nothing else is submitted until then, and this process does nothing else meanwhile.
        """
        if any(self._lanes):
            return
        try:
            self.engine.improve()
        except Exception as error:
            self._fault = error
        # Requests that have come meanwhile are still in the socket, so this is no quiet moment.
        self._quiet_at = monotonic() + QUIET
        self._wake.set()

    def _is_quiet(self) -> bool:
        """True if there has been no work for a while; if there is none, looks again after it."""
        if not self.is_idle:
            self._quiet_at = monotonic() + QUIET
            return False
        left = self._quiet_at - monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._wake.set)
        return left <= 0

    def _collect(self) -> None:
        was_busy = any(self._lanes)
        for queue in self._lanes:
            while queue and queue[0][1].done():
                ticket, result, _ = queue.popleft()
                try:
                    drawn, scores, counts = result.result(), result.scores(), result.counts()
                    prompt_scores = result.prompt_scores()
                except Exception as error:
                    self._fail(ticket, error)
                else:
                    self.scheduler.complete(ticket, drawn, scores, prompt_scores, counts)
        if was_busy and not any(self._lanes):
            self._busy += monotonic() - self._since

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        log.warning("an execution has failed: %s", error, exc_info=error)
        self.scheduler.fail(ticket, f"{type(error).__name__}: {error}"[:500])
        self._wake.set()

    def _count(self, ticket: Ticket) -> None:
        """Count what the engine's switches change: padding, tokens of long chunks, checks."""
        work, limits = ticket.work, self.engine.limits
        is_decode = isinstance(work, Decode)
        lengths = [] if is_decode else [len(chunk.tokens) for chunk in work.chunks]
        ids = len(work.rows) if is_decode else sum(lengths)
        self.features.changes["clamp"] += ids if self.features.clamp else 0
        self.features.changes["debug_bounds"] += self.features.debug_bounds
        if is_decode:
            if not self.features.variants:
                self.features.changes["variants"] += limits.slots - len(work.rows)
        elif not self.features.chunk:
            self.features.changes["chunk"] += sum(
                max(0, length - self._usual_chunk) for length in lengths
            )

    # -- events ------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send new events in one frame; keep and merge them while the front does not read."""
        new = self.scheduler.take_events()
        self._unsent.started += new.started
        self._unsent.pairs += new.pairs
        self._unsent.ends += new.ends
        self._unsent.scores += new.scores
        self._unsent.prompts += new.prompts
        if not self._unsent or self.link.is_full:
            return
        events, self._unsent = self._unsent, Events()
        if self._feeder is not None:
            self.features.changes["queue_ipc"] += 1
            self._feeder.put(wire.plain(events))
        else:
            self._send_frame(events)
        if self.is_idle:
            self._send_stats()

    def _send_frame(self, events: Events) -> None:
        is_flat = self.features.flat_evts
        self.features.changes["flat_evts"] += not is_flat
        self.features.changes["inproc"] += self.features.inproc
        kind = Kind.EVENTS if is_flat else Kind.OBJECTS
        payload = wire.pack_events(events, is_flat)
        where = None if self._ring is None else self._ring.put(kind, payload)
        if where is None:
            self.link.send(kind, payload)
        else:
            self.features.changes["shm_ring"] += 1
            self.link.send(Kind.RING, where)

    def _beat(self) -> None:
        """Send counts while there is work, and check that it moves on."""
        self._timer = None
        now = monotonic()
        oldest = min((queue[0][2] for queue in self._lanes if queue), default=now)
        if now - oldest > self._patience:
            self._fault = TimeoutError(f"an execution has not ended for {now - oldest:.0f} s")
            self._wake.set()
        if not self.link.is_full:
            self._send_stats()
        self._tell_proposals(now)
        if not self.is_idle:
            self._timer = asyncio.get_running_loop().call_later(BEAT, self._beat)

    def _tell_proposals(self, now: float) -> None:
        speculation = self.scheduler.speculation
        if now >= self._tells_at and speculation.draft_tokens > self._told:
            self._tells_at, self._told = now + TELL, speculation.draft_tokens
            log.info(
                "%d of %d proposed tokens were right",
                speculation.accepted_tokens,
                speculation.draft_tokens,
            )

    def _send_stats(self) -> None:
        now = monotonic()
        scheduler = self.scheduler
        busy = self._busy + (now - self._since if any(self._lanes) else 0.0)
        stats = {
            **asdict(scheduler.stats),
            "running": scheduler.running,
            "waiting": len(scheduler.waiting) + len(self._opening),
            "blocks_used": scheduler.blocks.used,
            "prefix_queries": scheduler.blocks.queries,
            "prefix_hits": scheduler.blocks.hits,
            "drafts": scheduler.speculation.drafts,
            "draft_tokens": scheduler.speculation.draft_tokens,
            "accepted_tokens": scheduler.speculation.accepted_tokens,
            "busy_seconds": busy,
            "pid": os.getpid(),
            "features": dict(self.features.changes),
        }
        self.link.send(Kind.STATS, json.dumps(stats).encode())
