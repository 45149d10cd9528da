"""Bounds on the requests in the server, and on how long they wait."""

from __future__ import annotations

from dataclasses import dataclass

POOLING_BODY = 1 << 24
"""The most bytes of a body for a model that pools, which takes many texts at a time."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of the server, in bytes, seconds and counts."""

    requests: int = 1024  # admitted at once; more are told to come again
    tokens: int = 1 << 20  # of all their prompts and answers
    body: int = 1 << 20
    idle: float = 15.0  # for a request's headers, and between requests
    read: float = 10.0  # for a body
    stall: float = 60.0  # for a reader of a stream
    drain: float = 30.0  # for requests, after SIGTERM
    connections: int = 4096


@dataclass
class Admission:
    """A bound on requests, and one on the tokens of their prompts and their answers.

    If there is no request, the next one is always admitted, however long it is. The engine's
    context bounds it.
    """

    most_requests: int
    most_tokens: int
    requests: int = 0
    tokens: int = 0

    def enter(self, requests: int, tokens: int) -> bool:
        """Admit requests, which have `tokens` tokens together, or refuse them all."""
        too_many = self.requests + requests > self.most_requests
        too_long = self.tokens + tokens > self.most_tokens
        if self.requests and (too_many or too_long):
            return False
        self.requests += requests
        self.tokens += tokens
        return True

    def leave(self, requests: int, tokens: int) -> None:
        """Count admitted requests out again."""
        self.requests -= requests
        self.tokens -= tokens
