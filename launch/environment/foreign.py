"""Detect launchers that start several processes without MPI, such as torchrun.

cg does not join their processes: each would be alone, and run the whole program by itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .ancestors import inheritors, runs_python


@dataclass(frozen=True)
class Foreign:
    """The number of this process among several that a launcher without MPI has started."""

    launcher: str
    """The launcher, for messages."""
    rank: int
    size: int
    local_size: int | None
    """The number of the processes on this machine; None if the launcher does not say."""
    variables: Mapping[str, str]
    """Variables that differ between the processes, or that their launcher does not have."""


@dataclass(frozen=True)
class _ForeignVariables:
    """The variables of one kind of launcher.

    Attributes:
        rank: names of variables; the first that is set holds the number of the process.
        sign: the beginning of names of variables that no other launcher sets; "" fits any.
    """

    launcher: str
    sign: str
    rank: tuple[str, ...]
    size: str
    local_size: str


_TORCH = (("RANK", "LOCAL_RANK"), "WORLD_SIZE", "LOCAL_WORLD_SIZE")

_SOURCES = (
    _ForeignVariables("accelerate launch", "ACCELERATE_", *_TORCH),
    _ForeignVariables("torchrun", "TORCHELASTIC_RUN_ID", *_TORCH),
    _ForeignVariables("deepspeed", "CROSS_SIZE", ("RANK",), "WORLD_SIZE", "LOCAL_SIZE"),
    _ForeignVariables(
        "Horovod", "HOROVOD_RANK", ("HOROVOD_RANK",), "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"
    ),
    _ForeignVariables("a launcher of torch.distributed", "", *_TORCH),
)

_TELLING = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK")


def detect(environ: Mapping[str, str]) -> Foreign | None:
    """Read the variables of a launcher without MPI; None without one, or if it started one process.

    Values that cannot number one process among several are not taken for a launcher's.
    """
    for source in _SOURCES:
        if source.sign and not any(name.startswith(source.sign) for name in environ):
            continue
        numbers = [name for name in source.rank if environ.get(name, "").isdecimal()]
        size = environ.get(source.size, "")
        if not (numbers and size.isdecimal() and int(environ[numbers[0]]) < int(size) > 1):
            continue
        local = environ.get(source.local_size, "")
        telling = [numbers[0], source.size, *(name for name in _TELLING if name in environ)]
        return Foreign(
            launcher=source.launcher,
            rank=int(environ[numbers[0]]),
            size=int(size),
            local_size=int(local) if local.isdecimal() else None,
            variables={name: environ[name] for name in dict.fromkeys(telling)},
        )
    return None


def is_handed_on(foreign: Foreign) -> bool:
    """True if the launcher has started a Python program that started this process.

    Shells and other wrappers in between count as part of what the launcher starts.
    """
    between, _ = inheritors(foreign.variables)
    return any(map(runs_python, between))


def described(foreign: Foreign) -> str:
    """Say in words what the launcher did."""
    number, size = list(foreign.variables)[:2]
    return (
        f"{foreign.launcher} started this process as number {foreign.rank} of {foreign.size} "
        f"({number}, {size})"
    )


def command(foreign: Foreign, program: Sequence[str]) -> str:
    """Write the command line that starts the same ranks by MPI.

    Args:
        foreign: the launch without MPI.
        program: the program and its arguments, as `sys.argv` has them.
    """
    script = list(program) if program and program[0] not in ("", "-c", "-m") else ["train.py"]
    hosts = []
    if foreign.local_size is not None and foreign.local_size < foreign.size:
        hosts = ["--hosts", f"NAME:{foreign.local_size},..."]
    ranks = ["python", "-m", "cg.launch", "-n", str(foreign.size)]
    return " ".join([*ranks, *hosts, shlex.join(script)])
