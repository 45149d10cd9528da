"""Texts as batches of tokens: read, tokenized, packed, and drawn by a seed and a step's number."""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def documents(files: Sequence[Path]) -> Iterator[str | list[Any]]:
    """The documents of files: a text file is one, and so is each line of a file of JSON lines.

    A line has `text`, or a conversation as `messages`. Without files they are Python's help texts.

    Raises:
        ValueError: a file or a line is none of these.
    """
    if not files:
        topics = pydoc_data.topics.topics
        yield from (topics[name] for name in sorted(topics))
    for file in files:
        if file.suffix not in (".jsonl", ".json"):
            yield file.read_text(encoding="utf-8-sig")
            continue
        for number, line in _lines(file):
            try:
                document = json.loads(line)
                yield document["text"] if "text" in document else document["messages"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{file}:{number} is no JSON object with "text" or "messages": {error}'
                ) from error


def _encode(text: str | list[Any], tokenizer: Any) -> list[int]:
    """The ids of a document.

    A template writes the beginning and the ends of a conversation, so the tokenizer adds none.
    """
    if isinstance(text, str):
        return tokenizer(text)["input_ids"]
    return tokenizer.apply_chat_template(text, return_dict=True)["input_ids"]


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a file of JSON lines.

    A line ends at a line feed alone: a string of JSON may hold whatever else `str.splitlines`
    splits at, such as U+2028.
    """
    with file.open(encoding="utf-8-sig", newline="\n") as opened:
        yield from enumerate(opened, 1)


@dataclass(frozen=True)
class Texts:
    """Windows of tokens, int64 [windows, length]: one stream of all documents, cut.

    Attributes:
        train, validation: the windows to learn from, and the last windows, to be judged on.
        positions: of the tokens of all windows, in this order: each token's place in its document,
            or in the part of the document that is in the window. So a 0 begins a document.
    """

    train: Tensor
    validation: Tensor
    positions: Tensor

    @staticmethod
    def of(texts: Iterable[str | list[Any]], tokenizer: Any, length: int, most: int) -> Texts:
        """Tokenize and pack documents, an end of text between them.

        Args:
            most: the most windows to make.

        Raises:
            ValueError: there are too few tokens.
        """
        stream: list[int] = []
        begins: list[int] = []
        for text in texts:
            begins.append(len(stream))
            stream += _encode(text, tokenizer)
            if tokenizer.eos_token_id is not None and stream[-1:] != [tokenizer.eos_token_id]:
                stream.append(tokenizer.eos_token_id)
            if len(stream) >= most * length:
                break
        count = min(most, len(stream) // length)
        held_out = max(1, count // 20)
        if count < 2:
            raise ValueError(
                f"the texts are {len(stream)} tokens, and two windows of {length} are the least: "
                "one to learn from and one to be judged on; give more texts, or a smaller --length"
            )
        windows = torch.tensor(stream[: count * length]).view(count, length)
        borders = [*begins, *range(0, count * length, length)]
        positions = _positions(borders, count * length).view(count, length)
        return Texts(windows[:-held_out], windows[-held_out:], positions)

    @property
    def ids(self) -> list[int]:
        """The ids that occur in windows, each once."""
        both = torch.cat([self.train, self.validation])
        return [int(token) for token in both.unique()]

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        """The windows of a step, [size, length]."""
        return self.train[self._rows(step, size, seed)]

    def packed(self, step: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
        """The windows of a step and the positions of their tokens, both [size, length]."""
        rows = self._rows(step, size, seed)
        return self.train[rows], self.positions[rows]

    def _rows(self, step: int, size: int, seed: int) -> list[int]:
        """The numbers of the windows of a step.

        They follow from the arguments alone: all ranks have the same ones, and a resumed run goes
        on in its data where it was. Each pass over the windows has an order of its own.
        """
        count = len(self.train)
        chosen = []
        for position in range(step * size, (step + 1) * size):
            generator = torch.Generator().manual_seed(seed + position // count)
            chosen.append(int(torch.randperm(count, generator=generator)[position % count]))
        return chosen

    def validation_batches(
        self, size: int, most: int, packed: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Batches to be judged on: their windows, labels and positions, all [size, length].

        There are positions if documents are `packed` with borders, and else None. The first windows
        fill the last batch. Their labels are ignored there, so that no window counts twice.
        """
        count = len(self.validation)
        for start in range(0, min(count, most * size), size):
            rows = [(start + i) % count for i in range(size)]
            ids = self.validation[rows]
            positions = self.positions[len(self.train) :][rows] if packed else None
            labels = successors(ids, positions)
            labels[count - start :] = IGNORED
            yield ids, labels, positions


def successors(ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """The labels of windows, int64 [windows, length]: each token's is the token behind it.

    The last token's is ignored, and with `positions` the last one of each document. A caller may
    have more ignored, such as those of prompts.
    """
    labels = functional.pad(ids[:, 1:], (0, 1), value=IGNORED)  # smaller than to cut logits
    if positions is not None:
        labels[:, :-1].masked_fill_(positions[:, 1:] == 0, IGNORED)
    return labels


def _positions(begins: Sequence[int], count: int) -> Tensor:
    """The place of each of so many tokens in its document, by where documents begin."""
    at = torch.arange(count)
    starts = torch.zeros(count, dtype=torch.int64)
    known = torch.tensor([begin for begin in begins if begin < count], dtype=torch.int64)
    starts[known] = known
    return at - starts.cummax(0).values


IGNORED = -100
"""A label that does not count."""
