"""Records of running requests whose logits are adjusted, on the devices of the last stage.

A batch says where the record of each row is. The adjustments of a request are written to its record
once, with the chunk that draws its first token, and so are counts of the tokens that it has then.
Counts then grow by the tokens that are drawn, which the driver need not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..requests import BAD_WORD, BAD_WORDS, BIASES, Adjustments
from ..work import Chunk
from .adjust import BITS, add_biases, forbid_endings, penalize, unpack

# Columns of settings, int32; the first ones are the bits of float32. Record 0 is nobody's and
# all zeros, which change nothing: a penalty of repetitions of 0 counts as 1.
REPETITION, FREQUENCY, PRESENCE, MIN_P, UNTIL = range(5)
BIASED = 5
# Columns of what a chunk brings: its record, how many of its tokens are the prompt, and how many
# there are; then settings, the tokens that were drawn last, and all tokens.
PLACE, ASKED, KNOWN = range(3)
HEAD = 3
OCCURRENCE = 2
"""What an occurrence in the answer adds to a count; an odd count: the prompt has the token."""


@dataclass(frozen=True)
class RecordLayout:
    """Where things are in the settings of a record.

    Args:
        vocabulary: the number of tokens.
    """

    vocabulary: int

    @property
    def words(self) -> int:
        """How many words have a bit for each token."""
        return -(-self.vocabulary // BITS)

    @property
    def biases(self) -> slice:
        return slice(BIASED + BIASES, BIASED + 2 * BIASES)

    @property
    def biased(self) -> slice:
        """The tokens that the biases are of."""
        return slice(BIASED, BIASED + BIASES)

    @property
    def bad_words(self) -> slice:
        """Tokens plus 1, with zeros in front of each sequence."""
        return slice(self.biases.stop, self.biases.stop + BAD_WORDS * BAD_WORD)

    @property
    def banned(self) -> slice:
        """Bits of tokens that are never drawn."""
        return slice(self.bad_words.stop, self.bad_words.stop + self.words)

    @property
    def held(self) -> slice:
        """Bits of tokens that are not drawn ahead of the position `UNTIL`."""
        return slice(self.banned.stop, self.banned.stop + self.words)

    @property
    def width(self) -> int:
        return self.held.stop

    def columns(self, tokens: int) -> int:
        """The columns that a chunk brings, with room for so many tokens."""
        return HEAD + self.width + BAD_WORD - 1 + tokens


def write(row: NDArray[np.int64], chunk: Chunk, layout: RecordLayout) -> None:
    """Write what a chunk brings for a record into columns of zeros."""
    record, adjustments = chunk.record, chunk.sampling.adjustments
    assert record is not None
    assert adjustments is not None
    tokens = np.asarray(record.tokens, np.int64)
    row[:HEAD] = record.place, record.prompt, len(tokens)
    row[HEAD : HEAD + layout.width] = settings(adjustments, record.prompt, layout)
    behind = row[HEAD + layout.width :]
    recent = tokens[record.prompt :][1 - BAD_WORD :] + 1
    behind[BAD_WORD - 1 - len(recent) : BAD_WORD - 1] = recent
    behind[BAD_WORD - 1 : BAD_WORD - 1 + len(tokens)] = tokens


def settings(wanted: Adjustments, prompt: int, layout: RecordLayout) -> NDArray[np.int32]:
    """The settings of a record, int32 [`RecordLayout.width`].

    Args:
        prompt: the number of its tokens.
    """
    row = np.zeros(layout.width, np.int32)
    floats = row.view(np.float32)
    floats[:UNTIL] = wanted.repetition, wanted.frequency, wanted.presence, wanted.min_p
    row[UNTIL] = prompt + wanted.min_tokens
    tokens, biases = row[layout.biased], floats[layout.biases]
    for place, (token, bias) in enumerate(wanted.biases):
        tokens[place], biases[place] = token, bias
    words = row[layout.bad_words].reshape(BAD_WORDS, BAD_WORD)
    for word, ids in zip(words, wanted.bad_words, strict=False):
        word[BAD_WORD - len(ids) :] = np.array(ids) + 1
    banned = np.zeros(layout.words * BITS, bool)
    if wanted.allowed is not None:
        banned[:] = True
        banned[list(wanted.allowed)] = False
    banned[list(wanted.banned)] = True
    held = np.zeros(layout.words * BITS, bool)
    held[list(wanted.held)] = True
    row[layout.banned], row[layout.held] = pack(banned), pack(held)
    return row


def pack(bits: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Words of bits, the lowest first, as `unpack` reads them."""
    return np.packbits(bits, bitorder="little").view("<i4")


class Records(nn.Module):
    """The records of requests, and record 0, which rows without adjustments have.

    Args:
        requests: the most that run at a time.
        vocabulary: the number of tokens.

    Attributes:
        counts: int32 [requests + 1, vocabulary]: `OCCURRENCE` times the occurrences of a token in
            the answer, and one more if the prompt has it.
        settings: int32 [requests + 1, `RecordLayout.width`].
        recent: int32 [requests + 1, BAD_WORD - 1], the tokens that were drawn last, plus 1.
    """

    counts: Tensor
    settings: Tensor
    recent: Tensor

    def __init__(self, requests: int, vocabulary: int) -> None:
        super().__init__()
        self.layout = RecordLayout(vocabulary)
        widths = {"counts": vocabulary, "settings": self.layout.width, "recent": BAD_WORD - 1}
        for name, width in widths.items():
            empty = torch.empty((requests + 1, width), dtype=torch.int32, device="meta")
            self.register_buffer(name, empty)

    def load(self, brought: Tensor) -> Tensor:
        """Begin records; returns where they are, int64 [rows].

        Args:
            brought: int64 [rows, `RecordLayout.columns`], as `write` fills them; zeros for rows
                without adjustments.
        """
        places, layout = brought[:, PLACE].contiguous(), self.layout
        _, settings, recent, tokens = brought.split(
            (HEAD, layout.width, BAD_WORD - 1, brought.shape[1] - layout.columns(0)), 1
        )
        at = torch.arange(tokens.shape[1], device=brought.device)
        is_prompt = at < brought[:, ASKED, None]
        is_drawn = ~is_prompt & (at < brought[:, KNOWN, None])
        zeros = brought.new_zeros((len(brought), layout.vocabulary), dtype=torch.int32)
        drawn = zeros.scatter_add(1, tokens, is_drawn.int() * OCCURRENCE)
        asked = zeros.scatter_add(1, tokens, is_prompt.int())
        self.settings.index_copy_(0, places, settings.int())
        self.recent.index_copy_(0, places, recent.int())
        self.counts.index_copy_(0, places, drawn + (asked > 0))
        return places

    def adjust(self, logits: Tensor, places: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Change logits as the records of rows say.

        Args:
            logits: [rows, vocabulary], of any floating dtype.
            places: int64 [rows], of the records.
            positions: int64 [rows], of the tokens that are drawn.

        Returns:
            float32 [rows, vocabulary]; and `min_p` of each row, float32 [rows].
        """
        layout, settings = self.layout, self.settings.index_select(0, places)
        counts = self.counts.index_select(0, places)
        floats = settings[:, :UNTIL].view(torch.float32)
        banned = unpack(settings[:, layout.banned], layout.vocabulary)
        held = unpack(settings[:, layout.held], layout.vocabulary)
        held = held & (positions < settings[:, UNTIL])[:, None]
        words = settings[:, layout.bad_words].unflatten(1, (BAD_WORDS, BAD_WORD))
        logits = logits.float().masked_fill(banned | held, -torch.inf)
        logits = forbid_endings(logits, words, self.recent.index_select(0, places))
        biases = settings[:, layout.biases].view(torch.float32)
        logits = add_biases(logits, settings[:, layout.biased].long(), biases)
        repetition = torch.where(floats[:, REPETITION] > 0, floats[:, REPETITION], 1.0)
        penalties = repetition, floats[:, FREQUENCY], floats[:, PRESENCE]
        logits = penalize(logits, counts // OCCURRENCE, counts % OCCURRENCE > 0, *penalties)
        return logits, floats[:, MIN_P]

    def count(self, places: Tensor, drawn: Tensor) -> None:
        """Count tokens int64 [rows] that were drawn for the records of rows."""
        self.counts.index_put_((places, drawn), self.counts[places, drawn] + OCCURRENCE)
        recent = self.recent.index_select(0, places)[:, 1:]
        self.recent.index_copy_(0, places, torch.cat([recent, drawn[:, None].int() + 1], 1))
