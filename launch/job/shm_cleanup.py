"""Remove the shared memory that MPICH leaves behind when ranks die before MPI has started.

Once MPI has started, ranks unlink it themselves (`launch/world/world.py`).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def remove_unused(since: float, root: Path = Path("/")) -> list[Path]:
    """Remove MPICH's segments that were made since a time and that no process has mapped.

    Args:
        since: seconds since the epoch, when the job started.
        root: the directory that holds `dev/shm` and `proc`.

    Returns:
        The files that were removed.
    """
    removed: list[Path] = []
    segments = [path for path in (root / "dev/shm").glob("mpich_shm_*") if _made_since(path, since)]
    mapped = _mapped(root / "proc") if segments else ""
    for path in segments:
        if path.name not in mapped:
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _made_since(path: Path, since: float) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and status.st_ctime >= since


def _mapped(processes: Path) -> str:
    texts: list[str] = []
    for maps in processes.glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            texts.append(maps.read_text())
    return "".join(texts)
