"""Record the ranks that are in a job, how far they have come, and why they end it.

A rank that ends with code 0 in the middle of a job, as `os._exit(0)` does, looks to an MPI launcher
like one that has finished: it ends the others without a word, and the job counts as a success. And
a rank that is killed tells nobody which step it was in. So `cg.launch` gives ranks a folder. Each
has a file there while it is in the job, one for each step that it runs, and one for its last words.
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COUNT = 8
"""Bytes of the number at the beginning of a step's file; its name comes behind it."""
_LEFT, _STEP, _REPORT, _DEATH = ".left", ".step", ".report", ".death"


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
            (self.folder / str(rank)).replace(self.folder / f"{rank}{_LEFT}")

    def present(self) -> list[int]:
        """The ranks that have joined and not left."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def has_begun(self) -> bool:
        """True if a rank has joined the job, be it that it has left since."""
        return bool(self.present()) or any(self.folder.glob(f"*{_LEFT}"))

    def mark(self, rank: int, step: str) -> memoryview | None:
        """Make the mark of a program of a step on a rank.

        It is a word of a mapped file, so that it outlasts the rank, and an execution costs one
        store and no call of the system.

        Returns:
            One integer, for the number of executions that the rank has begun; None where it cannot
            be recorded.
        """
        try:
            descriptor, _ = tempfile.mkstemp(_STEP, f"{rank}.", self.folder)
            with open(descriptor, "r+b") as file:
                file.write(bytes(_COUNT) + step.encode())
                file.flush()
                return memoryview(mmap.mmap(descriptor, _COUNT)).cast("Q")
        except OSError:
            return None

    def steps(self) -> dict[str, int]:
        """The execution that the ranks have come to, by step: the furthest of a name."""
        furthest: dict[str, int] = {}
        for content in self._contents(_STEP):
            count, step = int.from_bytes(content[:_COUNT], "little"), content[_COUNT:].decode()
            if count:
                furthest[step] = max(furthest.get(step, 0), count - 1)
        return dict(sorted(furthest.items()))

    def report(self, rank: int, text: str, of_death: bool = False) -> None:
        """Record why the rank ends the job; of several texts the first.

        Args:
            rank: that ends it.
            text: in words.
            of_death: whether the reason is that another rank has died.
        """
        file = self.folder / f"{rank}{_DEATH if of_death else _REPORT}"
        with contextlib.suppress(OSError), file.open("xb") as opened:
            opened.write(text.encode(errors="replace"))

    def first_report(self, of_death: bool = False) -> str | None:
        """The text of the rank that was the first to end the job; None if none said why."""
        ending = _DEATH if of_death else _REPORT
        return next((content.decode() for content in self._contents(ending)), None)

    def _contents(self, ending: str) -> Iterator[bytes]:
        files = self.folder.glob(f"*{ending}")
        for file in sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name)):
            yield file.read_bytes()
