"""The world of a process, and refusals to start one; MPI's own is in `test_jobs.py`."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.environment.config import Config
from cg.launch.environment.detect import HYDRA, OPEN_MPI, Launch, detect
from cg.launch.job.job import descendants
from cg.launch.world import shared_memory
from cg.launch.world import world as worlds
from cg.launch.world.waiting import WorldError, user_line, wait_until


@cg.actor
class Empty:
    """An actor of no use."""


HYDRA_RANK = Launch(HYDRA, "PMI_RANK", 3, 8, 3, 8)
OPEN_MPI_RANK = Launch(OPEN_MPI, "OMPI_COMM_WORLD_RANK", 3, 8, 3, 8)


def test_a_worker_of_a_rank_is_no_rank() -> None:
    told = (
        "import multiprocessing as m, sys\n"
        "def say(): print(sys.orig_argv)\n"
        "if __name__ == '__main__': m.get_context({!r}).Process(target=say).start()"
    )
    for method in ("spawn", "forkserver"):
        shown = _orig_argv(told.format(method))
        with pytest.raises(WorldError, match=r"from rank 3 of a job .* if __name__ == '__main__'"):
            worlds.check_process(HYDRA_RANK, shown)
    worlds.check_process(HYDRA_RANK, _orig_argv(told.format("fork")))


def _orig_argv(program: str) -> list[str]:
    """The report of a process that the program starts on how it was started."""
    with TemporaryDirectory() as folder:
        script = Path(folder) / "program.py"
        script.write_text(program)
        command = [sys.executable, str(script)]
        return ast.literal_eval(subprocess.check_output(command, text=True, timeout=60))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (Config(), 1),
        (Config(ranks=4), 4),
        (Config(launch=Launch(HYDRA, "PMI_RANK", 0, 1)), 1),
        (Config(ranks=3, launch=Launch(HYDRA, "PMI_RANK", 0, 1)), 3),
    ],
)
def test_without_other_processes_the_world_is_virtual(config: Config, size: int) -> None:
    world = worlds.start(config)
    assert isinstance(world, VirtualWorld)
    assert world.size == size


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        (
            {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
            Launch("MVAPICH", "MV2_COMM_WORLD_RANK", 1, 2),
        ),
        (
            {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"},
            Launch("PALS", "PALS_RANKID", 3, None, 1, 2),
        ),
    ],
)
def test_launchers_of_other_mpis_are_recognised(environ: dict[str, str], launch: Launch) -> None:
    assert detect(environ) == launch
    with pytest.raises(WorldError, match=rf"{launch.launcher} started this process as rank"):
        worlds.check_size(launch, 1, "MPICH Version: 5.0.2")


def test_the_world_starts_once_and_can_be_another_for_a_while() -> None:
    other = VirtualWorld(5)
    with worlds.use_world(other):
        assert worlds.world() is other
        assert (worlds.rank(), worlds.world_size()) == (0, 5)
    assert worlds.world() is worlds.world() is not other


@pytest.mark.parametrize(
    ("launch", "library", "started"),
    [
        (OPEN_MPI_RANK, "MPICH Version: 5.0.2, /v/libmpi.so.12", "Open MPI started this process"),
        (HYDRA_RANK, "Open MPI v5.0.11, /v/libmpi.so.40", "Hydra (MPICH or Intel MPI) started"),
    ],
)
def test_the_launcher_of_another_mpi_is_refused(launch: Launch, library: str, started: str) -> None:
    with pytest.raises(WorldError) as caught:
        worlds.check_library(launch, library)
    message = str(caught.value)
    assert message.startswith(started)
    assert "as rank 3 of 8" in message
    assert library in message
    assert "The launcher belongs to another MPI. Use the mpirun of the MPI" in message


def test_the_launchers_own_mpi_is_accepted() -> None:
    worlds.check_library(HYDRA_RANK, "MPICH Version: 5.0.2")
    worlds.check_library(OPEN_MPI_RANK, "Open MPI v5.0.11")
    worlds.check_library(Launch("Slurm", "SLURM_PROCID", 0, 2), "MPICH Version: 5.0.2")


@pytest.mark.parametrize(
    "launch", [HYDRA_RANK, Launch("PMIx", "PMIX_RANK", 3)], ids=["size-known", "size-unknown"]
)
def test_ranks_that_are_alone_are_refused(launch: Launch) -> None:
    with pytest.raises(WorldError, match=r"the world has size 1: MPICH.*belongs to another MPI"):
        worlds.check_size(launch, 1, "MPICH Version: 5.0.2")


def test_a_world_of_the_right_size_is_accepted() -> None:
    worlds.check_size(HYDRA_RANK, 8, "MPICH")
    worlds.check_size(Launch("PMIx", "PMIX_RANK", 3), 8, "MPICH")
    worlds.check_ranks(HYDRA_RANK, 8, 8)
    worlds.check_ranks(HYDRA_RANK, None, 4)


def test_ranks_that_are_asked_for_after_the_start_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worlds, "_current", None)
    monkeypatch.setattr(worlds, "_began", None)
    monkeypatch.setenv("CG_RANKS", "3")
    assert cg.world_size() == 3
    monkeypatch.delenv("CG_RANKS")
    assert cg.world_size() == 3
    monkeypatch.setenv("CG_RANKS", "4")
    for use in (cg.world_size, cg.rank, cg.barrier, lambda: Empty.on(0)()):
        with pytest.raises(WorldError, match="CG_RANKS=4 has been set after the world"):
            use()
    with pytest.raises(WorldError, match="had begun, with 3 ranks, and does not count any more"):
        cg.trace(lambda x: x).lower(torch.ones(2))
    with worlds.use_world(VirtualWorld(2)):
        assert cg.world_size() == 2
    monkeypatch.setenv("CG_RANKS", "many")
    with pytest.raises(cg.ConfigError, match="CG_RANKS='many'"):
        cg.world_size()
    monkeypatch.setenv("CG_RANKS", "3")
    assert cg.world_size() == 3


def test_devices_that_are_asked_for_after_the_start_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = VirtualWorld(2)
    monkeypatch.setattr(worlds, "_current", ranks)
    monkeypatch.setattr(worlds, "_began", (ranks, Config()))
    device = Config.from_environ({"CG_DEVICE": "cuda"})
    worlds.check_late_settings(device)  # a virtual world has no devices
    monkeypatch.setattr(VirtualWorld, "is_virtual", False)
    worlds.check_late_settings(Config.from_environ({"CG_DEVICE": "auto", "CG_BIND_DEVICES": "1"}))
    with pytest.raises(WorldError, match="CG_DEVICE has been changed after the world had begun"):
        worlds.check_late_settings(device)


def test_virtual_ranks_beside_a_launchers_are_refused() -> None:
    with pytest.raises(WorldError, match=r"CG_RANKS=4 asks for ranks in one process.*started 8"):
        worlds.check_ranks(HYDRA_RANK, 8, 4)


def test_mpi4py_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(WorldError, match=r"MPI cannot be loaded.*\n.*pip install mpi4py mpich"):
        worlds.start(Config(launch=HYDRA_RANK))


def test_waiting_polls_until_it_is_done() -> None:
    calls = iter(range(3000))
    assert wait_until(lambda: next(calls) > 1200, None, lambda waited: None)


def test_waiting_ends_at_the_deadline_and_looks_around_meanwhile() -> None:
    glances: list[float] = []
    assert not wait_until(lambda: False, 0.3, glances.append)
    assert glances == sorted(glances)
    assert glances


def test_a_users_line_is_outside_the_package() -> None:
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+", user_line())


def test_descendants_come_from_the_process_table(tmp_path: Path) -> None:
    for process, (name, state, parent) in {
        2: ("sh", "S", 1),
        3: ("odd ) name (", "R", 2),
        4: ("gone", "Z", 2),
        5: ("python", "S", 3),
        6: ("other", "S", 1),
    }.items():
        path = tmp_path / f"proc/{process}/stat"
        path.parent.mkdir(parents=True)
        path.write_text(f"{process} ({name}) {state} {parent} 0 0")
    assert descendants(2, tmp_path) == [3, 5]
    assert descendants(1, tmp_path) == [2, 6, 3, 5]


def test_descendants_of_this_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in descendants(os.getpid())
        child.kill()


# -- the room in /dev/shm -------------------------------------------------------------------------

MIB = 1 << 20


def short_of(monkeypatch: pytest.MonkeyPatch, size: int, free: int, **options: object) -> str:
    """The report on a /dev/shm of so many MiB, for two ranks; nothing if there is room."""
    status = os.statvfs_result((4096, 4096, size * 256, free * 256, free * 256, 0, 0, 0, 0, 255))
    monkeypatch.setattr(shared_memory.os, "statvfs", lambda _: status)
    arguments: dict[str, object] = {"ranks": 2, "environ": {}, "others_began": False, **options}
    return shared_memory.shortage(**arguments) or ""  # type: ignore[arg-type]


def test_a_small_shared_memory_is_refused_before_mpi_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for size in (1, 16):
        message = short_of(monkeypatch, size, size)
        assert f"/dev/shm has {size} MiB, of which {size}.0 MiB are free" in message
        assert "needs 26.5 MiB of shared memory there for the 2 ranks" in message
        assert "docker run --shm-size=1g, or --ipc=host" in message
        with pytest.raises(WorldError, match=rf"/dev/shm has {size} MiB, .* the 8 ranks of this"):
            worlds.check_shared_memory(HYDRA_RANK, "MPICH Version: 5.0.2")
    worlds.check_shared_memory(HYDRA_RANK, "Open MPI v5.0.8")
    assert not short_of(monkeypatch, 64, 64, ranks=9), "as containers of Docker have it"
    assert not short_of(monkeypatch, 0, 0), "a file system without a limit"
    assert "of which 20.0 MiB are free" in short_of(monkeypatch, 64, 20)


def test_what_other_ranks_have_taken_of_the_shared_memory_is_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not short_of(monkeypatch, 64, 22, ranks=8, others_began=True)
    assert short_of(monkeypatch, 64, 20, ranks=8, others_began=True)


@pytest.mark.parametrize(
    ("transports", "takes"),
    [("self,tcp", 4), ("^tcp,posix", 4), ("^tcp", 26.5), ("posix,self", 26.5), ("all", 26.5)],
)
def test_ranks_whose_ucx_makes_no_segments_need_less(transports: str, takes: float) -> None:
    assert shared_memory.bytes_needed(2, {"UCX_TLS": transports}) == takes * MIB


def test_a_file_system_that_cannot_be_seen_is_left_to_mpi(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    assert shared_memory.shortage(2, {}, others_began=False, folder=folder) is None
