"""Random edits of a program: a trace from the cache is that of a fresh start, or there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ..sampling import examples, scale
from .edited import CHOICES, COMMENTS, SURROUNDINGS, MemoryStore, Version, traced

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("edited")


@pytest.fixture(scope="module")
def store(folder: Path) -> MemoryStore:
    """Has the traces of all versions that were traced so far."""
    shared = MemoryStore()
    traced(Version(), folder, shared)
    return shared


places = st.dictionaries(st.sampled_from(sorted(CHOICES)), st.integers(1, 2), max_size=2)


@st.composite
def versions(draw: st.DrawFn) -> Version:
    chosen = {place: min(number, len(CHOICES[place]) - 1) for place, number in draw(places).items()}
    return Version(
        chosen,
        comment=draw(st.integers(0, len(COMMENTS) - 1)),
        around=draw(st.sampled_from((SURROUNDINGS[0], *SURROUNDINGS))),
        rows=draw(st.sampled_from((8, 8, 8, 16))),
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.float64))),
    )


@examples(80 if scale() == 1 else 160)
@given(version=versions())
def test_a_trace_from_the_cache_is_that_of_a_fresh_start(
    version: Version, store: MemoryStore, folder: Path
) -> None:
    assert traced(version, folder, store) == traced(version, folder, None)


@examples(16)
@given(version=versions(), comment=st.integers(0, len(COMMENTS) - 1))
def test_edits_of_comments_change_nothing(version: Version, comment: int, folder: Path) -> None:
    store = MemoryStore()
    traced(version, folder, store)
    kept = store.kept
    again = traced(version.commented(comment), folder, store)
    assert (store.kept, store.reasons) == (kept, [])
    assert store.taken == kept, "every trace is one of before"
    assert again == traced(version.commented(comment), folder, None)


@pytest.mark.parametrize("around", SURROUNDINGS[1:])
def test_a_change_around_the_program_is_seen(around: str, store: MemoryStore, folder: Path) -> None:
    fresh = traced(Version(around=around), folder, None)
    assert fresh != traced(Version(), folder, None)
    assert traced(Version(around=around), folder, store) == fresh
