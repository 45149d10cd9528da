"""Proposals for the next tokens of a group's sequences, which a decode step verifies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .blocks import Blocks
from .groups import Counts, Group, Numbers, Sequence
from .ngram import NgramIndex, Propose
from .requests import Limits, Request
from .work import POSITION, Proposals


def look_up(request: Request) -> Propose:
    """Propose what has followed the last tokens of a request before."""
    return NgramIndex().propose


class Speculation:
    """Proposes tokens for rows, as far as they are wanted and there are blocks for them.

    Args:
        limits: of the engine. If it has a draft, that proposes, and here only numbers are.
        blocks: of the engine.
        proposes: makes what proposes the tokens of a request.

    Attributes:
        drafts: rows with proposals, of steps that have ended.
        draft_tokens: their proposals.
        accepted_tokens: those that were right.
    """

    def __init__(
        self, limits: Limits, blocks: Blocks, proposes: Callable[[Request], Propose] = look_up
    ) -> None:
        self._most, self._has_draft = limits.draft_tokens, limits.has_draft
        self._blocks, self._proposes = blocks, proposes
        self.drafts = self.draft_tokens = self.accepted_tokens = 0

    def propose(self, group: Group, slots: Numbers) -> Proposals | None:
        """Proposals for the next step of sequences that speculate; None if there are none."""
        places = group.rows[slots, POSITION]
        # Nothing is proposed for the last token, which is drawn in any case.
        counts = np.minimum(group.ends[slots] - places - 1, self._most)
        tokens = np.zeros((len(slots), self._most), np.int64)
        if not self._has_draft:
            for row in counts.nonzero()[0]:
                slot, known = slots[row], places[row] + 1
                propose = self._of(group.members[slot])
                proposed = propose(group.tokens[slot, :known], int(counts[row]))
                counts[row] = len(proposed)
                tokens[row, : len(proposed)] = proposed
        for row in (places + counts >= group.room[slots]).nonzero()[0]:
            counts[row] = self._reserve(group, slots[row], int(places[row]), int(counts[row]))
        # A draft runs also without any: it lacks tokens that it has not run.
        if not self._has_draft and not counts.any():
            return None
        return Proposals(tokens, counts, group.tokens[slots, places - 1].astype(np.int64))

    def count(self, proposals: Proposals, counts: Counts) -> None:
        """Count the proposals of a step, whose rows have one token more than were right."""
        self.drafts += int(np.count_nonzero(proposals.counts))
        self.draft_tokens += int(proposals.counts.sum())
        self.accepted_tokens += sum(counts) - len(counts)

    def _of(self, sequence: Sequence) -> Propose:
        if sequence.propose is None:
            sequence.propose = self._proposes(sequence.request)
        return sequence.propose

    def _reserve(self, group: Group, slot: int, place: int, wanted: int) -> int:
        """Take blocks for so many proposals behind a place, if that takes them from nobody.

        Returns:
            How many there is room for.
        """
        sequence = group.members[slot]
        taken = self._blocks.take((place + wanted) // self._blocks.size + 1 - len(sequence.blocks))
        if taken is not None:
            sequence.blocks += taken
            group.extend(slot, sequence.blocks)
        return min(wanted, int(group.room[slot]) - 1 - place)
