"""Results of the engine's work: tokens that come to the host."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

import cg

from .requests import How, Scores
from .work import Result


@dataclass(frozen=True, eq=False)
class Copy:
    """The copy of a result of a device, which the host may still have to wait for.

    Attributes:
        parts: in pinned memory of the host.
        end: the event behind the copy.
    """

    parts: tuple[Tensor, ...]
    end: torch.Event

    @property
    def has_come(self) -> bool:
        """True if a wait takes no time: the copy is there, or the device has failed."""
        try:
            return bool(self.end.query())
        except RuntimeError:  # which the reader is to get
            return True

    def wait(self) -> tuple[Tensor, ...]:
        """The parts, once they are there; no stream waits.

        Raises:
            RuntimeError: the device has failed.
        """
        self.end.synchronize()
        return self.parts


Awaited = tuple[Copy, asyncio.AbstractEventLoop, Callable[[], None]]
"""A copy, and what is called in which loop once it is there."""


class Copies:
    """Copies results of a device to the host, on a stream of their own.

    On the caller's stream the next execution would follow the copy, and a wait for the copy would
    include a wait for that execution.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._told: queue.SimpleQueue[Awaited | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, future: cg.Future) -> Copy:
        """Copy the result of an execution that has ended well."""
        with self._stream:
            parts = _tuple(future.result())
            host = tuple(torch.empty(part.shape, dtype=part.dtype).pin_memory() for part in parts)
            for room, part in zip(host, parts, strict=True):
                room.copy_(part, non_blocking=True)
            return Copy(host, self._stream.record_event())

    def tell(self, copy: Copy, call: Callable[[], None]) -> None:
        """Call back in the running loop of asyncio, once a copy is there or the device has failed.

        A thread waits for it, so that the loop takes commands meanwhile.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="copies", daemon=True)
            self._thread.start()
        self._told.put((copy, asyncio.get_running_loop(), call))

    def close(self) -> None:
        """End the thread, once it has waited for what there is."""
        self._told.put(None)

    def _wait(self) -> None:
        while (awaited := self._told.get()) is not None:
            copy, loop, call = awaited
            with contextlib.suppress(RuntimeError):  # which the reader is to get
                copy.wait()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(call)


class Tokens:
    """The result of a piece of work: tokens, and log-probabilities if its variant gives some.

    On a device an execution has ended when its work is on streams, which is long before its tokens
    are known. Whoever asks for the tokens then waits for the device.

    Args:
        count: the number of tokens that were asked for; the others are padding.
        how: what its variant gives besides.
        scored: the number of tokens of a prompt whose log-probabilities were asked for.
        copies: bring tokens to the host; None where they are there.
    """

    def __init__(
        self,
        future: cg.Future,
        count: int,
        how: How = How.GREEDY,
        scored: int = 0,
        copies: Copies | None = None,
    ) -> None:
        self._future, self._count, self._how, self._scored = future, count, how, scored
        self._copy: Copy | None = None
        self._copies = copies
        if copies is not None:
            future.add_done_callback(self._begin_copy)

    def done(self) -> bool:
        """Move the engine on, without waiting; true if the tokens are known, or an error is."""
        return self._future.done() and (self._copy is None or self._copy.has_come)

    def result(self, timeout: float | None = None) -> list[int]:
        """The tokens; errors are those of `cg.Future.result`."""
        return self._parts(timeout)[0][: self._count].tolist()

    def scores(self) -> list[Scores]:
        """The scores of each token, once the result is there; empty unless work asks for some."""
        if How.SCORED not in self._how:
            return []
        values, tokens = self._parts()[1:3]
        return _scores(values[: self._count], tokens[: self._count])

    def prompt_scores(self) -> list[Scores]:
        """The scores of the token behind each of a chunk, if the work asks for them."""
        if How.PROMPT not in self._how:
            return []
        values, tokens, ranks = (part[: self._scored] for part in self._parts()[-3:])
        scores = _scores(values, tokens)
        return [
            replace(score, rank=rank) for score, rank in zip(scores, ranks.tolist(), strict=True)
        ]

    def counts(self) -> list[int]:
        """Nothing, for each row has one token."""
        return []

    def when_done(self, call: Callable[[], None]) -> None:
        """Call back when the tokens are known, in the thread that moves the engine on.

        On a device this thread has to run a loop of asyncio.
        """

        def ended(_: cg.Future) -> None:
            if self._copies is None or self._copy is None:
                call()
            else:
                self._copies.tell(self._copy, call)

        self._future.add_done_callback(ended)  # behind the one that begins the copy

    def _parts(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        """The results of `Stage`: tokens, and log-probabilities."""
        if self._copies is None or self._future.exception(timeout) is not None:
            return _tuple(self._future.result(timeout))
        if self._copy is None:
            self._begin_copy(self._future)
        assert self._copy is not None, "the work has ended well"
        return self._copy.wait()

    def _begin_copy(self, future: cg.Future) -> None:
        if self._copies is not None and self._copy is None and future.exception() is None:
            self._copy = self._copies.begin(future)


class Verified(Tokens):
    """The result of a batch with proposals: those that are right, and the token behind them.

    Each token is the one that is drawn behind those before it. So a proposal is accepted if it is
    the token that is drawn at its place, and the first that is not is replaced by that one.

    Args:
        proposed: int64 [rows], the number of proposals of each row.
        how, copies: as `Tokens`.
    """

    def __init__(
        self,
        future: cg.Future,
        proposed: NDArray[np.int64],
        how: How,
        copies: Copies | None = None,
    ) -> None:
        super().__init__(future, len(proposed), how, copies=copies)
        self._proposed = proposed

    def result(self, timeout: float | None = None) -> list[int]:
        """The tokens of all rows, one row behind the other."""
        ids, drawn, *_ = self._parts(timeout)
        tokens: list[int] = drawn.cpu().view(ids.shape)[: self._count][self._taken].tolist()
        return tokens

    def counts(self) -> list[int]:
        numbers: list[int] = self._taken.sum(1).tolist()
        return numbers

    def scores(self) -> list[Scores]:
        if How.SCORED not in self._how:
            return []
        ids, _, *ranked = self._parts()
        rows = (part.cpu().unflatten(0, ids.shape)[: self._count] for part in ranked)
        values, tokens = (part[self._taken] for part in rows)
        return _scores(values, tokens)

    @cached_property
    def _taken(self) -> Tensor:
        """Booleans [rows, positions]: the tokens up to the first that was not proposed."""
        ids, drawn = (part.cpu() for part in self._parts()[:2])
        ids, drawn = ids[: self._count], drawn.view(ids.shape)[: self._count]
        proposed = torch.from_numpy(self._proposed)[:, None]
        is_right = (ids[:, 1:] == drawn[:, :-1]) & (torch.arange(ids.shape[1] - 1) < proposed)
        return F.pad(is_right.cumprod(1), (1, 0), value=1).bool()


class Parts:
    """The results of pieces of work that were started one by one, as that of one piece.

    Args:
        parts: in the order of their tokens.
    """

    def __init__(self, parts: Sequence[Result]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def result(self, timeout: float | None = None) -> list[int]:
        """The tokens of all parts; the first error of one."""
        return [token for part in self._parts for token in part.result(timeout)]

    def scores(self) -> list[Scores]:
        return [scores for part in self._parts for scores in part.scores()]

    def prompt_scores(self) -> list[Scores]:
        return [scores for part in self._parts for scores in part.prompt_scores()]

    def counts(self) -> list[int]:
        """Nothing, for each part is of prompts."""
        return []

    def when_done(self, call: Callable[[], None]) -> None:
        """Call back when the last part has ended."""
        left = len(self._parts)

        def count() -> None:
            nonlocal left
            left -= 1
            if not left:
                call()

        for part in self._parts:
            part.when_done(count)


def copies_of(device: torch.device | None) -> Copies | None:
    """Copies from a device to the host, if the host can wait for events of the device."""
    if device is None or device.type == "cpu":
        return None
    stream = torch.Stream(device)
    try:
        stream.record_event().synchronize()
    except RuntimeError:
        return None
    return Copies(stream)


def _scores(values: Tensor, tokens: Tensor) -> list[Scores]:
    """The scores of rows, by what `sampling.draw.score` gives."""
    return [
        Scores(own, tuple(zip(row, rest, strict=True)))
        for (own, *rest), row in zip(values.tolist(), tokens.tolist(), strict=True)
    ]


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
