"""Which variant serves what, and which are compiled first."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.requests import How, Limits
from examples.serve.settings import Options
from examples.serve.variants import (
    DecodeSize,
    PrefillSize,
    all_sizes,
    bucket,
    cheapest,
    first_sizes,
    general,
    later_sizes,
    serves,
)

LIMITS = Limits(2, 8, 32, 100, 8, 256, 64, (), prompts=4)
OPTIONS = Options(batches=(2, 8), chunks=(8, 32), widths=(4, 16), late=True)
ALL = all_sizes(LIMITS, OPTIONS)
SCORED, ADJUSTED = How.DRAWN | How.SCORED, How.DRAWN | How.ADJUSTED
HOWS = st.sampled_from([How.GREEDY, How.DRAWN, SCORED, ADJUSTED])


def test_the_cheapest_that_holds_it() -> None:
    sizes = [
        DecodeSize(8, 4, How.DRAWN),
        DecodeSize(8, 32, How.DRAWN),
        DecodeSize(2, 4, How.GREEDY),
    ]
    assert cheapest(sizes, DecodeSize(2, 4, How.GREEDY)) == sizes[2]
    assert cheapest(sizes, DecodeSize(2, 4, How.DRAWN)) == sizes[0]
    assert cheapest(sizes, DecodeSize(2, 16, How.GREEDY)) == sizes[1]
    assert cheapest(sizes, DecodeSize(2, 4, SCORED)) is None


def test_rare_work_has_variants_of_its_own() -> None:
    """Which serve nothing else; they are compiled for the largest batch, or chunk."""
    hows = [How.GREEDY, How.DRAWN, SCORED, ADJUSTED, SCORED | ADJUSTED]
    pairs = {(how, needed) for how in hows for needed in hows if serves(how, needed)}
    assert pairs == {(how, how) for how in hows} | {(How.DRAWN, How.GREEDY)}
    assert general(DecodeSize(2, 4, ADJUSTED), LIMITS, OPTIONS) == DecodeSize(8, 4, ADJUSTED)
    assert general(DecodeSize(2, 4, How.DRAWN), LIMITS, OPTIONS) == DecodeSize(2, 4, How.DRAWN)
    chunk = PrefillSize(2, 8, 4, ADJUSTED)
    assert general(chunk, LIMITS, OPTIONS) == PrefillSize(2, 32, 4, ADJUSTED)
    assert general(chunk, replace(LIMITS, lengths=(8, 32)), OPTIONS) == chunk


def test_a_chunk_that_goes_on_is_alone() -> None:
    begins, goes_on = PrefillSize(4, 8, 0, How.DRAWN), PrefillSize(1, 8, 4, How.DRAWN)
    sizes = [begins, goes_on]
    assert cheapest(sizes, PrefillSize(1, 8, 4, How.DRAWN)) == goes_on
    assert cheapest(sizes, PrefillSize(4, 8, 0, How.GREEDY)) == begins
    assert cheapest([goes_on], PrefillSize(4, 8, 0, How.GREEDY)) is None
    assert cheapest([goes_on], PrefillSize(1, 8, 0, How.GREEDY)) == goes_on  # it begins, alone


def test_the_first_ones_serve_most() -> None:
    decode, chunk = first_sizes(LIMITS, OPTIONS)
    assert decode == DecodeSize(8, 4, How.DRAWN)
    assert chunk == PrefillSize(1, 32, 0, How.DRAWN)
    short = Options(batches=(2,), chunks=(8, 32), first_chunk=5, draws=False)
    assert first_sizes(LIMITS, short)[1] == PrefillSize(1, 8, 0, How.GREEDY)
    assert {decode, chunk} < set(ALL)
    fused = first_sizes(LIMITS, replace(OPTIONS, fuse="inductor"))
    assert fused == [decode, chunk, DecodeSize(8, 4, How.GREEDY)]
    assert len(first_sizes(LIMITS, replace(short, fuse="inductor"))) == 2


def test_what_nobody_has_asked_for_is_greedy_and_short() -> None:
    later = later_sizes(LIMITS, OPTIONS)
    assert set(later) < set(ALL)
    assert [size for size in later if isinstance(size, DecodeSize)] == [
        DecodeSize(8, 4, How.GREEDY),
        DecodeSize(2, 4, How.GREEDY),
    ]
    assert all(size.width <= 4 and not size.how & ~How.DRAWN for size in later)


def test_what_no_other_serves_comes_first() -> None:
    """A chunk that goes on with its prompt, and several that begin theirs."""
    ahead = [PrefillSize(4, 32, 0, How.GREEDY), PrefillSize(1, 32, 4, How.DRAWN)]
    assert later_sizes(LIMITS, OPTIONS)[:2] == ahead


def test_no_variant_is_listed_twice() -> None:
    assert len(set(ALL)) == len(ALL)


@given(st.integers(1, 8), st.integers(1, 32), HOWS)
def test_all_variants_hold_all_batches(rows: int, width: int, how: How) -> None:
    held = cheapest(
        (size for size in ALL if isinstance(size, DecodeSize)),
        DecodeSize(rows, width if how is not SCORED else 32, how),
    )
    assert held is not None
    assert held.rows >= rows
    assert held.width >= width


def test_what_is_larger_than_all_is_refused() -> None:
    assert bucket((2, 8), 3) == 8
    with pytest.raises(ValueError, match="9 of at most 8"):
        bucket((2, 8), 9)


def test_names_for_the_log() -> None:
    assert str(DecodeSize(8, 4, How.GREEDY)) == "decode batches of 8 with 4 blocks each, greedy"
    assert str(PrefillSize(4, 32, 0, How.DRAWN)) == "4 chunks of 32 tokens, with sampling"
    scored = PrefillSize(1, 32, 16, SCORED)
    assert str(scored) == "a chunk of 32 tokens behind up to 16 blocks, with log-probabilities"
    assert (SCORED | ADJUSTED).words == "with log-probabilities and penalties"
