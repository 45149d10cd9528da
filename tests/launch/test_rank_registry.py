"""The ranks in a job, as files."""

from __future__ import annotations

import stat
from pathlib import Path

from cg.launch.job.rank_registry import RankRegistry


def test_ranks_that_have_come_and_not_left(tmp_path: Path) -> None:
    registry = RankRegistry(tmp_path)
    assert registry.present() == []
    for rank in (10, 2, 1):
        registry.join(rank)
    registry.leave(2)
    registry.leave(2)
    assert registry.present() == [1, 10]


def test_ranks_of_other_machines_say_nothing(tmp_path: Path) -> None:
    elsewhere = RankRegistry(tmp_path / "not there")
    elsewhere.join(0)
    elsewhere.leave(0)
    assert not elsewhere.folder.exists()


def test_files_are_the_users_own(tmp_path: Path) -> None:
    RankRegistry(tmp_path).join(0)
    assert stat.S_IMODE((tmp_path / "0").stat().st_mode) == 0o600
