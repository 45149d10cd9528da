"""Runs requests with grammars on an engine, without sockets: what the loop on rank 0 does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLTokenizer

from examples.serve.ngram import Propose
from examples.serve.requests import UNFOLLOWED, End, Request, Scores
from examples.serve.scheduler import Scheduler
from examples.serve.speculation import look_up
from examples.serve.structure.guides import Guides
from examples.serve.tickets import Ticket
from examples.serve.work import Decode, Engine, Result

PATIENCE = 60.0


class Outcome:
    """What became of a request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scores: list[Scores] = []
        self.end: End | None = None


def complete(
    engine: Engine,
    load: Callable[[], LLTokenizer],
    requests: Sequence[Request],
    disturb: Callable[[Scheduler], None] = lambda scheduler: None,
    proposes: Callable[[Request], Propose] = look_up,
) -> dict[int, Outcome]:
    """Run requests to their ends.

    Args:
        engine: whose results are done without a loop of asyncio.
        load: gives the tokens of its model.
        disturb: called once in each turn.
        proposes: as `Scheduler` takes it.
    """
    scheduler, wake = Scheduler(engine.limits, proposes=proposes), threading.Event()
    guides = Guides(load, engine.limits.vocabulary, wake.set)
    outcomes = {request.id: Outcome() for request in requests}
    opening = {request.id: request for request in requests if request.grammar}
    for request in requests:
        if request.grammar:
            guides.open(request.id, request.grammar)
        else:
            scheduler.add(request)
    lanes: dict[int, deque[tuple[Ticket, Result]]] = {}
    try:
        while opening or not scheduler.is_idle:
            wake.clear()
            for guide in guides.take():
                if guide.id not in opening:
                    scheduler.guided(guide, guide.id)
                elif guide.error or guide.is_complete:
                    opening.pop(guide.id)
                    reason = UNFOLLOWED if guide.error else "stop"
                    outcomes[guide.id].end = End(guide.id, reason, 0, guide.error)
                else:
                    scheduler.add(opening.pop(guide.id), guide)
            disturb(scheduler)
            for ticket in scheduler.schedule():
                lane = ticket.work.group if isinstance(ticket.work, Decode) else -1
                lanes.setdefault(lane, deque()).append((ticket, engine.submit(ticket.work)))
            guides.advance(scheduler.take_advances())
            queue: Any = next((queue for queue in lanes.values() if queue), None)
            if queue is not None:
                ticket, result = queue.popleft()
                drawn, counts = result.result(PATIENCE), result.counts()
                scheduler.complete(ticket, drawn, result.scores(), (), counts)
                guides.advance(scheduler.take_advances())
            elif not scheduler.is_idle or opening:
                assert wake.wait(PATIENCE), "no guide has become ready"
            events = scheduler.take_events()
            for id_, token in zip(events.pairs[::2], events.pairs[1::2], strict=True):
                outcomes[id_].tokens.append(token)
            for id_, scores in events.scores:
                outcomes[id_].scores.append(scores)
            for end in events.ends:
                outcomes[end.id].end = end
    finally:
        guides.close()
    return outcomes
