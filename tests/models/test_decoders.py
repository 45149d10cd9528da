"""Decoders of transformers train on ranks as in one process: tiny models of each type.

What comes of each type is recorded in `decoders.json`. A default run tries a few of them, and
`--slow` all that were equal.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..sampling import scale
from .decoder_outcomes import COLUMNS, record
from .decoder_runs import outcome_of

pytestmark = pytest.mark.timeout(300)

SOME = (
    ("opt", "tp"),
    ("phi3", "tp"),
    ("gemma2", "two stages"),
    ("llama", "fsdp"),
    ("bloom", "saved"),
)
KNOWN = record()["decoders"]
RIGHT = ("equal", "brought", "derived")


def chosen() -> list[tuple[str, str]]:
    """Types and shapes that this run tries."""
    right = [
        (kind, column)
        for kind, row in KNOWN.items()
        for column in COLUMNS
        if row.get(column, [""])[0] in RIGHT
    ]
    return right if scale() > 1 else list(SOME)


@pytest.mark.parametrize(("kind", "shape"), chosen())
def test_a_decoder_trains_as_in_one_process(kind: str, shape: str, tmp_path: Path) -> None:
    outcome = outcome_of(kind, shape, tmp_path)
    assert outcome.as_record() == KNOWN[kind][shape]
    assert outcome.kind in RIGHT


def test_outcomes_have_reasons() -> None:
    for kind, row in KNOWN.items():
        for outcome, *reason in row.values():
            assert (outcome in RIGHT) == (not reason), kind
