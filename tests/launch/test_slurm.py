"""Ranks read from Slurm's variables, as Slurm sets and hands them on; no Slurm is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import cg
from cg.launch.environment.config import Config
from cg.launch.environment.detect import HYDRA, SLURM, Launch, detect
from cg.launch.job.slurm import check_srun, for_daemons, is_elsewhere, requeues
from cg.launch.world import world as worlds
from cg.launch.world.waiting import WorldError

PACKAGES = str(Path(cg.__file__).absolute().parent.parent)

TASK = {
    "SLURM_JOB_ID": "18",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_CPU_BIND_LIST": "0x1",
}
"""A task that srun has started."""
FIRST = TASK | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1,2"}
"""The first task of that step, such as the shell of an interactive one."""
BATCH = {
    "SLURM_JOB_ID": "19",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_NTASKS": "8",
}
"""The variables of a batch script itself; it inherits the rest from where it was submitted."""
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "11", "PMI_JOBID": "18.0"}
PMIX = {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.18.0"}
OF_HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        (TASK, Launch(SLURM, "SLURM_PROCID", 3, 4, 0, 1)),
        (TASK | PMI2, Launch(SLURM, "PMI_RANK", 3, 4, 0, 1, pmi_socket=11)),
        (TASK | PMIX, Launch(SLURM, "SLURM_PROCID", 3, 4, 0, 1)),
        (TASK | PMI2 | OF_HYDRA, Launch(HYDRA, "PMI_RANK", 1, 2, 1, 2, pmi_socket=9)),
        (BATCH | OF_HYDRA, Launch(HYDRA, "PMI_RANK", 1, 2, 1, 2, pmi_socket=9)),
        (
            BATCH | {"PMIX_RANK": "2", "PMIX_NAMESPACE": "prterun-n1-17@1"},
            Launch("PMIx", "PMIX_RANK", 2, None, 0, None),
        ),
    ],
    ids=["srun", "srun-pmi2", "srun-pmix", "mpirun-in-a-step", "mpirun-in-a-batch", "prterun"],
)
def test_a_rank_in_a_job_of_slurm(environ: dict[str, str], launch: Launch) -> None:
    assert detect(environ) == launch


@pytest.mark.parametrize(
    "environ",
    [BATCH, FIRST | BATCH, FIRST | PMI2 | BATCH, FIRST | PMIX | BATCH],
    ids=["from-a-login", "from-a-step", "from-a-pmi2-step", "from-a-pmix-step"],
)
def test_a_batch_script_is_no_rank(environ: dict[str, str]) -> None:
    assert detect(environ) is None


@pytest.mark.parametrize("environ", [FIRST, FIRST | PMI2, FIRST | PMIX])
def test_what_is_typed_into_a_steps_shell_is_no_rank(environ: dict[str, str]) -> None:
    assert detect(environ, typed=True) is None
    assert detect(environ | OF_HYDRA, typed=True) is not None


A_TASK = """
import os, signal, subprocess, sys

os.environ["SLURM_TASK_PID"] = str(os.getpid())
IMPORT = "import os; from cg.launch.environment.detect import is_typed"
report = f"{IMPORT}; print(is_typed(os.environ), flush=True)"


def foreground():
    os.setpgrp()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, os.getpid())


def start(prepare):
    subprocess.run([sys.executable, "-c", report], check=True, preexec_fn=prepare)


start(None)
start(os.setpgrp)
if os.isatty(0):
    start(foreground)
"""
"""Starts a process as a script does, as `timeout` in a script does, and as a shell does."""

IN_TERMINAL = "import pty, sys; sys.exit(pty.spawn([sys.executable, '-c', sys.argv[1]]))"


def run(*arguments: str) -> str:
    """Run Python away from any terminal; what it prints."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": PACKAGES},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def test_a_shell_gives_the_terminal_to_what_is_typed() -> None:
    assert run("-c", IN_TERMINAL, A_TASK).split() == ["False", "False", "True"]
    assert run("-c", A_TASK).split() == ["False", "False"]


def test_a_rank_that_srun_leaves_alone_says_which_srun_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finalized: list[bool] = []
    alone = SimpleNamespace(
        COMM_WORLD=SimpleNamespace(size=1),
        Get_library_version=lambda: "MPICH Version: 5.0.2",
        Is_initialized=lambda: True,
        Finalize=lambda: finalized.append(True),
    )
    monkeypatch.setattr(worlds, "_load", lambda launch: alone)
    with pytest.raises(WorldError, match=r"Slurm started .* has size 1: .*srun --mpi=pmi2 for MP"):
        worlds.start(Config(launch=detect(TASK)))
    assert finalized == [True]  # or its shared memory stays


def test_ranks_may_be_elsewhere_than_the_launcher() -> None:
    assert not is_elsewhere({})
    assert not is_elsewhere(BATCH)
    assert is_elsewhere(BATCH | {"SLURM_JOB_NUM_NODES": "2"})
    assert is_elsewhere({"SLURM_JOB_ID": "20", "SLURM_JOB_NUM_NODES": "1"})  # salloc's shell


def test_requeues_are_counted_in_jobs_of_slurm_alone() -> None:
    assert requeues(BATCH) == 0
    assert requeues(BATCH | {"SLURM_RESTART_COUNT": "2"}) == 2
    assert requeues(BATCH | {"SLURM_RESTART_COUNT": "many"}) == 0
    assert requeues({"SLURM_RESTART_COUNT": "2"}) == 0


def test_a_launcher_in_a_steps_shell_shares_the_steps_cores() -> None:
    assert for_daemons(BATCH) == BATCH
    given = for_daemons(FIRST)
    assert given["SLURM_OVERLAP"] == "1"
    assert not [name for name in given if name.startswith("SLURM_CPU_BIND")]
    assert for_daemons(FIRST | {"SLURM_OVERLAP": "0"})["SLURM_OVERLAP"] == "0"


@pytest.mark.parametrize(("nodes", "capped"), [("1", True), ("2", False)])
def test_threads_are_left_to_ranks_that_may_be_elsewhere(
    tmp_path: Path, nodes: str, capped: bool
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho HYDRA OMP=$OMP_NUM_THREADS.\n")
    mpirun.chmod(0o755)
    (tmp_path / "srun").touch(mode=0o755)
    inherited = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "cg.launch", "-n", "2", "--mpirun", mpirun, sys.executable],
        env={
            **inherited,
            **BATCH,
            "SLURM_JOB_NUM_NODES": nodes,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": PACKAGES,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ("OMP=." not in done.stdout) == capped


def test_a_job_without_srun_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    environ = {**os.environ, "SLURM_JOB_ID": "19", "PATH": str(tmp_path)}
    line = [sys.executable, "-m", "cg.launch", "-n", "2", __file__]
    ended = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "no srun on PATH" in ended.stderr
    (tmp_path / "srun").touch(mode=0o755)
    check_srun(environ)
    check_srun({"PATH": ""})
