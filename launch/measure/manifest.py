"""Write the manifest of a profile: command, versions, machine, steps and clocks."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...backends.base import World
from ..environment.config import environment
from ..world.clocks import ClockReading
from ..world.single_rank_world import SingleRankWorld
from ..world.world import mpi_version

PACKAGES = ("cg", "numpy", "mpi4py")


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step that has run.

    Attributes:
        step: number of the compiled step in its program.
        name: of the step's function.
        plan: hash of its scheduled module; equal plans are equal programs.
        executions: how many were recorded.
    """

    step: int
    name: str
    plan: str
    executions: int


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A process, which plays one rank, or in a virtual world all of them.

    Attributes:
        host, pid: the machine and the number of the process.
        cores: that it may use.
        threads: of torch.
        device: name of the current accelerator; None without one.
        recorded: instructions in the trace.
        left_out: instructions for which the limit had no room.
    """

    host: str
    pid: int
    cores: int
    threads: int
    device: str | None
    recorded: int
    left_out: int


def facts_of_process(recorded: int, left_out: int) -> ProcessFacts:
    """The facts of this process."""
    return ProcessFacts(
        platform.node(),
        os.getpid(),
        len(os.sched_getaffinity(0)),
        torch.get_num_threads(),
        torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        recorded,
        left_out,
    )


def manifest(
    world: World,
    trace: Path,
    steps: Sequence[StepFacts],
    processes: Sequence[ProcessFacts],
    clocks: tuple[Sequence[ClockReading], Sequence[ClockReading]],
    seconds: float,
) -> dict[str, Any]:
    """The manifest of a profile, as an object of JSON.

    Args:
        world: all ranks.
        trace: the trace file, beside the manifest.
        steps: the steps that have run.
        processes: those that were recorded, by rank.
        clocks: readings of all ranks' clocks, from before and after.
        seconds: the duration of the profile.
    """
    return {
        "trace": trace.name,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 6),
        "command": sys.orig_argv,
        "folder": str(Path.cwd()),
        "options": {name: value for name, value in environment().items() if name.startswith("CG_")},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,  # the metadata may leave out the kind of device
            **{name: _version(name) for name in PACKAGES},
            "cuda": torch.version.cuda,
            "mpi": _mpi(),
        },
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
        },
        "world": {
            "size": world.size,
            "kind": _kind(world),
            "machines": list(world.nodes),
        },
        "steps": [asdict(step) for step in steps],
        "processes": [asdict(process) for process in processes],
        "clocks": {
            "unit": "microseconds, against the clock of rank 0",
            "start": [_reading(reading) for reading in clocks[0]],
            "end": [_reading(reading) for reading in clocks[1]],
        },
    }


def _reading(reading: ClockReading) -> dict[str, float]:
    return {"offset": reading.offset / 1e3, "uncertainty": reading.uncertainty / 1e3}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _mpi() -> str | None:
    """The MPI library, if the program has loaded one."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return None if mpi is None else mpi_version(mpi)


def _processor() -> str:
    """The name of the processor; Linux keeps it in a file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _kind(world: World) -> str:
    """How the ranks of a world are played, in a word."""
    if world.is_virtual:
        return "virtual"
    return "single" if isinstance(world, SingleRankWorld) else "mpi"
