"""A reply: the only buffer of a request, between the engine's events and the client.

Events are merged into it, and its reader takes all that is there. So a slow reader gets larger
pieces, and no queue grows.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from ..requests import End, Scores


class Reply:
    """The tokens and ends of a request's choices that nobody has read."""

    def __init__(self, prompts: Sequence[int], threads: ThreadPoolExecutor | None) -> None:
        self.ids: list[int] = []
        self.prompts = prompts  # lengths, a choice each
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.scores: list[list[Scores]] = [[] for _ in prompts]  # of tokens, if they are wanted
        self.asked: list[list[Scores]] = [[] for _ in prompts]  # of the prompts' tokens, likewise
        self.vectors: dict[int, bytes] = {}  # float32, by choices, of a model that pools
        self.ends: list[End | None] = [None for _ in prompts]
        self.arrived = monotonic()
        self.started = False
        self.last: float | None = None  # when tokens came last
        self.write: Callable[[], bool] | None = None
        """Writes new tokens at once; False leaves them to the task that waits in `changed`.

        It saves the turn of the loop in which that task would wake up.
        """
        self._event = asyncio.Event()
        self._threads = threads
        self._thread_event = threading.Event()

    def touch(self) -> None:
        """Tell the reader that there is something to read."""
        if self.write is not None and self.write():
            return
        self._event.set()
        if self._threads is not None:
            self._thread_event.set()

    async def changed(self) -> None:
        """Wait until there is something to read."""
        if self._threads is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._thread_event.wait)
            self._thread_event.clear()
        await self._event.wait()
        self._event.clear()
