"""How a process learns, from its launcher's variables, which rank of how many it is.

Every MPI launcher tells a process its rank before MPI is initialised. We need it that early to
cap threads before torch is imported, and to know whether MPI is wanted at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

OPEN_MPI = "Open MPI"
HYDRA = "Hydra (MPICH or Intel MPI)"
SLURM = "Slurm"


@dataclass(frozen=True)
class Launch:
    """What an MPI launcher told this process. None where it did not say."""

    launcher: str
    """The kind of launcher, for messages."""
    variable: str
    """The variable that gave the rank."""
    rank: int
    size: int | None = None
    local_rank: int | None = None
    """The rank's index among those on its machine."""
    local_size: int | None = None
    """How many ranks are on its machine."""
    pmi_socket: int | None = None
    """The file descriptor that leads to a Hydra launcher."""


@dataclass(frozen=True)
class _Source:
    """The variables of one kind of launcher; one of the names in each is set."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# Slurm sets SLURM_PROCID in batch scripts too, which it runs once; the step's number of tasks is
# set by srun alone. PMIx itself gives a rank and no size.
_SOURCES = (
    _Source(
        OPEN_MPI,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Source(HYDRA, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Source(SLURM, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    _Source("PMIx", "PMIX_RANK", "", "", ""),
)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """What the launcher said in `environ`; None where there was no MPI launcher.

    Raises:
        ValueError: a launcher's variable does not hold a whole number.
    """
    for source in _SOURCES:
        rank = _number(environ, source.rank)
        size = _number(environ, source.size)
        if rank is None or (source.launcher == SLURM and size is None):
            continue
        hydra = source.launcher == HYDRA and "MPI_LOCALRANKID" in environ
        local_rank = _number(environ, source.local_rank)
        if local_rank is None:
            local_rank = _number(environ, "SLURM_LOCALID")
        local_size = _number(environ, source.local_size)
        return Launch(
            launcher=source.launcher,
            variable=source.rank,
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=_slurm_local_size(environ) if local_size is None else local_size,
            pmi_socket=_number(environ, "PMI_FD") if hydra else None,
        )
    return None


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
