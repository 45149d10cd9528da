"""Checks grammars ahead of the engine, in a process that can be ended.

A grammar that takes too long, or too much memory, or that nests too deeply for the compiler, costs
that process alone. One that has passed is compiled again on rank 0, where it takes as long.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from ...requests import Limits
from ..errors import ApiError, bad

log = logging.getLogger("serve")

ROOT = Path(__file__).resolve().parents[4]
SECONDS = 5.0
"""For a grammar, at most; usual ones take milliseconds."""
START = 60.0
"""For the process to read the tokenizer."""
WAITING = 64
"""Grammars that may wait for their check."""
KEPT = 256
"""Grammars that are known to be good, the latest ones that are not `LONG`."""
LONG = 1 << 16
LINE = 1 << 24
"""Bytes of an answer."""


class Checker:
    """The process, which the first grammar starts.

    Args:
        stored: gives the tokenizer, as `structure.vocabulary` takes it.
        seconds: as `SECONDS`.
    """

    def __init__(self, stored: Callable[[], str | None], seconds: float = SECONDS) -> None:
        self._stored, self._seconds = stored, seconds
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._good: OrderedDict[str, str] = OrderedDict()

    async def check(self, grammar: str, param: str, limits: Limits) -> str:
        """The grammar in the form that the engine takes.

        Args:
            param: the field that it comes from.

        Raises:
            ApiError: 400 with the compiler's reason, or since it takes too much; 429 where too many
                wait; 503 where the compiler is not installed.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise ApiError(503, "structured output needs llguidance: pip install llguidance")
        if grammar in self._good:
            self._good.move_to_end(grammar)
            return self._good[grammar]
        if self._waiting >= WAITING:
            raise ApiError(429, "too many grammars; try again later", code="rate_limit_exceeded")
        self._waiting += 1
        try:
            async with self._lock:
                form, reason = await self._ask(grammar, limits)
        finally:
            self._waiting -= 1
        if reason:
            bad(reason, param)
        if len(grammar) <= LONG:
            self._good[grammar] = form
        if len(self._good) > KEPT:
            self._good.popitem(last=False)
        return form

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def _ask(self, grammar: str, limits: Limits) -> tuple[str, str]:
        is_answered = False
        try:
            process = await self._started(limits)
            async with asyncio.timeout(self._seconds):
                answer = await self._exchange(process, grammar)
            is_answered = bool(answer)
            if not answer:
                return grammar, "the grammar takes more memory than the compiler may have"
            form, reason = json.loads(answer)
        except TimeoutError:
            return grammar, f"the grammar takes longer than {self._seconds:g} s to compile"
        finally:
            if not is_answered:  # also when the client has gone: an answer would come later
                self.close()
        return form, reason

    async def _started(self, limits: Limits) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "examples.serve.structure.check"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=LINE,
                cwd=ROOT,
            )
            vocabulary = [self._stored(), limits.vocabulary, limits.eos]
            try:
                async with asyncio.timeout(START):
                    is_ready = await self._exchange(self._process, vocabulary)
            except TimeoutError:
                is_ready = b""
            if not is_ready:
                raise ApiError(503, "the compiler of grammars does not read this tokenizer")
        return self._process

    async def _exchange(self, process: asyncio.subprocess.Process, question: object) -> bytes:
        """Send a line and read one; nothing if the process has ended."""
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            await process.stdin.drain()
            return await process.stdout.readline()
        except (ConnectionError, ValueError):
            return b""
