"""What a process traces ahead of calls, while it would wait for another to trace the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any


class Ahead:
    """The drafts of one session.

    Each rank traces the methods of its own actors, when the step calls them; the others wait, for
    the step goes on with what the method returns. Of a hundred actors of one class one after the
    other would be traced. So a process that waits traces the same call of its own actors of the
    class, if another one has had it before: one call of a method is no sign that others follow.

    A draft is nothing that other ranks know of. If the call does not come, it is forgotten.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._signatures: Counter[Hashable] = Counter()
        self._drafts: dict[Hashable, Any] = {}

    def note(self, method: Hashable, kind: Hashable) -> bool:
        """Note a signature of an actor's method that the step has not called it with before.

        Args:
            kind: what this call and those of other actors of the class have in common.

        Returns:
            Whether another actor has had such a call before.
        """
        self._signatures[method] += 1
        is_known = kind in self._seen
        self._seen.add(kind)
        return is_known

    def is_behind(self, method: Hashable, other: Hashable) -> bool:
        """Whether `method` has been called with fewer signatures than that of another actor.

        A pipeline's first stage, say, has had its own when the step comes to the third.
        """
        return self._signatures[method] < self._signatures[other]

    def take(self, key: Hashable) -> Any:
        """The draft of a call; None if there is none."""
        return self._drafts.pop(key, None)

    def trace(self, key: Hashable, draft: Callable[[], Any]) -> None:
        """Keep what `draft` makes of a call, unless it has been tried before."""
        if key in self._drafts:
            return
        self._drafts[key] = None
        # Should the call come, it is traced again, and says what is wrong then.
        with suppress(Exception, SystemExit):
            self._drafts[key] = draft()
