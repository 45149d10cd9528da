"""Work for the engine, of rows and chunks one by one."""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from examples.serve.requests import How, Sampling
from examples.serve.work import (
    ADAPTER,
    CONTROLS,
    POSITION,
    RECORD,
    SEED,
    SLOT,
    STATE,
    TABLE,
    TOKEN,
    TOP_K,
    Chunk,
    Decode,
    Prefill,
)


class Row(NamedTuple):
    """A row of a decode batch."""

    token: int
    position: int  # of the token in its sequence, from 0
    slot: int
    blocks: Sequence[int]
    sampling: Sampling
    record: int = 0
    state: int = 0
    adapter: int = 0


def decode_of(group: int, rows: Sequence[Row]) -> Decode:
    """A decode batch; each row has the blocks that the longest needs."""
    width = max((len(row.blocks) for row in rows), default=0)
    numbers = np.zeros((len(rows), TABLE + width), np.int64)
    for at, row in zip(numbers, rows, strict=True):
        head = row.token, row.position, row.slot, 0
        at[:TABLE] = *head, *row.sampling.numbers, row.record, row.state, row.adapter
        at[TABLE : TABLE + len(row.blocks)] = row.blocks
    how = functools.reduce(operator.or_, (row.sampling.how for row in rows), How.GREEDY)
    return Decode(group, numbers, how)


def rows_of(work: Decode) -> list[Row]:
    """The rows of a batch; behind the blocks of a row there may be padding."""
    rows = []
    for row in work.rows.tolist():
        temperature, top_p = struct.unpack("=ff", struct.pack("=q", row[CONTROLS]))
        sampling = Sampling(temperature, row[TOP_K], top_p, row[SEED])
        blocks = [block for block in row[TABLE:] if block]
        head = row[TOKEN], row[POSITION], row[SLOT], blocks, sampling
        rows.append(Row(*head, row[RECORD], row[STATE], row[ADAPTER]))
    return rows


def prefill_of(
    tokens: Sequence[int], start: int, blocks: Sequence[int], last: bool, sampling: Sampling
) -> Prefill:
    """A prefill of one chunk."""
    return Prefill((Chunk(tokens, start, blocks, last, sampling),))
