"""Blocks of the KV pools: who holds them, and which of them keep a known prefix.

Only numbers are here; the pools themselves lie on the ranks. Block 0 is trash and never handed out.
A block is free (nobody holds it and its content is worthless), cached (nobody holds it, but it
keeps a published prefix, and is taken back when no free block is left), or held by one or several
requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.uint32]
ROOT = b"cg"
"""The key of the digest with which each chain begins."""


def digest(before: bytes, tokens: bytes) -> bytes:
    """Digest a full block and all tokens before it: 16 bytes, keyed by the digest before."""
    return blake2b(tokens, digest_size=16, key=before).digest()


def _packed(tokens: Tokens) -> bytes:
    return np.asarray(tokens, np.uint32).tobytes()


@dataclass
class Entry:
    """A published block: its digest, the digest before it, and its own tokens.

    Tokens are compared besides digests, so a collision is a miss, and never another client's text.
    """

    digest: bytes
    before: bytes
    tokens: bytes


class Blocks:
    """The blocks of one engine.

    Args:
        count: of the pools; usable are 1 to count - 1.
        size: tokens of a block.
    """

    def __init__(self, count: int, size: int) -> None:
        if count < 2 or size < 1:
            raise ValueError(f"{count} blocks of {size} tokens hold nothing: give at least 2 of 1")
        self.count, self.size = count, size
        self.references = [0] * count
        self._free = list(range(count - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used is first
        self._entries: dict[int, Entry] = {}
        self._by_digest: dict[bytes, int] = {}
        self.queries = self.hits = 0  # in tokens, as vLLM counts them

    @property
    def available(self) -> int:
        """The number of blocks that `take` can give, those of the cache included."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """The number of blocks that somebody holds."""
        return self.count - 1 - self.available

    def take(self, number: int) -> list[int] | None:
        """Take so many blocks, with one reference each; None, and no block, if there are fewer."""
        if number > self.available:
            return None
        taken = []
        for _ in range(number):
            if not self._free:
                oldest, _ = self._cached.popitem(last=False)
                self._forget(oldest)
                self._free.append(oldest)
            taken.append(self._free.pop())
        for block in taken:
            self.references[block] = 1
        return taken

    def match(self, tokens: Tokens, salt: bytes) -> tuple[list[int], bytes]:
        """Take a reference to each published block that begins the sequence.

        The last token of the sequence is never matched: the engine has to compute at least one, to
        draw the next.

        Returns:
            The blocks in order, and the digest of the last one; without blocks, that of `chain`.
        """
        matched: list[int] = []
        before = chain(salt)
        for start in range(0, (len(tokens) - 1) // self.size * self.size, self.size):
            part = _packed(tokens[start : start + self.size])
            block = self._by_digest.get(digest(before, part))
            if block is None:
                break
            entry = self._entries[block]
            if entry.before != before or entry.tokens != part:
                break
            before = entry.digest
            matched.append(block)
        for block in matched:
            self._cached.pop(block, None)
            self.references[block] += 1
        return matched, before

    def count_match(self, tokens: int, matched: int) -> None:
        """Count the tokens that were looked up for an admission, and those in the blocks found."""
        self.queries += tokens
        self.hits += matched * self.size

    def publish(self, block: int, before: bytes, tokens: Tokens) -> bytes:
        """Let others share a block that is full and written; return its digest.

        If a block with the same content is published already, this one is not shared.
        """
        part = _packed(tokens)
        name = digest(before, part)
        if name not in self._by_digest and block not in self._entries:
            self._entries[block] = Entry(name, before, part)
            self._by_digest[name] = block
        return name

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block; blocks without any are free, or cached if published.

        The end of a sequence is evicted before its beginning, which more requests can share.
        """
        for block in reversed(list(blocks)):
            if self.references[block] < 1:
                raise ValueError(f"block {block} is released, and nobody holds it")
            self.references[block] -= 1
            if self.references[block]:
                continue
            if block in self._entries:
                self._cached[block] = None
            else:
                self._free.append(block)

    def is_published(self, block: int) -> bool:
        """True if others may share the block."""
        return block in self._entries

    def _forget(self, block: int) -> None:
        del self._by_digest[self._entries.pop(block).digest]


def chain(salt: bytes) -> bytes:
    """The digest with which a chain begins; requests of different salts share nothing."""
    return blake2b(salt, digest_size=16, key=ROOT).digest()
