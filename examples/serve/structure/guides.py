"""Guides of requests on rank 0: each follows a text by its grammar, in threads beside the loop.

llguidance lets go of Python's lock while it works, so the loop serves others meanwhile. What a
grammar may cost is bounded: the front has compiled it in a process that it could end
(`checker.py`), and a step of llguidance has limits of its own.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from ..work import WORD, Masks, words
from .grammars import compiled, reason

log = logging.getLogger("serve")

COMPILED = 32
"""Grammars that are kept compiled, the latest ones that are not `LONG`."""
LONG = 1 << 16


class Matcher:
    """A guide by llguidance; see `groups.Guide`.

    Args:
        id_: of the request.
    """

    def __init__(self, id_: int) -> None:
        self.id = id_
        self.mask: Masks = np.zeros(0, np.int32)
        self.is_ready = self.is_complete = False
        self.error = ""
        self.state: LLMatcher | None = None


class Guides:
    """The guides of an engine's requests.

    Args:
        load: gives the tokens of the model; it is called once, in a thread.
        size: of the vocabulary.
        wake: is called in a thread when `take` has something to give.
    """

    def __init__(
        self, load: Callable[[], LLTokenizer], size: int, wake: Callable[[], None]
    ) -> None:
        self._load, self._words, self._wake = load, words(size), wake
        self._all = np.full(self._words, -1, np.int32)  # bits of the model's tokens
        if size % WORD:
            self._all[-1] = (1 << size % WORD) - 1
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._results: deque[tuple[Matcher, Masks | None, str]] = deque()
        # Masks do not wait for grammars.
        self._compiling, self._matching = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._executor = LLExecutor()

    def open(self, id_: int, grammar: str) -> Matcher:
        """Begin a text; `take` gives the guide once its first mask is known."""
        guide = Matcher(id_)
        self._submit(self._compiling, lambda: self._open(guide, grammar), [guide])
        return guide

    def advance(self, tokens: Sequence[tuple[Matcher, int]]) -> None:
        """Let guides take a token each; `take` gives them once their masks are known."""
        if tokens:
            guides = [guide for guide, _ in tokens]
            self._submit(self._matching, lambda: self._advance(tokens), guides)

    def take(self) -> list[Matcher]:
        """The guides whose next mask, end or error is known since the last call."""
        guides = []
        while self._results:
            guide, mask, error = self._results.popleft()
            guide.is_ready, guide.error = True, error
            if mask is None:
                guide.is_complete = not error
            else:
                guide.mask = mask
            guides.append(guide)
        return guides

    def close(self) -> None:
        """End the threads, once they have done what they are at."""
        for threads in (self._compiling, self._matching):
            threads.shutdown(wait=False, cancel_futures=True)

    # -- in threads --------------------------------------------------------------------------------

    def _submit(
        self, threads: ThreadPoolExecutor, work: Callable[[], None], guides: Sequence[Matcher]
    ) -> None:
        """Do some guides' work in a thread; an exception is the error of all of them."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                log.exception("a guide has failed")
                message = f"{type(error).__name__}: {error}"
                self._results.extend((guide, None, message) for guide in guides)
                self._wake()

        threads.submit(run)

    def _open(self, guide: Matcher, grammar: str) -> None:
        if self._tokens is None:
            self._tokens = self._load()
        matcher = self._compiled.pop(grammar, None) or compiled(self._tokens, grammar)
        guide.state = matcher.deep_copy()
        if len(grammar) <= LONG:
            self._compiled[grammar] = matcher  # behind all others
        if len(self._compiled) > COMPILED:
            self._compiled.popitem(last=False)
        self._submit(self._matching, lambda: self._match([guide]), [guide])

    def _advance(self, tokens: Sequence[tuple[Matcher, int]]) -> None:
        self._executor.consume_token_par([(guide.state, token) for guide, token in tokens])
        self._match([guide for guide, _ in tokens])

    def _match(self, guides: Sequence[Matcher]) -> None:
        """Compute the masks of guides, several at a time."""
        assert self._tokens is not None, "a guide has been opened"
        going = [guide for guide in guides if not guide.state.is_stopped()]
        rows = np.empty((len(going), words(self._tokens.vocab_size)), np.int32)
        places = [(guide.state, row) for row, guide in enumerate(going)]
        if going:
            width = rows.itemsize * rows.shape[1]
            self._executor.unsafe_compute_mask_ptr(places, rows.ctypes.data, width, len(going))
        rows = rows[:, : self._words] & self._all
        pairs = zip(going, rows, strict=True)
        # Without a token to draw a text is complete: its end is no token of this model.
        masks = {guide.id: mask for guide, mask in pairs if mask.any()}
        for guide in guides:
            error = reason(guide.state)
            self._results.append((guide, None if error else masks.get(guide.id), error))
        self._wake()
