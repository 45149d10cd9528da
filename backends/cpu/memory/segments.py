"""Shared memory between the processes of one machine, with no name left behind.

A segment is identified by a key of 64 bits that its creator tells the others. Two kinds exist:
anonymous memory files, which others open through the creator's entry in /proc and which vanish
with their last user; and, where /proc cannot be used, files in /dev/shm, unlinked as soon as all
have opened them.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from ...base import World

Name = TypeVar("Name")

_SHM = Path("/dev/shm")
_DESCRIPTOR_BITS = 24
_INODE_MASK = (1 << 32) - 1
_FLAGS = mmap.MAP_SHARED | mmap.MAP_POPULATE  # MAP_POPULATE touches every page now, not in a step


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """Memory that this process has created and others can open by `key`."""

    key: int
    memory: mmap.mmap


class Segments(Protocol):
    """One kind of shared memory."""

    @property
    def folder(self) -> Path | None:
        """The folder in which segments have names; None if /proc serves."""

    def create(self, nbytes: int) -> SharedSegment:
        """Zeroed memory of `nbytes` (at least 1), all of its pages touched.

        Raises:
            OSError: the machine has no such memory left, or does not offer it.
        """

    def open(self, pid: int, key: int, nbytes: int) -> mmap.mmap:
        """Map the segment `key` of process `pid`.

        Raises:
            OSError: it is gone, or may not be opened.
        """

    def seal(self, key: int) -> None:
        """Withdraw the key of a segment made here; processes that opened it keep it. Idempotent."""


class MemoryFiles:
    """Anonymous files (`memfd_create`); a key is the creator's file descriptor, and the inode.

    A process in a PID namespace of its own, as containers have, finds another process, or itself,
    under the creator's number. Its file under that descriptor is another one, as the inode tells.
    """

    folder = None

    def __init__(self) -> None:
        self._open: dict[int, int] = {}

    def create(self, nbytes: int) -> SharedSegment:
        descriptor = os.memfd_create("cg", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # an error now, not a signal later
            memory = mmap.mmap(descriptor, nbytes, flags=_FLAGS)
        except BaseException:
            os.close(descriptor)
            raise
        key = (os.fstat(descriptor).st_ino & _INODE_MASK) << _DESCRIPTOR_BITS | descriptor
        self._open[key] = descriptor
        return SharedSegment(key, memory)

    def open(self, pid: int, key: int, nbytes: int) -> mmap.mmap:
        descriptor = key & ((1 << _DESCRIPTOR_BITS) - 1)
        return _map(f"/proc/{pid}/fd/{descriptor}", nbytes, inode=key >> _DESCRIPTOR_BITS)

    def seal(self, key: int) -> None:
        descriptor = self._open.pop(key, None)
        if descriptor is not None:
            os.close(descriptor)


class NamedFiles:
    """Files in a memory file system; a key is the random part of the name."""

    def __init__(self, folder: Path = _SHM) -> None:
        self.folder = folder

    def create(self, nbytes: int) -> SharedSegment:
        key = secrets.randbits(63)
        path = self._path(key)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # an error now, not a signal later
            return SharedSegment(key, mmap.mmap(descriptor, nbytes, flags=_FLAGS))
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    def open(self, pid: int, key: int, nbytes: int) -> mmap.mmap:
        return _map(self._path(key), nbytes)

    def seal(self, key: int) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: int) -> Path:
        return self.folder / f"cg-{key:016x}"


def _map(path: str | Path, nbytes: int, inode: int | None = None) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if inode not in (None, os.fstat(descriptor).st_ino & _INODE_MASK):
            raise FileNotFoundError(errno.ENOENT, "it is a file of another process", str(path))
        return mmap.mmap(descriptor, nbytes, flags=_FLAGS)
    finally:
        os.close(descriptor)


def share(
    world: World,
    kind: Segments,
    pids: Sequence[int],
    own: Mapping[Name, int],
    others: Mapping[Name, tuple[int, int]],
) -> tuple[dict[Name, memoryview], dict[int, str]]:
    """Create segments, and open those that other ranks create; collective.

    Args:
        world: the ranks.
        kind: the kind of the segments.
        pids: process ids by rank.
        own: bytes of each segment to create, by names that its readers know.
        others: for each segment to open, by name, the rank that creates it, and its bytes.

    Returns:
        The memory of each segment, by name; and what went wrong, by rank. If anything has, the
        memory is of no use.
    """
    created: dict[Name, SharedSegment] = {}
    opened: dict[Name, memoryview] = {}
    problem = ""
    try:
        for name, nbytes in own.items():
            created[name] = kind.create(nbytes)
    except OSError as error:
        problem = str(error)
    told = world.allgather(({name: created[name].key for name in created}, problem))
    try:
        if not any(text for _, text in told):
            for name, (rank, nbytes) in others.items():
                opened[name] = memoryview(kind.open(pids[rank], told[rank][0][name], nbytes))
    except OSError as error:
        problem = str(error)
    problems = world.allgather(problem)
    for segment in created.values():
        kind.seal(segment.key)
    memory = {name: memoryview(segment.memory) for name, segment in created.items()}
    return memory | opened, {rank: text for rank, text in enumerate(problems) if text}
