"""The tokens of a model as llguidance needs them: what each writes, and which end a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer


@dataclass
class ByteTokens:
    """The 256 bytes as tokens, and one that ends a text; the protocol is llguidance's."""

    eos_token_id: int
    special_token_ids: Sequence[int]  # which no text has
    bos_token_id: int | None = None
    tokens: list[bytes] = field(
        default_factory=lambda: [*(bytes([value]) for value in range(256)), b"<end>"]
    )

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def vocabulary(tokenizer: str | None, size: int, eos: Sequence[int]) -> LLTokenizer:
    """The tokens of a model.

    Args:
        tokenizer: as the library tokenizers writes it; None: the tokens are the 256 bytes.
        size: rows of the model's embedding, which may be more than the tokenizer has.
        eos: the tokens that end a text. Without any, a token behind all others stands for the end;
            nobody draws it, for a text that is complete ends by itself.
    """
    ends, count = (list(eos), size) if eos else ([size], size + 1)
    if tokenizer is not None:
        own = tokenizer if eos else _with_end(tokenizer, size)
        return LLTokenizer(own, n_vocab=count, eos_token=ends)
    return LLTokenizer(
        TokenizerWrapper(ByteTokens(ends[0], [*ends, 256])), n_vocab=max(count, 257), eos_token=ends
    )


def _with_end(tokenizer: str, end: int) -> str:
    """A tokenizer with special tokens up to this number: the library takes an end from these.

    Rows of the embedding that have no token get one each, for the tokenizer numbers them on.
    """
    own = Tokenizer.from_str(tokenizer)
    first = max(own.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    own.add_special_tokens([f"<|row {number}|>" for number in range(first, end + 1)])
    return str(own.to_str())


def stored(folder: Path | None) -> str | None:
    """The tokenizer of a folder, as `vocabulary` takes it; None without a folder."""
    if folder is None:
        return None
    from transformers import PreTrainedTokenizerFast  # whose import takes seconds

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder).backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return str(tokenizer.to_str())
