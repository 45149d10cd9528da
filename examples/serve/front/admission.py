"""How much may be in the server at once, in requests and in tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Admission:
    """A bound on requests, and one on their tokens: prompts, and what they may still draw.

    One request is always admitted where there is none, however long it is; the engine's context
    bounds it.
    """

    most_requests: int
    most_tokens: int
    requests: int = 0
    tokens: int = 0

    def enter(self, requests: int, tokens: int) -> bool:
        """Count requests of so many tokens together in, or refuse them all."""
        too_many = self.requests + requests > self.most_requests
        too_long = self.tokens + tokens > self.most_tokens
        if self.requests and (too_many or too_long):
            return False
        self.requests += requests
        self.tokens += tokens
        return True

    def leave(self, requests: int, tokens: int) -> None:
        """Count them out again."""
        self.requests -= requests
        self.tokens -= tokens
