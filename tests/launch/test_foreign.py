"""Launchers without MPI: who is recognised, who is refused, and who goes on; no launcher runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.environment.ancestors import above, inheritors, runs_python
from cg.launch.environment.config import Config
from cg.launch.environment.detect import HYDRA, Launch
from cg.launch.environment.foreign import Foreign, command, detect
from cg.launch.world import world as worlds
from cg.launch.world.waiting import WorldError

PACKAGES = str(Path(cg.__file__).absolute().parent.parent)

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
ELASTIC = TORCH | {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost"}
OF_HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (ELASTIC, "torchrun"),
        (ELASTIC | {"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate launch"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "4", "CROSS_SIZE": "1"},
            "deepspeed",
        ),
        (
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "4"},
            "Horovod",
        ),
        (TORCH, "a launcher of torch.distributed"),
    ],
)
def test_a_launcher_of_several_processes_is_recognised(
    environ: dict[str, str], launcher: str
) -> None:
    found = detect(environ)
    assert found is not None
    assert (found.launcher, found.rank, found.size, found.local_size) == (launcher, 1, 4, 4)
    with pytest.raises(WorldError) as caught:
        worlds.start(Config.from_environ(environ))
    message = str(caught.value)
    assert message.startswith(f"{launcher} started this process as number 1 of 4 (")
    assert "Let MPI start the ranks: python -m cg.launch -n 4 " in message
    assert "CG_RANKS=1" in message


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
        {"WORLD_SIZE": "8"},
        {"RANK": "3"},
        {"RANK": "", "WORLD_SIZE": "2"},
        {"RANK": "8", "WORLD_SIZE": "8"},
        {"RANK": "senior", "WORLD_SIZE": "large"},
        {"ACCELERATE_MIXED_PRECISION": "bf16"},
        {"HOROVOD_SIZE": "4"},
    ],
)
def test_variables_that_tell_of_no_other_process_mean_nothing(environ: dict[str, str]) -> None:
    settings = Config.from_environ(environ)
    assert settings.foreign is None
    assert isinstance(worlds.start(settings), VirtualWorld)


def test_a_launcher_inside_a_single_mpi_process_is_refused() -> None:
    single = OF_HYDRA | {"PMI_RANK": "0", "PMI_SIZE": "1"}
    with pytest.raises(WorldError, match="torchrun started this process as number 1 of 4"):
        worlds.start(Config.from_environ(ELASTIC | single))


@pytest.mark.parametrize("agreeing", [TORCH, TORCH | {"WORLD_SIZE": "2", "RANK": "0"}])
def test_the_ranks_of_mpi_may_have_the_variables_of_torch(
    agreeing: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `torch.distributed` wants them: MPI is asked for the world, and for nothing else."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    settings = Config.from_environ(OF_HYDRA | agreeing)
    assert settings.launch == Launch(HYDRA, "PMI_RANK", 1, 4, 1, 4)
    with pytest.raises(WorldError, match="MPI cannot be loaded"):
        worlds.start(settings)


def test_a_process_that_says_so_is_alone(recwarn: pytest.WarningsRecorder) -> None:
    world = worlds.start(Config.from_environ(ELASTIC | {"CG_RANKS": "1"}))
    assert world.size == 1
    assert not recwarn.list


def test_copies_that_play_all_ranks_each_are_told_so() -> None:
    with pytest.warns(UserWarning, match=r"plays all 3 ranks of CG_RANKS=3.*the program runs 4"):
        assert worlds.start(Config.from_environ(ELASTIC | {"CG_RANKS": "3"})).size == 3


def test_the_command_is_that_of_the_program() -> None:
    here = Foreign("torchrun", 0, 4, 4, {"RANK": "0", "WORLD_SIZE": "4"})
    there = Foreign("torchrun", 0, 8, 4, {"RANK": "0", "WORLD_SIZE": "8"})
    line = "python -m cg.launch -n 4 train.py --name 'a b'"
    assert command(here, ["train.py", "--name", "a b"]) == line
    assert command(here, ["-c"]) == "python -m cg.launch -n 4 train.py"
    assert command(there, ["x.py"]) == "python -m cg.launch -n 8 --hosts NAME:4,... x.py"


REPORT = "import cg; print(cg.world_size())"
THROUGH_PYTHON = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {REPORT!r}])"


@pytest.mark.parametrize(
    ("command_line", "refused"),
    [
        ([sys.executable, "-c", REPORT], True),
        (["sh", "-c", f'{sys.executable} -c "{REPORT}"; exit $?'], True),
        ([sys.executable, "-c", THROUGH_PYTHON], False),
    ],
    ids=["itself", "by-a-shell", "by-python"],
)
def test_what_a_process_of_the_launcher_starts_is_not_one(
    command_line: list[str], refused: bool
) -> None:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("CG_")}
    done = subprocess.run(
        command_line,
        env={**inherited, **ELASTIC, "PYTHONPATH": PACKAGES, "CG_CACHE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ("" if refused else "1\n"), done.stderr
    assert ("WorldError" in done.stderr) is refused
    assert "torchrun started this process as number 1 of 4" in done.stderr
    assert "CG_RANKS=1" in done.stderr


def test_ancestors_come_from_the_process_table(tmp_path: Path) -> None:
    ours = os.getpid()
    for process, parent, environ in (
        (ours, 30, b"A=1\0B=2\0"),
        (30, 20, b"X=0\0A=1\0B=2\0"),
        (20, 10, b"A=1\0B=3\0"),
        (10, 1, b""),
        (1, 0, b""),
    ):
        folder = tmp_path / f"proc/{process}"
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{process} (odd ) name) S {parent} 0")
        (folder / "environ").write_bytes(environ)
    (tmp_path / "proc/30/exe").symlink_to("/usr/bin/python3.11")
    assert list(above(ours, tmp_path)) == [30, 20, 10, 1]
    assert inheritors({"A": "1", "B": "2"}, tmp_path) == ([30], 20)
    assert inheritors({"A": "1"}, tmp_path) == ([30, 20], 10)
    assert inheritors({"C": "1"}, tmp_path) == ([], 30)
    assert inheritors({"A": "1"}, tmp_path / "none") == ([], 0)
    assert runs_python(30, tmp_path)
    assert not runs_python(20, tmp_path)
