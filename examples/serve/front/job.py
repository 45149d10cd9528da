"""The engine's job, as the front sees it: started, watched, ended, started again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import Enum
from pathlib import Path
from time import monotonic
from typing import Any

from .. import wire
from ..features import Features
from ..progress import SAYING
from ..requests import End, Events, Limits, Request
from ..transports import Ring, unpickle
from ..wire import Kind, Link
from .errors import ApiError
from .metrics import Metrics
from .processes import Processes, of_job
from .protocol import Completion
from .reply import Reply

log = logging.getLogger("serve")

STALE = 5.0
"""Seconds without a beat, with requests there, after which the engine is not healthy."""
GRACE = 10.0
"""Seconds for the job to end by itself, once the socket is closed."""
FAREWELL = 2.0
"""Seconds for a job that has lost a process to say so and end."""
GONE = "gone"
"""The reason of an end beside those of the scheduler: the engine has gone."""
ORDERED = {"PYTHONHASHSEED": "0"}
"""Lets sets of strings have one order on all ranks: some models of transformers go through such."""
LONGEST_PAUSE = 30.0
"""Seconds between two starts of an engine that keeps failing."""


class State(Enum):
    """The state of the engine, as clients are told."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "being started again"
    CLOSED = "shutting down"


class EngineJob:
    """Starts `command` with the address of a socket, and gives it requests.

    Args:
        command: what to run; the address is appended. Or a function of the address, which serves
            in this process.
        folder: of mode 0700, for the socket.
        most: requests at once, which bounds threads.
        metrics: counts what the engine reports.
    """

    def __init__(
        self,
        command: Sequence[str] | Callable[[Path], Awaitable[None]],
        folder: Path,
        features: Features,
        most: int,
        metrics: Metrics,
    ) -> None:
        self.command, self.path = command, folder / "engine"
        self.features = features
        self.state = State.STARTING
        self.starts = 0
        self.limits: Limits | None = None
        self._metrics = metrics
        self._replies: dict[int, tuple[Reply, int]] = {}
        self._changed: dict[Reply, int] = {}  # since the last read, and their new tokens
        self._outbox: list[Request] = []
        self._ids = 0
        self._link: Link | None = None
        self._ring: Ring | None = None
        self._ended = asyncio.Event()
        self._processes = Processes(self._ended.set)
        self._process: subprocess.Popen[bytes] | None = None  # which starts the job
        self._beat = self._began = monotonic()
        self._server: asyncio.Server | None = None
        self._threads = None if features.async_stream else ThreadPoolExecutor(most)

    # -- requests ----------------------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        """True if it is ready, and beats or has nothing to do; or if this is its first start."""
        if self.state is State.READY:
            return not self._replies or monotonic() - self._beat < STALE
        return self.state is State.STARTING and self.starts <= 1

    def submit(self, completion: Completion) -> Reply:
        """Send a request for each choice; those of one turn of the loop share a frame.

        Raises:
            ApiError: 503 if there is no engine, or it does not read.
        """
        return self.enter(requests_of(completion))

    def enter(self, requests: Sequence[Request]) -> Reply:
        """Send requests, each of which is a choice of one reply; they get their ids here.

        Raises:
            ApiError: 503 if there is no engine, or it does not read.
        """
        if self.state is not State.READY or self._link is None:
            raise ApiError(503, f"the engine is {self.state.value}; try again later")
        if self._link.is_full:
            raise ApiError(503, "the engine does not take requests; try again later")
        if not self._replies:
            self._beat = monotonic()
        reply = Reply([len(request.prompt) for request in requests], self._threads)
        self.features.changes["async_stream"] += self._threads is not None
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        for index, request in enumerate(requests):
            self._ids += 1
            reply.ids.append(self._ids)
            self._replies[self._ids] = (reply, index)
            self._outbox.append(replace(request, id=self._ids))
        return reply

    def cancel(self, reply: Reply, index: int | None = None) -> None:
        """Drop a choice, or all; choices that have ended stay as they are."""
        ids = reply.ids if index is None else [reply.ids[index]]
        gone = [id_ for id_ in ids if self._replies.pop(id_, None) is not None]
        if not gone:
            return
        unsent = {request.id for request in self._outbox}.intersection(gone)
        if unsent:
            self._outbox = [request for request in self._outbox if request.id not in unsent]
        told = [id_ for id_ in gone if id_ not in unsent]
        if told and self._link is not None:
            self._link.send(Kind.CANCEL, wire.pack_ids(told))

    def end_all(self, message: str) -> None:
        """End every request, for there is no engine for them."""
        replies, self._replies = self._replies, {}
        self._outbox.clear()
        for id_, (reply, index) in replies.items():
            reply.ends[index] = End(id_, GONE, 0, message)
            reply.touch()

    def _flush(self) -> None:
        requests, self._outbox = self._outbox, []
        if requests and self._link is not None:
            wire.send_requests(self._link, requests, self.features)

    # -- what the engine says ----------------------------------------------------------------------

    def _on_frame(self, link: Link, kind: Kind, payload: bytes) -> None:
        if link is not self._link:
            return
        self._beat = monotonic()
        if kind is Kind.RING and self._ring is not None:
            kind, payload = self._ring.take(payload)
        if kind in (Kind.EVENTS, Kind.OBJECTS):
            self._take_events(wire.unpack_events(kind, payload))
        elif kind is Kind.PICKLED and self.features.queue_ipc:
            self._take_events(wire.events_of(*unpickle(payload)))
        elif kind is Kind.VECTORS:
            for id_, values in wire.unpack_vectors(payload):
                if id_ in self._replies:
                    reply, index = self._replies[id_]
                    reply.vectors[index] = values
        elif kind is Kind.STATS:
            self._metrics.take_stats(json.loads(payload))
        elif kind is Kind.HELLO:
            self._greet(link, *wire.unpack_hello(payload))

    def _greet(self, link: Link, limits: Limits, rank: int) -> None:
        """Take an engine that is ready, unless its job is being ended."""
        if self.state is not State.STARTING:
            link.close()
            return
        self.limits, self.state = limits, State.READY
        if self.features.shm_ring:
            self._ring = Ring(self.path.with_suffix(".ring"), creates=False)
        if self._process is not None:
            for process in of_job(self._process.pid, rank):
                self._processes.add(process)
        log.info(
            "the engine is ready after %.0f s: %d requests at a time, of %d tokens at most",
            monotonic() - self._began,
            limits.groups * limits.slots,
            limits.context,
        )

    def _take_events(self, events: Events) -> None:
        for id_ in events.started:
            if id_ in self._replies:
                self._metrics.count_start(self._replies[id_][0])
        changed = self._changed
        for place in range(0, len(events.pairs), 2):
            entry = self._replies.get(events.pairs[place])
            if entry is not None:
                reply, index = entry
                reply.tokens[index].append(events.pairs[place + 1])
                changed[reply] = changed.get(reply, 0) + 1
        for id_, scores in events.scores:
            if id_ in self._replies:
                reply, index = self._replies[id_]
                reply.scores[index].append(scores)
        for id_, scores in events.prompts:
            if id_ in self._replies:
                reply, index = self._replies[id_]
                reply.asked[index].append(scores)
        for end in events.ends:
            entry = self._replies.pop(end.id, None)
            if entry is not None:
                reply, index = entry
                reply.ends[index] = end
                changed.setdefault(reply, 0)

    def _tell_replies(self) -> None:
        """Have the replies read whose tokens have come.

        Frames that wait for this process come together. Their tokens share a chunk, so the front
        is quicker the further it is behind.
        """
        changed, self._changed = self._changed, {}
        for reply, number in changed.items():
            self._metrics.count_tokens(reply, number)
            reply.touch()

    def _on_end(self, link: Link) -> None:
        if link is self._link:
            self._ended.set()

    # -- the process -------------------------------------------------------------------------------

    def _connect(self) -> Link:
        link = Link(self._on_frame, self._on_end, on_read=self._tell_replies)
        if self._link is not None and not self._link.is_closed:
            return Link(lambda *_: None, lambda *_: None)  # one engine at a time
        self._link = link
        return link

    async def run(self) -> None:
        """Keep an engine running until `close`; returns early if the first never gets ready."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._connect, str(self.path))
        failures = 0
        while self.state is not State.CLOSED:
            began = monotonic()
            was_ready = await self._run_once()
            if self.state is State.CLOSED:
                return
            self.state = State.FAILED
            log.error("the engine has ended")
            self.end_all("the engine has ended; it is started again")
            await self._end_processes(FAREWELL)
            if self.limits is None:
                return
            failures = 0 if was_ready and monotonic() - began > 60 else failures + 1
            pause = min(LONGEST_PAUSE, 0.5 * 2 ** (failures - 1)) if failures else 0.0
            log.info("the engine is started again in %.1f s", pause)
            await asyncio.sleep(pause)
            if self.state is State.FAILED:  # and not closed meanwhile
                self.state = State.STARTING

    async def _run_once(self) -> bool:
        """Start the job and wait for its end; returns whether it was ready in between."""
        self._ended.clear()
        self._link = None
        self.starts += 1
        self._began = monotonic()
        log.info("starting the engine")
        said = asyncio.ensure_future(self._say_starting())
        if callable(self.command):
            here: asyncio.Future[Any] = asyncio.ensure_future(self.command(self.path))
            here.add_done_callback(lambda _: self._ended.set())
            await self._ended.wait()
            here.cancel()
            await asyncio.wait([here], timeout=FAREWELL)
            if here.done() and not here.cancelled() and (error := here.exception()) is not None:
                log.error("the engine has failed", exc_info=error)
        else:
            self._process = subprocess.Popen(
                [*self.command, str(self.path)],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | ORDERED,
            )
            self._processes.add(self._process.pid)
            await self._ended.wait()
        said.cancel()
        return self.state is State.READY

    async def _say_starting(self) -> None:
        """Say that the engine is not ready yet, also while no rank can say anything."""
        while self.state is State.STARTING:
            await asyncio.sleep(SAYING)
            if self.state is State.STARTING:
                log.info("the engine is not ready yet, after %.0f s", monotonic() - self._began)

    async def _end_processes(self, grace: float) -> None:
        """Close the socket, so that the ranks end, and make sure that they have ended."""
        if self._link is not None:
            self._link.close()
        await self._processes.end(grace)
        if self._process is not None:
            self._process.poll()  # which takes its entry from the system's table

    async def close(self) -> None:
        """End the engine and wait for its job."""
        self.state = State.CLOSED
        self.end_all("the server is shutting down")
        # Ranks that have not connected yet do not see the socket close.
        await self._end_processes(0.0 if self._link is None else GRACE)
        if self._server is not None:
            self._server.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def kill(self) -> None:
        """Tell the job to end at once, without waiting."""
        self._processes.tell(signal.SIGTERM)
        self._processes.tell(signal.SIGINT)


def requests_of(what: Completion) -> list[Request]:
    """A request for each choice of a completion, without ids."""
    how = what.sampling
    return [
        Request(
            0,
            prompt,
            what.max_tokens,
            replace(how, seed=(how.seed + choice) % (1 << 63)),
            what.ignore_eos,
            what.ends,
            what.asked_logprobs,
            what.salt,
            what.output.grammar,
            what.adapter,
        )
        for prompt in what.prompts
        for choice in range(what.n)
    ]
