"""Small messages in shared memory: the content first, the number that publishes it last.

Compiled wheels have the same in machine code (`_cells.c`), where a message is one call.
"""

from __future__ import annotations

from typing import Any

from .native import native


class PlainCells:
    """Memory that processes share, through Python's views; it begins at a word of 8 bytes."""

    def __init__(self, memory: memoryview, order: Any) -> None:
        self._memory = memory
        self._words = memory.cast("Q")
        self._order = order

    def put(
        self, at: int, content: bytes, size_word: int, size: int, number_word: int, number: int
    ) -> None:
        """Write a message: the content, then its size, and last its number.

        A process that sees the number also sees the rest, after a fence where its processor needs
        one to read.

        Args:
            at: the byte at which the content begins.
            content: what is written.
            size_word, number_word: indices of words of 8 bytes.
            size, number: what is written to them.

        Raises:
            IndexError, ValueError: the content, or a word, is outside the memory.
        """
        self._memory[at : at + len(content)] = content
        self._words[size_word] = size
        if self._order is not None:
            self._order()
        self._words[number_word] = number

    def get(self, at: int, nbytes: int) -> bytes:
        """A copy of `nbytes` from byte `at` on."""
        return self._memory[at : at + nbytes].tobytes()


def cells(memory: memoryview, order: Any) -> PlainCells:
    """The cells of a memory; those in machine code have the same methods.

    Args:
        memory: bytes.
        order: the fence between a payload and its flag; None where none is needed (`fences.py`).
    """
    return PlainCells(memory, order) if native is None else native.Cells(memory)
