"""Read a process's rank and the number of ranks from its launcher's variables.

Every MPI launcher tells a process its rank before MPI is initialised. The rank is needed that
early to cap threads before torch is imported, and to know if MPI is wanted at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

OPEN_MPI = "Open MPI"
HYDRA = "Hydra (MPICH or Intel MPI)"
SLURM = "Slurm"


@dataclass(frozen=True)
class Launch:
    """The facts that an MPI launcher told this process; None in a field that it did not tell."""

    launcher: str
    """The kind of launcher, for messages."""
    variable: str
    """The variable that gave the rank."""
    rank: int
    size: int | None = None
    local_rank: int | None = None
    """The rank's index among those on its machine."""
    local_size: int | None = None
    """The number of ranks on its machine."""
    pmi_socket: int | None = None
    """The file descriptor that leads to a launcher that speaks PMI-1: Hydra, or Slurm's pmi2."""


@dataclass(frozen=True)
class _LauncherVariables:
    """The names of the variables of one kind of launcher; empty where it sets none."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_SOURCES = (
    _LauncherVariables(
        OPEN_MPI,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _LauncherVariables(HYDRA, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _LauncherVariables(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _LauncherVariables("PALS", "PALS_RANKID", "", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)
_SLURM_PMI = _LauncherVariables(SLURM, "PMI_RANK", "PMI_SIZE", "SLURM_LOCALID", "")
_SLURM = _LauncherVariables(SLURM, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
_PMIX = _LauncherVariables("PMIx", "PMIX_RANK", "", "", "")
"""PMIx itself gives a rank and no size, as does PALS."""


def detect(environ: Mapping[str, str], typed: bool = False) -> Launch | None:
    """Read what the launcher said in `environ`; None if there was no MPI launcher.

    Args:
        environ: the variables of this process.
        typed: the result of `is_typed`.

    Raises:
        ValueError: a launcher's variable does not hold a whole number.
    """
    for source in _sources(environ, typed):
        rank = _number(environ, source.rank)
        if rank is None:
            continue
        local_rank = _number(environ, source.local_rank)
        if local_rank is None:
            local_rank = _number(environ, "SLURM_LOCALID")
        local_size = _number(environ, source.local_size)
        speaks_pmi1 = source.rank == "PMI_RANK" and source.local_rank in environ
        return Launch(
            launcher=source.launcher,
            variable=source.rank,
            rank=rank,
            size=_number(environ, source.size),
            local_rank=local_rank,
            local_size=_slurm_local_size(environ) if local_size is None else local_size,
            pmi_socket=_number(environ, "PMI_FD") if speaks_pmi1 else None,
        )
    return None


def is_typed(environ: Mapping[str, str]) -> bool:
    """True if this process was typed into a shell that is a task of Slurm: `srun --pty bash`.

    Such a process has the shell's variables, which name a rank, but it is no rank. Only the first
    of several tasks has a terminal, and the shells of the others have ended.

    A shell with a terminal gives each command a process group of its own, which gets the terminal.
    Processes that Slurm starts, or that a script starts which is the task, leave the terminal to
    the task.
    """
    task = environ.get("SLURM_TASK_PID", "")
    if not re.fullmatch(r"[0-9]+", task):
        return False
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp() != os.getpgid(int(task))
        finally:
            os.close(terminal)
    except OSError:
        return False


def _sources(environ: Mapping[str, str], typed: bool) -> list[_LauncherVariables]:
    """The launchers whose variables describe this process.

    Processes that a task of Slurm starts inherit its variables, such as a batch job that is
    submitted from an interactive one. The variables count only in the step that they describe.
    """
    sources = list(_SOURCES)
    if step := _step_of_pmi(environ):
        sources = [source for source in sources if source.launcher != HYDRA]
        if not typed and step == f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}":
            sources.append(_SLURM_PMI)
    if not typed and _in_step(environ):
        sources.append(_SLURM)
    if not environ.get("PMIX_NAMESPACE", "").startswith("slurm."):
        sources.append(_PMIX)
    return sources


def _step_of_pmi(environ: Mapping[str, str]) -> str:
    """The step, as in `7.0`, to whose tasks Slurm (`--mpi=pmi2`) has given PMI's variables.

    Empty where they are Hydra's, which also tells each rank its place on its machine.
    """
    step = environ.get("PMI_JOBID", "")
    by_slurm = "SLURM_JOB_ID" in environ and "MPI_LOCALRANKID" not in environ
    return step if by_slurm and re.fullmatch(r"[0-9]+\.[0-9]+", step) else ""


def _in_step(environ: Mapping[str, str]) -> bool:
    """True if srun started this process, or the process that started it.

    Slurm sets SLURM_PROCID in batch scripts too, which it runs once; the step's number of tasks is
    set by srun alone. A script that was submitted in a step has inherited that number; but it
    is a task by itself, numbered 0, where the step had several on a machine.
    """
    inherited = environ.get("SLURM_GTIDS") == "0" and (_slurm_local_size(environ) or 1) > 1
    return bool(environ.get("SLURM_STEP_NUM_TASKS")) and not inherited


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{name}={text!r}: a launcher sets it to a whole number; unset it")
    return int(text)


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Tasks on this node, of a list such as `4(x2),3`: two nodes with 4 tasks, then one with 3."""
    node = _number(environ, "SLURM_NODEID")
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if node is None or not text:
        return None
    sizes: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", item)
        if match is None:
            return None
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes[node] if node < len(sizes) else None
