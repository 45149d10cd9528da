"""Decoders of transformers train on ranks as in one process, and are served: tiny models.

What comes of each type is recorded in `decoders.json`. A default run tries a few of them, and
`--slow` all that were equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..sampling import scale
from .decoder_outcomes import COLUMNS, record
from .decoder_runs import outcome_of, train_plainly, two_stages, whole_and_sharded
from .decoder_serving import generated, serve
from .decoders import class_of, config_of, decoder

pytestmark = pytest.mark.timeout(300)

SOME = (
    ("opt", "tp"),
    ("phi3", "tp"),
    ("gemma2", "two stages"),
    ("llama", "fsdp"),
    ("bloom", "saved"),
    ("gemma2", "served"),
    ("gpt_oss", "served"),
    ("deepseek_v3", "served"),
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
def test_a_decoder_does_as_in_one_process(kind: str, shape: str, tmp_path: Path) -> None:
    outcome = outcome_of(kind, shape, tmp_path)
    assert outcome.as_record() == KNOWN[kind][shape]
    assert outcome.kind in RIGHT


@pytest.mark.parametrize(
    ("kind", "ranks", "tp"),
    [
        ("mixtral", 2, 2),
        ("falcon_h1", 2, 2),
        *(pytest.param(k, 2, 2, marks=pytest.mark.slow) for k in ("qwen3_next", "nemotron_h")),
        *(
            pytest.param(kind, 2, tp, marks=pytest.mark.slow)
            for kind in ("llama", "qwen3", "gemma2", "phi3", "mixtral", "qwen3_moe")
            for tp in (1, 2)
        ),
    ],
)
def test_a_decoder_is_served_on_ranks(kind: str, ranks: int, tp: int, tmp_path: Path) -> None:
    model = decoder(kind)
    serve(model, generated(model), tmp_path, ranks, tp)


@pytest.mark.slow
def test_layers_that_run_again_are_trained_without_a_cut() -> None:
    model = decoder("hrm_text")
    whole_and_sharded(model, train_plainly(model))


@pytest.mark.slow
def test_patches_of_single_bytes_are_trained_without_a_cut() -> None:
    model: Any = decoder("blt")
    model.config.patching_mode = "static"
    whole_and_sharded(model, train_plainly(model))


@pytest.mark.slow
def test_full_attention_is_asked_for_ahead_of_the_cut() -> None:
    config = config_of("big_bird")
    config.attention_type = "original_full"
    model = class_of("big_bird")(config).train()
    two_stages(model, train_plainly(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "column"),
    [(k, c) for k, row in KNOWN.items() for c, (kind, *_) in row.items() if kind == "plain fails"],
)
def test_plain_transformers_fails(kind: str, column: str, tmp_path: Path) -> None:
    assert outcome_of(kind, column, tmp_path).as_record() == KNOWN[kind][column]


def test_outcomes_have_reasons() -> None:
    for kind, row in KNOWN.items():
        for outcome, *reason in row.values():
            assert (outcome in RIGHT) == (not reason), kind
