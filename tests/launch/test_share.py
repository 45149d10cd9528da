"""Threads, cores and devices of a rank, as a process gets them when it starts."""

from __future__ import annotations

import io
import sys
import types

import pytest

from cg.launch.environment.config import THREAD_VARIABLES, Config
from cg.launch.environment.detect import Launch
from cg.launch.world import bootstrap, cores, devices
from cg.launch.world.cores import Core


class Effects:
    """The effects that a process would have had on itself."""

    def __init__(self) -> None:
        self.exported: dict[str, str] = {}
        self.bound: list[Core] = []
        self.torch_threads = 0


@pytest.fixture
def effects(monkeypatch: pytest.MonkeyPatch) -> Effects:
    """A machine of 8 CPUs in 4 cores, on which nothing really happens."""
    seen = Effects()
    machine = tuple(Core(0, 0, (i, i + 4)) for i in range(4))
    monkeypatch.setattr(cores, "export", seen.exported.update)
    monkeypatch.setattr(cores, "bind", seen.bound.extend)
    monkeypatch.setattr(cores, "parent_cpus", lambda: frozenset(range(8)))
    monkeypatch.setattr(cores, "allowed_cpus", lambda: frozenset(range(8)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    monkeypatch.setattr(
        cores,
        "read_cores",
        lambda cpus: tuple(core for core in machine if set(core.cpus) <= set(cpus)),
    )
    torch = types.SimpleNamespace(set_num_threads=lambda n: setattr(seen, "torch_threads", n))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return seen


def keep(config: Config, local_rank: int | None = 1, local_size: int | None = 2) -> None:
    launch = Launch("Open MPI", "OMPI_COMM_WORLD_RANK", 1, 2, local_rank, local_size)
    bootstrap.keep_to_share(config, launch)


def test_a_rank_gets_its_cores_and_as_many_threads(effects: Effects) -> None:
    keep(Config())
    assert [core.cpus for core in effects.bound] == [(2, 6), (3, 7)]
    assert effects.exported == dict.fromkeys(THREAD_VARIABLES, "2")
    assert effects.torch_threads == 2


def test_more_ranks_than_cores_get_a_thread_each_and_no_core(effects: Effects) -> None:
    keep(Config(), local_size=5)
    assert effects.bound == []
    assert effects.torch_threads == 1


def test_a_quota_leaves_fewer_threads(effects: Effects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: 2.0)
    keep(Config())
    assert effects.bound == []
    assert effects.torch_threads == 1


def test_each_can_be_switched_off(effects: Effects) -> None:
    keep(Config(affinity=False))
    assert effects.bound == []
    assert effects.torch_threads == 2
    effects.torch_threads = 0
    keep(Config(thread_cap=False))
    assert effects.bound
    assert effects.torch_threads == 0


def test_a_users_own_setting_stands(effects: Effects) -> None:
    keep(Config(preset_threads=frozenset({"OMP_NUM_THREADS"})))
    assert effects.exported == {}
    assert effects.torch_threads == 0
    keep(Config(preset_threads=frozenset({"MKL_NUM_THREADS"})))
    assert "MKL_NUM_THREADS" not in effects.exported
    assert effects.exported["OMP_NUM_THREADS"] == "2"


def test_what_the_launcher_bound_is_left_alone(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "allowed_cpus", lambda: frozenset({1, 5}))
    keep(Config())
    assert effects.bound == []
    assert effects.torch_threads == 1


def test_where_the_parents_cpus_are_unknown_nothing_is_bound(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "parent_cpus", lambda: None)
    keep(Config())
    assert effects.bound == []
    assert effects.torch_threads == 2


def test_where_the_number_of_neighbours_is_unknown_nothing_is_done(effects: Effects) -> None:
    keep(Config(), local_size=None)
    assert (effects.bound, effects.exported) == ([], {})


def test_threads_are_capped_before_torch_is_loaded(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    keep(Config())
    assert effects.exported["OMP_NUM_THREADS"] == "2"


def test_a_misspelt_variable_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "config", Config)
    monkeypatch.setattr(bootstrap, "environment", lambda: {"CG_TIMOUT": "3"})
    with pytest.warns(UserWarning, match="CG_TIMOUT is set, but there is no such setting"):
        assert bootstrap.prepare() == Config()


def test_a_rank_writes_each_line_at_once_and_whole() -> None:
    with io.TextIOWrapper(written := io.BytesIO()) as stream:
        bootstrap.write_whole_lines(stream)
        print("a", 1, end="", file=stream)
        assert written.getvalue() == b""
        print(" b", file=stream)
        assert written.getvalue() == b"a 1 b\n"
    with io.TextIOWrapper(written := io.BytesIO(), write_through=True) as stream:
        bootstrap.write_whole_lines(stream)  # as `python -u` has it
        print("a", end="", file=stream)
        assert written.getvalue() == b"a"
    bootstrap.write_whole_lines(None)  # as pythonw has it


class Machine:
    """Some accelerators."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.selected: list[int] = []

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device_index(self, device: int, /) -> None:
        self.selected.append(device)


@pytest.mark.parametrize(
    ("count", "local_rank", "index"), [(8, 3, 3), (1, 3, 0), (2, 3, 1), (0, 0, None)]
)
def test_a_rank_selects_the_device_of_its_local_rank(
    count: int, local_rank: int, index: int | None
) -> None:
    machine = Machine(count)
    assert devices.bind(machine, local_rank) == index
    assert machine.selected == ([] if index is None else [index])
