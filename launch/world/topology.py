"""The machine's cores: which CPUs belong together, as Linux describes it under `/sys`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


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
    """How many CPUs' worth of time the control group of this process may use; None: no limit.

    Reads version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`), of this process's group and
    of all groups around it; the least counts.
    """
    limits: list[float] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / ("sys/fs/cgroup/cpu" if controllers else "sys/fs/cgroup")
        group = Path(path.lstrip("/"))
        for directory in (group, *group.parents):
            limits += _limit(mount / directory)
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
    """How many cores' worth of work can run at once, at least 1."""
    count = sum(1 for _ in cores)
    return max(1, count if quota is None else min(count, int(quota)))


def _node_of(directory: Path) -> dict[int, int]:
    nodes: dict[int, int] = {}
    for path in directory.glob("node[0-9]*/cpulist"):
        number = int(path.parent.name.removeprefix("node"))
        nodes.update(dict.fromkeys(parse_list(_read(path)), number))
    return nodes


def _kind_of(devices: Path, cpus: Path, usable: set[int]) -> dict[int, int]:
    """Kinds of cores: x86 lists them by kind of its counters, Arm gives each CPU a capacity."""
    kinds: dict[int, int] = {}
    for kind, name in enumerate(("cpu_core/cpus", "cpu_atom/cpus")):
        kinds.update(dict.fromkeys(parse_list(_read(devices / name)), kind))
    if kinds:
        return kinds
    capacities = {cpu: _read(cpus / f"cpu{cpu}/cpu_capacity") for cpu in usable}
    return {cpu: -int(text) for cpu, text in capacities.items() if text.isdigit()}


def _limit(directory: Path) -> list[float]:
    quota, _, period = _read(directory / "cpu.max").partition(" ")
    if not quota:
        quota = _read(directory / "cpu.cfs_quota_us")
        period = _read(directory / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return []
    return [int(quota) / int(period)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
