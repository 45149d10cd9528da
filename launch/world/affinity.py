"""Binds a rank to its share of the machine's cores, so that ranks do not chase each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby

from .topology import Core

FEW_CORES = 2
"""On so few cores, the kernel places ranks better than a fixed division."""


def share(cores: Sequence[Core], local_rank: int, local_size: int) -> tuple[Core, ...]:
    """The cores of one rank, of an even division among the ranks of a machine.

    Shares are contiguous, so that a rank stays within a NUMA node where the numbers allow it.
    Cores of different kinds are divided kind by kind: ranks wait for each other, so a rank with
    slow cores alone would slow all down.

    Args:
        cores: in the order of `read_cores`; at least `local_size` of them.
        local_rank: from 0 to `local_size` - 1.
        local_size: ranks on this machine.
    """
    by_kind = [
        list(group)
        for _, group in groupby(sorted(cores, key=lambda c: (c.kind, c)), key=lambda c: c.kind)
    ]
    if all(len(group) >= local_size for group in by_kind):
        parts = [_part(group, local_rank, local_size) for group in by_kind]
    else:
        parts = [_part(cores, local_rank, local_size)]
    return tuple(core for part in parts for core in part)


def wanted(core_count: int, local_size: int) -> bool:
    """Whether dividing the cores among ranks helps: each gets one, and there are more than two."""
    return local_size > 1 and core_count >= local_size and core_count > FEW_CORES


def parent_cpus() -> frozenset[int] | None:
    """The CPUs of this process's parent; None where they cannot be read.

    If they differ from ours, the launcher has bound us: it binds each rank, and leaves its own
    daemon, our parent, free. What a control group or `taskset` allows, both have inherited.
    """
    try:
        return frozenset(os.sched_getaffinity(os.getppid()))
    except (OSError, AttributeError):
        return None


def bind(cores: Sequence[Core]) -> None:
    """Let this thread, and those that it will start, run on `cores` alone."""
    os.sched_setaffinity(0, {cpu for core in cores for cpu in core.cpus})


def _part(cores: Sequence[Core], index: int, parts: int) -> Sequence[Core]:
    return cores[index * len(cores) // parts : (index + 1) * len(cores) // parts]
