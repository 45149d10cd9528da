"""The loop on rank 0: commands of the front in, work to the engine, events out.

One loop of asyncio holds the socket and the futures of the engine, in one thread. The loop sleeps
until a command has come or an execution has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import wire
from .features import Features
from .requests import ERROR, UNFOLLOWED, End, Events, Request, Scores
from .scheduler import Scheduler
from .serving_loop import PATIENCE, Loop
from .tickets import Ticket
from .transports import Feeder, Ring
from .wire import Kind
from .work import Decode, Engine, Result

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from .groups import Guide
    from .structure.guides import Guides

log = logging.getLogger("serve")

TELL = 10.0
"""Seconds between lines in the log on proposals, while there is work."""
Drawn = tuple[list[int], list[Scores], list[Scores], list[int]]
"""Tokens, their scores, those of a prompt, and how many tokens each row has."""
USUAL_CHUNK = 512
"""The longest chunk of an engine on hosts."""


class EngineLoop(Loop[Ticket]):
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
        super().__init__(engine, features or Features(), engine.limits.groups + 1, patience)
        self.engine = engine
        self.scheduler = Scheduler(engine.limits, self.features)
        self._unsent = Events()
        self._usual_chunk = usual_chunk
        self._tells_at = 0.0  # when the log says the next time how many proposals were right
        self._told = 0  # proposals by then
        self._load = vocabulary
        self._guides: Guides | None = None
        self._opening: dict[int, Request] = {}  # whose guides are not ready for a first token
        self._feeder: Feeder | None = None
        self._ring: Ring | None = None

    def connected(self, path: Path) -> None:
        if self.features.queue_ipc:
            self._feeder = Feeder(self.link)
        if self.features.shm_ring:
            self._ring = Ring(path.with_suffix(".ring"), creates=True)

    def turn(self) -> None:
        self._take_guides()
        if self._guides is not None:
            self._guides.advance(self.scheduler.take_advances())

    def ended(self) -> None:
        if self._feeder is not None:
            self._feeder.close()
        if self._guides is not None:
            self._guides.close()

    # -- commands ----------------------------------------------------------------------------------

    def obey(self, command: Request | int) -> None:
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

    # -- work --------------------------------------------------------------------------------------

    def tickets(self) -> Iterable[Ticket]:
        return self.scheduler.schedule()

    def start(self, ticket: Ticket) -> tuple[int, Result]:
        self._count(ticket)
        result = self.engine.submit(ticket.work)
        return (ticket.work.group if isinstance(ticket.work, Decode) else -1), result

    def read(self, result: Result) -> Drawn:
        return result.result(), result.scores(), result.prompt_scores(), result.counts()

    def complete(self, ticket: Ticket, values: Drawn) -> None:
        self.scheduler.complete(ticket, *values)

    def drop(self, ticket: Ticket, message: str) -> None:
        self.scheduler.fail(ticket, message)

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

    def send(self) -> None:
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
            self.send_stats()

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

    def tell(self, now: float) -> None:
        speculation = self.scheduler.speculation
        if now >= self._tells_at and speculation.draft_tokens > self._told:
            self._tells_at, self._told = now + TELL, speculation.draft_tokens
            log.info(
                "%d of %d proposed tokens were right",
                speculation.accepted_tokens,
                speculation.draft_tokens,
            )

    def counts(self) -> dict[str, Any]:
        scheduler, speculation = self.scheduler, self.scheduler.speculation
        return {
            **asdict(scheduler.stats),
            "running": scheduler.running,
            "waiting": len(scheduler.waiting) + len(self._opening),
            "blocks_used": scheduler.blocks.used,
            "prefix_queries": scheduler.blocks.queries,
            "prefix_hits": scheduler.blocks.hits,
            "drafts": speculation.drafts,
            "draft_tokens": speculation.draft_tokens,
            "accepted_tokens": speculation.accepted_tokens,
        }
