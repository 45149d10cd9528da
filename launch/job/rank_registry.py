"""Record the ranks that are in a job, so that its launcher sees which of them have not left it.

A rank that ends with code 0 in the middle of a job, as `os._exit(0)` does, looks to an MPI launcher
like one that has finished: it ends the others without a word, and the job counts as a success. So
`cg.launch` gives ranks a folder. Each has a file there while it is in the job.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RankRegistry:
    """The ranks in a job, as files in a folder; ranks on machines without it record nothing."""

    folder: Path

    def join(self, rank: int) -> None:
        """Record that the rank has joined the job."""
        with contextlib.suppress(OSError):
            (self.folder / str(rank)).touch(mode=0o600)

    def leave(self, rank: int) -> None:
        """Record that the rank has met the others at its program's end."""
        with contextlib.suppress(OSError):
            (self.folder / str(rank)).unlink(missing_ok=True)

    def present(self) -> list[int]:
        """The ranks that have joined and not left."""
        return sorted(int(path.name) for path in self.folder.iterdir())
