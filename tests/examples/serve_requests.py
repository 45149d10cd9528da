"""Requests that the scheduler runs on an engine, and what came of them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.serve.ngram import Propose
from examples.serve.requests import Adjustments, Limits, Request, Sampling, Scores
from examples.serve.scheduler import Scheduler
from examples.serve.speculation import Speculation, look_up
from examples.serve.work import Engine

Proposes = Callable[[Request], Propose]


@dataclass
class Served:
    """The tokens of each request, their scores, and the reasons of the ends."""

    speculation: Speculation
    steps: int = 0
    preemptions: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    scores: dict[int, list[Scores]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


def serve(
    engine: Engine,
    requests: Sequence[Request],
    proposes: Proposes = look_up,
    limits: Limits | None = None,
) -> Served:
    """Run requests to their ends, with the limits of the engine or others."""
    scheduler = Scheduler(limits or engine.limits, None, proposes)
    served = Served(scheduler.speculation)
    for request in requests:
        scheduler.add(request)
        served.tokens[request.id], served.scores[request.id] = [], []
    under_way: deque[Any] = deque()
    while not scheduler.is_idle:
        for ticket in scheduler.schedule():
            under_way.append((ticket, engine.submit(ticket.work)))
        ticket, result = under_way.popleft()
        tokens = result.result(60)
        scheduler.complete(ticket, tokens, result.scores(), counts=result.counts())
        events = scheduler.take_events()
        for id_, token in zip(events.pairs[::2], events.pairs[1::2], strict=True):
            served.tokens[id_].append(token)
        for id_, scores in events.scores:
            served.scores[id_].append(scores)
        served.reasons |= {end.id: end.reason for end in events.ends}
    assert scheduler.blocks.used == 0
    served.steps, served.preemptions = scheduler.stats.decodes, scheduler.stats.preemptions
    return served


def nothing(request: Request) -> Propose:
    """No proposals at all."""
    return lambda known, most: []


def guesses(right: dict[int, list[int]], share: float, vocabulary: int, seed: int = 0) -> Proposes:
    """Proposals of which a share is what a request draws, and of any number.

    Args:
        right: the tokens of each request, by its id.
        share: 1 proposes as many as are asked for.
    """

    def proposes(request: Request) -> Propose:
        chance = random.Random(1000 * seed + request.id)

        def propose(known: NDArray[np.uint32], most: int) -> list[int]:
            first = len(known) - len(request.prompt)
            tokens = right[request.id][first : first + most]
            if share < 1:
                tokens = tokens[: chance.randint(0, most)]
            return [
                token if chance.random() < share else chance.randrange(vocabulary)
                for token in tokens
            ]

        return propose

    return proposes


def mixed_requests(count: int, seed: int, limits: Limits, most: int = 14) -> list[Request]:
    """Random requests: greedy, sampled, with log-probabilities, or with penalties."""
    chance = random.Random(seed)
    requests = []
    for id_ in range(count):
        length = chance.randint(1, limits.context - most)
        prompt = tuple(chance.randrange(limits.vocabulary) for _ in range(length))
        sampling = Sampling()
        if id_ % 3:
            sampling = Sampling(0.9, chance.choice([0, 8]), chance.choice([1.0, 0.8]), seed + id_)
        if id_ % 4 == 3:
            sampling = replace(sampling, logprobs=3)
        elif id_ % 5 == 4:
            sampling = replace(sampling, adjustments=Adjustments(presence=1.0, repetition=1.2))
        requests.append(Request(id_, prompt, chance.randint(1, most), sampling))
    return requests
