"""Adapt `cg.launch` to a job of Slurm, whose srun starts the daemons of MPI's launchers."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping

from .launcher import LaunchError


def is_elsewhere(environ: Mapping[str, str]) -> bool:
    """True if ranks may run on other machines than this process.

    A job of several machines has ranks on all of them, and the shell of `salloc` may be on a
    machine that is not in the job.
    """
    if "SLURM_JOB_ID" not in environ:
        return False
    return environ.get("SLURM_JOB_NUM_NODES", "1") != "1" or "SLURM_NODEID" not in environ


def requeues(environ: Mapping[str, str]) -> int:
    """How often Slurm has put this job into its queue again, as after a node has failed."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if "SLURM_JOB_ID" in environ and re.fullmatch(r"[0-9]{1,9}", text) else 0


def check_srun(environ: Mapping[str, str]) -> None:
    """Refuse a job of Slurm without its programs, such as in a container that has its variables.

    MPICH's launcher would not find srun, and wait for ever.

    Raises:
        LaunchError: there is no srun.
    """
    paths = environ.get("PATH", os.defpath)
    if "SLURM_JOB_ID" in environ and shutil.which("srun", path=paths) is None:
        raise LaunchError(
            "this is a job of Slurm (SLURM_JOB_ID), and there is no srun on PATH, by which MPI's "
            "launcher starts the ranks: add srun's folder to PATH; or, on one machine, leave "
            "Slurm out of it by `env -u SLURM_JOB_ID`"
        )


def for_daemons(environ: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of the launcher from that of this process.

    In the shell of a step (`srun --pty bash`), srun would wait for ever for the cores of the
    shell's own step. It would also bind the daemons, and so all ranks, to the core of the shell's
    task.
    """
    if "SLURM_STEP_ID" not in environ:
        return dict(environ)
    variables = {
        name: value for name, value in environ.items() if not name.startswith("SLURM_CPU_BIND")
    }
    return {"SLURM_OVERLAP": "1", **variables}
