"""Check, before MPI is initialised, that /dev/shm has room for MPI's segments.

MPICH and its UCX do not check it: if there is too little room, they end in a segmentation fault or
a bus error. cg's own queues are in anonymous memory files, and take no room there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path("/dev/shm")

# As measured with MPICH 5.0.2, which creates one segment of a machine, and UCX, which creates one
# of each rank and looks for more room before it does.
_MIB = 1 << 20
_OF_RANK = 5 * _MIB + _MIB // 4
_OF_MACHINE = 16 * _MIB
_WITHOUT_UCX = 2 * _MIB
"""Bytes of a rank where UCX makes no segments."""
_OF_MEMORY = {"all", "shm", "sm", "mm", "posix"}
"""The transports and groups of transports of UCX that make segments in /dev/shm."""


def bytes_needed(ranks: int, environ: Mapping[str, str]) -> int:
    """The bytes that the ranks of MPICH need on one machine.

    Args:
        ranks: of the machine.
        environ: the variables of the ranks.
    """
    chosen = environ.get("UCX_TLS", "all")
    is_named = not _OF_MEMORY.isdisjoint(chosen.removeprefix("^").split(","))
    if is_named == chosen.startswith("^"):
        return ranks * _WITHOUT_UCX
    return _OF_MACHINE + ranks * _OF_RANK


def shortage(
    ranks: int, environ: Mapping[str, str], *, others_began: bool, folder: Path = FOLDER
) -> str | None:
    """Say that there is too little room for the ranks of this machine, and what to do about it.

    Args:
        ranks: of the machine.
        environ: the variables of the ranks.
        others_began: whether the other ranks may have taken their part of the room already.
        folder: where segments are made.

    Returns:
        None if there is room, or if it cannot be seen.
    """
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    needed = bytes_needed(ranks, environ)
    needed_free = bytes_needed(1, environ) if others_began else needed
    if not size or (size >= needed and free >= needed_free):  # a size of 0 is no limit
        return None
    return (
        f"{folder} has {size / _MIB:g} MiB, of which {free / _MIB:.1f} MiB are free, and MPICH "
        f"needs {needed / _MIB:g} MiB of shared memory there for the {ranks} ranks of this "
        "machine; with less it crashes as it starts. Give a container more (docker run "
        f"--shm-size=1g, or --ipc=host), remove files in {folder} that no process uses, or, as "
        f"root, enlarge it: mount -o remount,size=1g {folder}"
    )
