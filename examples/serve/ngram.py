"""Proposals from a text itself: what has followed its last tokens before.

Prompt lookup (Apoorv Saxena, "Prompt Lookup Decoding", 2023): the longest n-gram that ends the text
and has occurred in it before is likely to go on as it did.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

LENGTHS = (4, 3, 2)
"""Lengths of n-grams that are looked up, the longest first. A single token says too little."""

Propose = Callable[[NDArray[np.uint32], int], list[int]]
"""Gives up to so many tokens that may follow the known tokens of one request. It is asked again
when more of them are known."""


class NgramIndex:
    """The n-grams of one growing text, with the place behind the latest occurrence of each.

    A token costs the same however long the text is, and so does a proposal.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def propose(self, tokens: NDArray[np.uint32], most: int) -> list[int]:
        """Propose the tokens behind a text.

        Args:
            tokens: the text, which begins as that of the last call.
            most: how many.

        Returns:
            Tokens as they followed the latest occurrence of the longest n-gram; none if no n-gram
            has occurred before. Where that place is less than `most` tokens away, they repeat what
            is between.
        """
        self._take(tokens)
        text = self._tokens
        for length in LENGTHS:
            place = self._places.get(tuple(text[-length:]))
            if place is not None:
                period = len(text) - place
                return [text[place + step % period] for step in range(most)]
        return []

    def _take(self, tokens: NDArray[np.uint32]) -> None:
        """Take new tokens; an n-gram is known once there is a token behind it."""
        text, before = self._tokens, len(self._tokens)
        text += tokens[before:].tolist()
        for length in LENGTHS:
            first = max(before, length)
            shifted = (text[first - back : -back] for back in range(length, 0, -1))
            places = range(first, len(text))
            self._places.update(zip(zip(*shifted, strict=True), places, strict=True))
