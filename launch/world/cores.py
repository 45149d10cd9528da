"""Give each rank its share of the machine's cores, and hold its thread pools to that share.

Linux describes the cores under `/sys`. A rank that is bound to its share does not chase others, and
the thread pools of all ranks together do not have more threads than the machine has cores.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..environment.config import THREAD_VARIABLES, export

FEW_CORES = 2
"""On so few cores, the kernel places ranks better than a fixed division."""


@dataclass(frozen=True, order=True)
class Core:
    """One physical core: its CPUs (hardware threads) that may be used, and where it stands."""

    node: int
    """NUMA node, or the package where the machine names no nodes."""
    kind: int
    """Cores of different kinds run at different speeds (performance and efficiency cores)."""
    cpus: tuple[int, ...]


def read_cores(allowed: Iterable[int], root: Path = Path("/")) -> tuple[Core, ...]:
    """The cores that hold the CPUs `allowed`, neighbours next to each other.

    CPUs that are offline are left out; siblings that are not allowed are left out of their core.
    A CPU that Linux says nothing about is a core by itself.

    Args:
        allowed: CPU numbers, as in `os.sched_getaffinity(0)`.
        root: the directory that holds `sys`.
    """
    system = root / "sys/devices/system"
    usable = set(allowed)
    if online := _read(system / "cpu/online"):
        usable &= parse_list(online)
    nodes = _node_of(system / "node")
    kinds = _kind_of(root / "sys/devices", system / "cpu", usable)
    cores: set[Core] = set()
    for cpu in usable:
        topology = system / f"cpu/cpu{cpu}/topology"
        siblings = parse_list(_read(topology / "thread_siblings_list")) & usable or {cpu}
        package = _read(topology / "physical_package_id")
        first = min(siblings)
        node = nodes.get(first, int(package) if package.isdigit() else 0)
        cores.add(Core(node, kinds.get(first, 0), tuple(sorted(siblings))))
    return tuple(sorted(cores))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The time that the control group of this process may use, in CPUs; None: no limit.

    It is the least `cpu.max` (version 2 of control groups) of this process's group and of all
    groups around it.
    """
    limits: list[float] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # groups of version 1 name some
            group = Path(path.lstrip("/"))
            for directory in (group, *group.parents):
                limits += _limit(root / "sys/fs/cgroup" / directory)
    return min(limits, default=None)


def parse_list(text: str) -> set[int]:
    """CPU numbers in the notation of Linux, such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is not None:
            numbers |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return numbers


def allowed_cpus() -> frozenset[int]:
    """The CPUs that this thread may run on; where the system does not say, all there are."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_count(cores: Iterable[Core], quota: float | None) -> int:
    """The number of cores' worth of work that can run at once, at least 1."""
    count = sum(1 for _ in cores)
    return max(1, count if quota is None else min(count, int(quota)))


def share(cores: Sequence[Core], local_rank: int, local_size: int) -> tuple[Core, ...]:
    """The cores of one rank, if the ranks of a machine share them evenly.

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


def should_bind(core_count: int, local_size: int) -> bool:
    """True if dividing the cores helps: each rank gets one, and there are more than two."""
    return local_size > 1 and core_count >= local_size and core_count > FEW_CORES


def parent_cpus() -> frozenset[int] | None:
    """The CPUs of this process's parent; None where they cannot be read.

    If they differ from ours, the launcher has bound us: it binds each rank, and leaves its own
    daemon, our parent, free. Both have inherited the limits of a control group or of `taskset`.
    """
    try:
        return frozenset(os.sched_getaffinity(os.getppid()))
    except (OSError, AttributeError):
        return None


def bind(cores: Sequence[Core]) -> None:
    """Let this thread, and those that it will start, run on `cores` alone."""
    os.sched_setaffinity(0, {cpu for core in cores for cpu in core.cpus})


def thread_settings(threads: int, preset: Collection[str]) -> dict[str, str]:
    """The variables to set so that thread pools which are yet to be loaded get `threads` threads.

    Args:
        threads: threads for each pool, at least 1.
        preset: variables that are set already. If OMP_NUM_THREADS is among them, the user has
            chosen, and nothing is set.
    """
    if "OMP_NUM_THREADS" in preset:
        return {}
    return {name: str(threads) for name in THREAD_VARIABLES if name not in preset}


def cap_threads(threads: int, preset: Collection[str]) -> None:
    """Hold the thread pools of this process to `threads`, whether or not torch is loaded.

    Args:
        threads: threads for each pool, at least 1.
        preset: variables that the user has set; see `thread_settings`.
    """
    chosen = thread_settings(threads, preset)
    if not chosen:
        return
    export(chosen)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _part(cores: Sequence[Core], index: int, parts: int) -> Sequence[Core]:
    return cores[index * len(cores) // parts : (index + 1) * len(cores) // parts]


def _node_of(directory: Path) -> dict[int, int]:
    nodes: dict[int, int] = {}
    for path in directory.glob("node[0-9]*/cpulist"):
        number = int(path.parent.name.removeprefix("node"))
        nodes.update(dict.fromkeys(parse_list(_read(path)), number))
    return nodes


def _kind_of(devices: Path, cpus: Path, usable: set[int]) -> dict[int, int]:
    """The kind of each CPU: x86 lists CPUs by their counters, and Arm gives each a capacity."""
    kinds: dict[int, int] = {}
    for kind, name in enumerate(("cpu_core/cpus", "cpu_atom/cpus")):
        kinds.update(dict.fromkeys(parse_list(_read(devices / name)), kind))
    if kinds:
        return kinds
    capacities = {cpu: _read(cpus / f"cpu{cpu}/cpu_capacity") for cpu in usable}
    return {cpu: -int(text) for cpu, text in capacities.items() if text.isdigit()}


def _limit(directory: Path) -> list[float]:
    quota, _, period = _read(directory / "cpu.max").partition(" ")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return []
    return [int(quota) / int(period)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
