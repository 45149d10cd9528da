"""The machine's cores, read from made-up system trees, and their division among ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.launch.world.cores import (
    Core,
    bind,
    core_count,
    cpu_quota,
    parent_cpus,
    parse_list,
    read_cores,
    share,
    should_bind,
)

CPU = "sys/devices/system/cpu"


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def siblings(root: Path, groups: list[str], package: int = 0) -> None:
    for group in groups:
        for cpu in parse_list(group):
            topology = f"{CPU}/cpu{cpu}/topology"
            write(
                root,
                {
                    f"{topology}/thread_siblings_list": group,
                    f"{topology}/physical_package_id": str(package),
                },
            )


def cpus(cores: tuple[Core, ...]) -> list[tuple[int, ...]]:
    return [core.cpus for core in cores]


def test_siblings_make_one_core(tmp_path: Path) -> None:
    siblings(tmp_path, ["0,4", "1,5", "2,6", "3,7"])
    write(tmp_path, {f"{CPU}/online": "0-7"})
    assert cpus(read_cores(range(8), tmp_path)) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_what_is_not_allowed_or_offline_is_left_out(tmp_path: Path) -> None:
    siblings(tmp_path, ["0-1", "4-5", "6-7"])
    write(tmp_path, {f"{CPU}/online": "0-1,4-6"})
    assert cpus(read_cores({0, 4, 5, 6, 7}, tmp_path)) == [(0,), (4, 5), (6,)]


def test_two_sockets_stay_together(tmp_path: Path) -> None:
    siblings(tmp_path, ["0", "2", "4", "6"], package=0)
    siblings(tmp_path, ["1", "3", "5", "7"], package=1)
    cores = read_cores(range(8), tmp_path)
    assert cpus(cores) == [(0,), (2,), (4,), (6,), (1,), (3,), (5,), (7,)]
    assert cpus(share(cores, 1, 2)) == [(1,), (3,), (5,), (7,)]


def test_numa_nodes_count_before_packages(tmp_path: Path) -> None:
    siblings(tmp_path, ["0", "1", "2", "3"])
    node = "sys/devices/system/node"
    write(tmp_path, {f"{node}/node0/cpulist": "0,2", f"{node}/node1/cpulist": "1,3"})
    assert [(core.node, core.cpus) for core in read_cores(range(4), tmp_path)] == [
        (0, (0,)),
        (0, (2,)),
        (1, (1,)),
        (1, (3,)),
    ]


def test_fast_and_slow_cores_are_shared_out_evenly(tmp_path: Path) -> None:
    siblings(tmp_path, ["0-1", "2-3", "4", "5", "6", "7"])
    devices = "sys/devices"
    write(tmp_path, {f"{devices}/cpu_core/cpus": "0-3", f"{devices}/cpu_atom/cpus": "4-7"})
    cores = read_cores(range(8), tmp_path)
    assert cpus(share(cores, 0, 2)) == [(0, 1), (4,), (5,)]
    assert cpus(share(cores, 1, 2)) == [(2, 3), (6,), (7,)]
    assert cpus(share(cores, 0, 3)) == [(0, 1), (2, 3)]


def test_arm_tells_kinds_by_capacity(tmp_path: Path) -> None:
    siblings(tmp_path, ["0", "1", "2", "3"])
    capacities = {0: 446, 1: 446, 2: 1024, 3: 1024}
    write(tmp_path, {f"{CPU}/cpu{cpu}/cpu_capacity": str(c) for cpu, c in capacities.items()})
    assert cpus(read_cores(range(4), tmp_path)) == [(2,), (3,), (0,), (1,)]


def test_a_machine_that_says_nothing_has_a_core_for_each_cpu(tmp_path: Path) -> None:
    assert cpus(read_cores({3, 1}, tmp_path)) == [(1,), (3,)]


def test_this_machines_cpus_are_in_its_cores_once() -> None:
    cores = read_cores(os.sched_getaffinity(0))
    assert sorted(cpu for core in cores for cpu in core.cpus) == sorted(os.sched_getaffinity(0))


@given(st.integers(1, 12), st.data())
def test_shares_divide_the_cores(ranks: int, data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.integers(0, 1), min_size=ranks, max_size=40))
    cores = sorted(Core(i // 7, kind, (2 * i, 2 * i + 1)) for i, kind in enumerate(kinds))
    shares = [share(cores, rank, ranks) for rank in range(ranks)]
    assert sorted(core for part in shares for core in part) == cores
    assert all(shares)
    sizes = [len(part) for part in shares]
    assert max(sizes) - min(sizes) <= len(set(kinds))


@pytest.mark.parametrize(
    ("cores", "ranks", "wanted"),
    [(8, 4, True), (8, 8, True), (8, 9, False), (2, 2, False), (3, 2, True), (8, 1, False)],
)
def test_binding_needs_a_core_for_each_rank_and_some_choice(
    cores: int, ranks: int, wanted: bool
) -> None:
    assert should_bind(cores, ranks) is wanted


def test_the_least_quota_of_all_groups_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b",
            f"{group}/cpu.max": "max 100000",
            f"{group}/a/cpu.max": "250000 100000",
            f"{group}/a/b/cpu.max": "800000 100000",
        },
    )
    assert cpu_quota(tmp_path) == 2.5


def test_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


def test_a_quota_makes_cores_fewer() -> None:
    cores = [Core(0, 0, (i,)) for i in range(8)]
    assert core_count(cores, None) == 8
    assert core_count(cores, 2.5) == 2
    assert core_count(cores, 0.5) == 1


def test_a_parent_has_our_cpus_unless_someone_bound_us() -> None:
    assert parent_cpus() == frozenset(os.sched_getaffinity(os.getppid()))


def test_binding_leaves_the_cores_that_were_given() -> None:
    before = os.sched_getaffinity(0)
    core = read_cores(before)[-1]
    try:
        bind([core])
        assert os.sched_getaffinity(0) == set(core.cpus)
    finally:
        os.sched_setaffinity(0, before)


def test_lists_of_cpus() -> None:
    assert parse_list("0-2,5, 7-7\n") == {0, 1, 2, 5, 7}
    assert parse_list("") == set()
