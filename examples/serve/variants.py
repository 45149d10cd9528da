"""Variants of the graphs of decode batches and chunks: their sizes, and which one serves what.

A graph is compiled for fixed sizes. Work is padded to the cheapest compiled variant that holds it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch

from .model import LENGTH, PROMPT
from .requests import How, Limits
from .sampling.records import RecordLayout
from .settings import Options
from .work import SLOT, TABLE, Rows, words

PROMPTS = (1, 4, 16, 64, 256, 1024)
"""Numbers of prompts that a prefill is compiled for, below the largest."""
RARE = (How.DRAWN | How.SCORED, How.DRAWN | How.ADJUSTED, How.DRAWN | How.MASKED)
"""Work that few clients ask for."""


def serves(how: How, needed: How) -> bool:
    """True if a variant does what is needed, and nothing rare besides.

    One that draws serves greedy requests: a temperature of 0 draws the likeliest token.
    """
    return needed in how and how & ~How.DRAWN == needed & ~How.DRAWN


class Size(Protocol):
    """The size of a variant, or of work."""

    def holds(self, needed: Self) -> bool:
        """True if a variant of this size serves work of that size."""
        ...

    @property
    def cost(self) -> tuple[int, ...]:
        """A number, or several, by which cheaper variants come first."""
        ...


@dataclass(frozen=True)
class DecodeSize:
    """Decode batches of up to `rows` rows, with tables of up to `width` blocks."""

    rows: int
    width: int
    how: How

    def holds(self, needed: DecodeSize) -> bool:
        fits = self.rows >= needed.rows and self.width >= needed.width
        return fits and serves(self.how, needed.how)

    @property
    def cost(self) -> tuple[int, ...]:
        return self.rows * self.width, self.how

    def __str__(self) -> str:
        return f"decode batches of {self.rows} with {self.width} blocks each, {self.how.words}"

    def padding(self, limits: Limits) -> Rows:
        """Rows of padding, which are written to the trash."""
        numbers = np.zeros((self.rows, TABLE + self.width), np.int64)
        numbers[:, SLOT] = limits.slots
        return numbers

    def example(self, limits: Limits, group: int) -> tuple[Any, ...]:
        """The arguments of a graph, of padding alone."""
        batch = torch.from_numpy(self.padding(limits))
        return batch, open_masks(self.rows, self.how, limits), int(self.how), group


@dataclass(frozen=True)
class PrefillSize:
    """Prefills of up to `rows` chunks of up to `tokens` tokens.

    Tables have `width` blocks: of a chunk that goes on with its prompt, and is alone. Without any,
    all chunks begin their prompts.
    """

    rows: int
    tokens: int
    width: int
    how: How

    def holds(self, needed: PrefillSize) -> bool:
        fits = self.rows >= needed.rows and self.tokens >= needed.tokens
        fits = fits and self.width >= needed.width and (self.rows == 1 or not self.width)
        return fits and serves(self.how, needed.how)

    @property
    def cost(self) -> tuple[int, ...]:
        return self.rows * self.tokens, self.width, self.how

    def __str__(self) -> str:
        many = f"{self.rows} chunks" if self.rows > 1 else "a chunk"
        behind = f" behind up to {self.width} blocks" if self.width else ""
        return f"{many} of {self.tokens} tokens{behind}, {self.how.words}"

    @property
    def end(self) -> int:
        """The columns up to the table's end; those of tokens behind, and for records, follow."""
        return PROMPT + 2 * self.tokens + self.width

    @property
    def behind(self) -> int:
        """The columns ahead of what the variant takes for records."""
        return self.end + self.tokens * (How.PROMPT in self.how)

    def known(self, limits: Limits) -> int:
        """The most tokens of a sequence that a chunk ends: its own, or those of the table."""
        return self.width * limits.block_size or self.tokens

    def padding(self, limits: Limits) -> Rows:
        """Rows of padding, which are written to the trash."""
        more = 0
        if How.ADJUSTED in self.how:
            more = RecordLayout(limits.vocabulary).columns(self.known(limits))
        numbers = np.zeros((self.rows, self.behind + more), np.int64)
        numbers[:, LENGTH] = 1
        return numbers

    def example(self, limits: Limits) -> tuple[Any, ...]:
        """The arguments of a graph, of padding alone."""
        batch = torch.from_numpy(self.padding(limits))
        masks = open_masks(self.rows, self.how, limits)
        return batch, masks, self.tokens, self.width, int(self.how)


@dataclass(frozen=True)
class VerifySize:
    """Decode batches of up to `rows` rows whose proposals are verified.

    Each row has `tokens` positions, the last known token's first, and tables of up to `width`
    blocks.
    """

    rows: int
    width: int
    how: How
    tokens: int

    def holds(self, needed: VerifySize) -> bool:
        fits = self.rows >= needed.rows and self.width >= needed.width
        return fits and self.tokens == needed.tokens and serves(self.how, needed.how)

    @property
    def cost(self) -> tuple[int, ...]:
        return self.rows * self.width, self.how

    def __str__(self) -> str:
        proposed = f"{self.tokens - 1} proposed tokens"
        return (
            f"batches of {self.rows} with {proposed} and {self.width} blocks each, {self.how.words}"
        )

    def padding(self, limits: Limits) -> Rows:
        """Rows of padding, which are written to the trash."""
        numbers = np.zeros((self.rows, PROMPT + 2 * self.tokens + self.width), np.int64)
        numbers[:, LENGTH] = 1
        return numbers

    def example(self, limits: Limits) -> tuple[Any, ...]:
        """The arguments of a graph, of padding alone."""
        return torch.from_numpy(self.padding(limits)), self.tokens, int(self.how)


AnySize = DecodeSize | PrefillSize | VerifySize
S = TypeVar("S", bound=Size)


def general(size: AnySize, limits: Limits, options: Options) -> AnySize:
    """The size that is compiled where no variant holds work of a size, which waits for it.

    Of rare work it has the most rows, or tokens, so that what comes next need not wait again.
    Where chunks have no padding, they keep their length.
    """
    if not size.how & ~How.DRAWN:
        return size
    if isinstance(size, DecodeSize | VerifySize):
        return replace(size, rows=options.batches[-1])
    return size if limits.lengths else replace(size, tokens=options.chunks[-1])


def cheapest(sizes: Iterable[S], needed: S) -> S | None:
    """The cheapest size that holds what is needed; None if none does."""
    fitting = (size for size in sizes if size.holds(needed))
    return min(fitting, key=lambda size: size.cost, default=None)


def first_sizes(limits: Limits, options: Options) -> list[AnySize]:
    """The variants that are compiled first: they serve most first requests, with any sampling.

    One is of a batch, one of a chunk, and where tokens are proposed, one verifies them. Batches are
    the largest, so that all requests are served; their tables are the shortest. The chunk begins a
    prompt; where ranks share sequences, another goes on with one. Where kernels are fused, batches
    have greedy variants, too: the layers are compiled by then, and kernels that draw take longer
    than the layers do.
    """
    how = How.DRAWN if options.draws else How.GREEDY
    tokens = options.chunks[-1]
    if options.first_chunk is not None:
        tokens = bucket(options.chunks, min(tokens, options.first_chunk))
    rows, width = options.batches[-1], widths(limits, options)[0]
    batches: list[DecodeSize | VerifySize] = [DecodeSize(rows, width, how)]
    if limits.draft_tokens:
        batches.append(VerifySize(rows, width, how, limits.draft_tokens + 1))
    sizes: list[AnySize] = [batches[0], PrefillSize(1, tokens, 0, how), *batches[1:]]
    if options.cp > 1:  # what a model's code cannot do on some of the tokens is told at the start
        sizes.append(PrefillSize(1, tokens, width, how))
    if options.fuse and options.draws:
        sizes += [replace(size, how=How.GREEDY) for size in batches]
    return sizes


def all_sizes(limits: Limits, options: Options) -> list[AnySize]:
    """All variants; those ahead of others are compiled ahead of them.

    Ahead are greedy ones, of short tables, with the largest batches: those that most requests ask
    for. One of each graph gives log-probabilities, one adjusts logits and one takes masks, of the
    largest batch: clients rarely ask for them.
    """
    lengths = widths(limits, options)
    hows = (How.GREEDY, How.DRAWN)[: 1 + options.draws]
    verified = limits.draft_tokens + 1
    sizes: list[AnySize] = []
    for width in lengths:
        batches = [(rows, how) for rows in reversed(options.batches) for how in hows]
        sizes += [DecodeSize(rows, width, how) for rows, how in batches]
        if limits.draft_tokens:
            sizes += [VerifySize(rows, width, how, verified) for rows, how in batches]
    for tokens in reversed(options.chunks):
        counts = reversed(prompt_rows(limits))
        sizes += [PrefillSize(rows, tokens, 0, how) for rows in counts for how in hows]
        if limits.goes_on or tokens == 1:
            sizes += [PrefillSize(1, tokens, width, hows[-1]) for width in lengths]
    if options.draws:
        for how in RARE:
            sizes.append(DecodeSize(options.batches[-1], lengths[-1], how))
            sizes.append(PrefillSize(1, options.chunks[-1], lengths[-1], how))
        if limits.draft_tokens:
            how = How.DRAWN | How.SCORED
            sizes.append(VerifySize(options.batches[-1], lengths[-1], how, verified))
    return sizes


def later_sizes(limits: Limits, options: Options) -> list[AnySize]:
    """Those of all variants that are compiled although nobody has asked for them yet.

    They neither draw nor give log-probabilities, except for chunks that go on, which always draw;
    and their tables are the shortest. First come those whose work no other variant serves.
    """
    shortest = widths(limits, options)[0]
    sizes = [
        size
        for size in all_sizes(limits, options)
        if size.how is How.GREEDY or (isinstance(size, PrefillSize) and size.width)
        if size.width <= shortest and size.how not in RARE
    ]
    known = first_sizes(limits, options)
    ahead: list[AnySize] = []
    for size in sizes:
        if not any(type(one) is type(size) and one.holds(size) for one in (*known, *ahead)):
            ahead.append(size)
    return ahead + [size for size in sizes if size not in ahead]


def widths(limits: Limits, options: Options) -> tuple[int, ...]:
    """The lengths of block tables that are compiled."""
    whole = -(-limits.context // limits.block_size)
    chosen = (-(-whole // 4), whole) if options.widths is None else options.widths
    return tuple(sorted({*(width for width in chosen if width < whole), whole}))


def without_padding(chunks: Sequence[int]) -> tuple[int, ...]:
    """Lengths of chunks of which any prompt can be made, with those that are given."""
    powers = itertools.takewhile(lambda n: n < chunks[0], (4**i for i in itertools.count()))
    return (*powers, *chunks)


def prompt_rows(limits: Limits) -> tuple[int, ...]:
    """The numbers of prompts that a prefill is compiled for."""
    return (*(rows for rows in PROMPTS if rows < limits.prompts), limits.prompts)


def open_masks(rows: int, how: How, limits: Limits) -> torch.Tensor | None:
    """Masks that allow every token, where work takes masks; else None."""
    if How.MASKED not in how:
        return None
    return torch.full((rows, words(limits.vocabulary)), -1, dtype=torch.int32)


def bucket(sizes: Sequence[int], needed: int) -> int:
    """The smallest size that is large enough.

    Raises:
        ValueError: none is.
    """
    index = bisect_left(sizes, needed)
    if index == len(sizes):
        raise ValueError(f"outside of the engine's limits: {needed} of at most {sizes[-1]}")
    return sizes[index]
