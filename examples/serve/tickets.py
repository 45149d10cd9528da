"""Work in flight, as the scheduler remembers it, and its counts."""

from __future__ import annotations

from dataclasses import dataclass

from .groups import Numbers, Sequence
from .work import Decode, Prefill


@dataclass(frozen=True, eq=False)
class Ticket:
    """Work in flight.

    Attributes:
        stays: of the sequences of its rows or chunks.
        sequences: the sequences of its chunks; none for a decode.
        speculates: whether it is a decode of sequences that speculate.
    """

    work: Decode | Prefill
    stays: Numbers
    sequences: tuple[Sequence, ...] = ()
    speculates: bool = False


@dataclass
class Stats:
    """Counts since the start."""

    preemptions: int = 0
    decodes: int = 0
    rows: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
