"""Who holds blocks: requests are admitted in the order of their arrival, and leave as they end."""

from __future__ import annotations

from collections import deque
from itertools import count

from .blocks import Blocks, chain
from .features import Features
from .groups import Sequence, Tokens
from .requests import Limits


class Admission:
    """The requests that wait, and those that hold blocks.

    Blocks of a request that leaves are given away at once, even while its last execution is in
    flight: ranks see executions in the order of submission, so a late write lands before the new
    owner's. So are slots of states. Where layers keep states, no prefix is shared: what a state was
    behind a prefix is not kept.

    Args:
        limits: of the engine; a sequence of `context` tokens must fit in the blocks.
        features: switches of ablations.

    Attributes:
        blocks: of the engine.
        waiting: the requests without blocks, in the order of their arrival.
        active: those with blocks, by id, in the order of their arrival.
        prefilling: those that have chunks to submit, in the order of their admission.
        places: numbers that are free.
    """

    def __init__(self, limits: Limits, features: Features) -> None:
        if (limits.blocks - 1) * limits.block_size < limits.context:
            raise ValueError(
                f"{limits.blocks - 1} blocks of {limits.block_size} tokens hold no sequence of "
                f"{limits.context}: give more blocks, or a shorter context"
            )
        self.blocks = Blocks(limits.blocks, limits.block_size)
        self.waiting: deque[Sequence] = deque()
        self.active: dict[int, Sequence] = {}
        self.prefilling: deque[Sequence] = deque()
        self.places = list(range(limits.requests, 0, -1))
        self._limits, self._features = limits, features
        self._shares = features.prefix and not limits.lengths
        self._stays = count(1)
        self._starved = False  # the first that waits found too few blocks, and none came since

    def admit(self) -> Sequence | None:
        """Admit the first request that waits, if there are a slot and blocks for its tokens."""
        if not self.waiting or self._starved:
            return None
        sequence = self.waiting[0]
        if len(self.active) == self._limits.requests:
            return None
        matched, digest = self._match(sequence)
        needed = -(-len(sequence.tokens) // self._limits.block_size) - len(matched)
        # Leave a block for each active sequence: else the new one would soon be preempted.
        spare = len(self.active)
        taken = self.blocks.take(needed) if needed + spare <= self.blocks.available else None
        if taken is None:
            self.blocks.release(matched)
            self._starved = True
            return None
        self.blocks.count_match(len(sequence.tokens), len(matched))
        self.waiting.popleft()
        sequence.blocks = matched + taken
        sequence.published, sequence.digest = len(matched), digest
        sequence.written = len(matched) * self._limits.block_size
        sequence.stay, sequence.place = next(self._stays), self.places.pop()
        self.active[sequence.request.id] = sequence
        self.prefilling.append(sequence)
        return sequence

    def _match(self, sequence: Sequence) -> tuple[list[int], bytes]:
        salt = sequence.request.shares
        if sequence.wants_scores:  # which need the logits of all tokens
            return [], chain(salt)
        if self._shares:
            return self.blocks.match(sequence.tokens, salt)
        if not self._features.prefix:
            self._features.changes["prefix"] += len(sequence.tokens)
        return [], chain(salt)

    def publish(self, sequence: Sequence, tokens: Tokens, end: int) -> None:
        """Publish the blocks that successful executions have filled, up to a position."""
        size = self._limits.block_size
        while self._shares and (stop := (sequence.published + 1) * size) <= end:
            block, part = sequence.blocks[sequence.published], tokens[stop - size : stop]
            sequence.digest = self.blocks.publish(block, sequence.digest, part)
            sequence.published += 1

    def youngest(self) -> Sequence:
        """The request that was admitted last; it is the first to be preempted."""
        return self.active[next(reversed(self.active))]

    def preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence; it is computed again later, from all its tokens."""
        self._vacate(sequence)
        self.waiting.appendleft(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Let a request go, wherever it is."""
        if sequence.stay:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
            self._starved = False

    def _vacate(self, sequence: Sequence) -> None:
        """Take the blocks and the slot of an active sequence back."""
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.written = sequence.published = sequence.stay = 0
        # Free at once, as blocks are: the next owner's execution comes behind all of this one.
        self.places.append(sequence.place)
        sequence.place = 0
        del self.active[sequence.request.id]
        if sequence.seat is not None:
            group, slot = sequence.seat
            group.leave(slot)
        elif sequence in self.prefilling:
            self.prefilling.remove(sequence)
        self._starved = False
