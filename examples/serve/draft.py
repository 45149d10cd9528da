"""A small model that proposes tokens, on the rank of the first stage.

It has pools of its own with the blocks of the model that is served, so one table serves both, and
what the scheduler knows of blocks, such as a prefix that is shared, holds for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

import cg

from .model import LENGTH, NUMBERS, PROMPT, PROMPT_ADAPTER, PROMPT_STATE, START, Stage
from .requests import How


@cg.actor
class Draft(Stage):
    """All layers of a small model, with the vocabulary of the model that is served."""

    def propose(self, known: Tensor, batch: Tensor, tokens: int, how: int) -> Tensor:
        """Propose tokens for rows that are to be verified, int64 [rows, tokens - 1].

        A proposal is drawn as the token itself will be, with the sampling and the noise of its
        place: from equal logits both draw the same.

        The token ahead of the last known one is computed again, since the last proposal of a row
        is never run here, and may have been accepted.

        Args:
            known: int64 [rows, 2], the last two known tokens of each row.
            batch: int64 [rows, PROMPT + 2 * tokens + blocks], of `Stage.verify`.
            tokens: that are verified, with padding.
            how: one of `How`.
        """
        start, length = batch[:, START : START + 1], batch[:, LENGTH : LENGTH + 1]
        tables, sampling = batch[:, PROMPT + 2 * tokens :], batch[:, NUMBERS:PROMPT]
        rows = tables, batch[:, PROMPT_STATE], batch[:, PROMPT_ADAPTER]
        last = torch.ones_like(start)
        x, proposals = known, []
        for step in range(tokens - 1):
            first = step - 1 if step == 0 else step
            steps = torch.arange(first, step + 1, device=batch.device)[None]
            positions = (start + steps.minimum(length - 1)).clamp(min=0)
            entries = tables.gather(1, positions // self.size) * self.size + positions % self.size
            # Behind its proposals a row writes to the trash.
            entries = torch.where(steps < length, entries, 0)
            logits = self._layers(x, positions, entries, *rows, last)[:, 0]
            last = torch.zeros_like(last)
            places = start[:, 0] + step + 1
            drawn = self._tokens(logits, places, sampling, places, None, how & How.DRAWN)
            assert isinstance(drawn, Tensor), "it gives no log-probabilities"
            proposals.append(drawn)
            x = drawn[:, None]
        return torch.stack(proposals, 1)
