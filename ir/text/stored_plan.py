"""A plan in a file of which each rank reads its own program, and any other only when it asks.

Each program has a digest, and one digest is of all of these. Ranks compare that one, and each
checks the program that it runs, so together they have checked the whole file.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..ops.module import Module
from .parser import parse_module
from .plan_file import (
    INDEX_DIGITS,
    PARTS,
    TRACED,
    PlanFileError,
    PlanHead,
    check_scheduled,
    digest_of,
    not_a_plan,
    plan_digest,
    trace_of,
)
from .stored_programs import StoredPrograms

_LONGEST_HEAD = 1 << 24
_END = re.compile(rf"// index (\d{{{INDEX_DIGITS}}})\n".encode())
_END_LENGTH = len("// index \n") + INDEX_DIGITS
_FILE_PART = re.compile(r"// (\d{1,12}) ([0-9a-f]{64})\n")


@dataclass(frozen=True)
class _FilePart:
    """A part of the file: where it begins, its length in bytes, and its digest."""

    start: int
    length: int
    digest: str


class _PlanParts:
    """The parts of an open file. It stays readable if another takes its name."""

    def __init__(self, path: Path) -> None:
        self.file = str(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        size = os.fstat(self._descriptor).st_size
        first = self._read(0, min(size, 1 << 12))
        if first.count(b"\n") < 4:
            first = self._read(0, min(size, _LONGEST_HEAD))
        self.head = PlanHead.of(first.decode("utf-8", errors="replace"), self.file)
        end = _END.fullmatch(self._read(size - _END_LENGTH, _END_LENGTH))
        if end is None:
            raise self.changed()
        length = int(end[1])
        start = size - _END_LENGTH - length
        listed = self._read(start, length).decode("utf-8", errors="replace")
        self.digest = plan_digest(self.head.facts, self.head.devices, listed)
        if self.digest != self.head.digest:
            raise self.changed()
        entries = [(int(length), digest) for length, digest in _FILE_PART.findall(listed)]
        starts = [*accumulate((length for length, _ in entries), initial=self.head.length)]
        self.parts = [
            _FilePart(start, *entry) for start, entry in zip(starts, entries, strict=False)
        ]
        if starts[-1] + len(PARTS) + length + _END_LENGTH != size or len(entries) < 3:
            raise self.changed()
        if self._read(start - len(PARTS), len(PARTS)) != PARTS.encode():
            raise not_a_plan(self.file)

    def changed(self) -> PlanFileError:
        """The error for a file of which something is not as it was written."""
        return PlanFileError(
            f"{self.file} was changed since its programs were proven. Prove it again: "
            f"cg-opt {self.file} > new.plan"
        )

    def text(self, index: int) -> str:
        """The text of a part.

        Raises:
            OSError: it cannot be read.
            PlanFileError: it is not as it was written.
        """
        part = self.parts[index]
        content = self._read(part.start, part.length)
        if digest_of(content) != part.digest:
            raise self.changed()
        return content.decode()

    @property
    def count(self) -> int:
        """The number of programs."""
        return len(self.parts) - 2

    def program(self, rank: int) -> str:
        """The text of a rank's program; raises as `text` does."""
        return self.text(1 + rank)

    def _read(self, start: int, length: int) -> bytes:
        """The bytes of a stretch; none of one that does not begin in the file."""
        return os.pread(self._descriptor, length, start) if start >= 0 and length > 0 else b""


@dataclass(frozen=True)
class StoredPlan:
    """A plan in a file, of which only the declarations and the trace are read at once.

    Attributes:
        module: the scheduled programs; each is read when it is asked for.
        traced, facts, devices: as `PlanFile` has them.
        digest: of the whole plan.
    """

    module: Module
    traced: str
    facts: Mapping[str, Any]
    devices: Mapping[str, str]
    digest: str

    @staticmethod
    def open(path: Path) -> StoredPlan:
        """Open a file.

        Raises:
            OSError: it cannot be read.
            PlanFileError: it is no plan; or of another version; or was changed since it was proven,
                as far as its head, its list of parts, the declarations or the trace tell.
            IRError: its declarations have an error.
        """
        parts = _PlanParts(path)
        module = parse_module(f"{parts.text(0)}}}\n", parts.file)
        check_scheduled(module, parts.file)
        declared = Module(module.name, module.phase, module.world, module.meshes)
        module.programs = StoredPrograms(parts, declared)
        comments = parts.text(-1)
        if len(module.programs) != module.world or not comments.startswith(TRACED):
            raise not_a_plan(parts.file)
        trace = trace_of(comments.removeprefix(TRACED), parts.file)
        return StoredPlan(module, trace, parts.head.facts, parts.head.devices, parts.digest)
