"""Test that a save on a full disk, or where something has the file's first name, harms nothing."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.checkpoints import tensor_files
from cg.launch.world.world import use_world


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)  # 16,640 bytes


cg.actor(Part)


@contextmanager
def part() -> Iterator[cg.ActorHandle]:
    with use_world(VirtualWorld(2)):
        yield Part.on(1)()


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Stands for a disk with so much room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


NEEDED = r"\d{5} bytes are needed, and \d+ are free on its file system; make room, .*/\.model\.cg"


def test_a_file_without_room_is_an_error_with_its_bytes(tmp_path: Path) -> None:
    with part() as actor, largest_file(8192), pytest.raises(OSError, match=NEEDED) as raised:
        cg.save(tmp_path / "model.cg", {"": actor})
    assert raised.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_an_error_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    file = tmp_path / "model.cg"
    with part() as actor:
        cg.save(file, {"": actor})
        before = file.read_bytes()
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=NEEDED):
            cg.save(file, {"": actor})
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == before


def test_a_write_that_fails_gives_its_space_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(tensor_files, "_write", fail)
    with part() as actor, pytest.raises(OSError, match="the disk is broken"):
        cg.save(tmp_path / "model.cg", {"": actor})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_space_is_reserved_by_zeros_where_a_file_system_has_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def unknown(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    monkeypatch.setattr(tensor_files, "_ZEROS", bytes(1000))
    file = tmp_path / "model.cg"
    with part() as actor:
        cg.save(file, {"": actor})
        assert torch.equal(load_file(file)["linear.weight"], actor.instances[1].linear.weight)
        with largest_file(8192), pytest.raises(OSError, match=NEEDED):
            cg.save(file, {"": actor})
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_at_the_first_name_is_not_followed(tmp_path: Path) -> None:
    file, victim = tmp_path / "model.cg", tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".model.cg.partial").symlink_to(victim)
    with part() as actor:
        cg.save(file, {"": actor})
    assert victim.read_text() == "mine"
    assert not file.is_symlink()
    assert sorted(tmp_path.iterdir()) == [file, victim]


def test_a_link_that_comes_while_a_file_is_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, victim = tmp_path / "model.cg", tmp_path / "victim"
    victim.write_text("mine")
    create = tensor_files._create

    def lead_astray(path: Path, header: bytes, offsets: dict[str, tuple[int, int]]) -> None:
        create(path, header, offsets)
        path.unlink()
        path.symlink_to(victim)

    monkeypatch.setattr(tensor_files, "_create", lead_astray)
    with part() as actor, pytest.raises(OSError, match="symbolic links"):
        cg.save(file, {"": actor})
    assert victim.read_text() == "mine"


def test_what_a_job_has_left_at_the_first_name(tmp_path: Path) -> None:
    file, partial = tmp_path / "model.cg", tmp_path / ".model.cg.partial"
    partial.write_bytes(b"the half of a file")
    with part() as actor:
        cg.save(file, {"": actor})
        partial.mkdir()
        with pytest.raises(IsADirectoryError, match=r"written first; remove it: .*\.cg\.partial"):
            cg.save(file, {"": actor})
    assert partial.is_dir()
