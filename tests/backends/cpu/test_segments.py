"""Shared memory: both kinds, withdrawal of keys, and nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cg.backends.cpu.memory.segments import MemoryFiles, NamedFiles, Segments


@pytest.fixture(params=["anonymous", "named"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Segments:
    return MemoryFiles() if request.param == "anonymous" else NamedFiles(tmp_path)


def test_what_one_writes_the_other_reads(kind: Segments) -> None:
    segment = kind.create(10_000)
    other = kind.open(os.getpid(), segment.key, 10_000)
    assert other[:] == bytes(10_000)
    segment.memory[9_999] = 7
    assert other[9_999] == 7


def test_a_sealed_segment_cannot_be_opened_and_stays_mapped(kind: Segments) -> None:
    segment = kind.create(100)
    other = kind.open(os.getpid(), segment.key, 100)
    kind.seal(segment.key)
    kind.seal(segment.key)
    with pytest.raises(OSError, match="No such file"):
        kind.open(os.getpid(), segment.key, 100)
    segment.memory[0] = 1
    assert other[0] == 1


def test_the_file_of_another_process_with_the_same_number_is_not_taken(tmp_path: Path) -> None:
    creator = MemoryFiles()
    key = creator.create(100).key
    creator.seal(key)
    path = tmp_path / "mine"
    path.write_bytes(b"mine" * 25)
    with path.open("r+b") as other:
        there = key >> 24 << 24 | other.fileno()
        with pytest.raises(FileNotFoundError, match="of another process"):
            creator.open(os.getpid(), there, 100)


def test_named_files_are_gone_once_sealed(tmp_path: Path) -> None:
    kind = NamedFiles(tmp_path)
    segment = kind.create(100)
    assert len(list(tmp_path.iterdir())) == 1
    kind.seal(segment.key)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_room_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"space|large"):
        NamedFiles(tmp_path).create(1 << 60)
    assert list(tmp_path.iterdir()) == []
