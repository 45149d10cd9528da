"""Programs in a text, of which a rank reads its own, and any other only when something asks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, overload

from ..ops.module import Module, Program
from .parser import parse_module, parse_program
from .printed_programs import NotPrinted, split_module
from .printer import without_locations

_PROGRAM = re.compile(r"^ *+program @(\d+)\(", re.MULTILINE)


class ProgramTexts(Protocol):
    """The texts of the programs of a plan."""

    @property
    def digest(self) -> str:
        """The digest of the plan."""

    @property
    def count(self) -> int:
        """The number of programs."""

    @property
    def file(self) -> str:
        """The name of the text in errors."""

    def program(self, rank: int) -> str:
        """The text of a rank's program."""

    def changed(self) -> ValueError:
        """The error for a text that is not as it was written."""


class StoredPrograms(Sequence[Program]):
    """The programs of a plan's text, by rank; each is read when it is first asked for.

    Attributes:
        digest: of the plan.
    """

    def __init__(self, texts: ProgramTexts, declared: Module) -> None:
        self.digest = texts.digest
        self._texts = texts
        self._declared = declared
        self._known: dict[int, Program] = {}

    def __len__(self) -> int:
        return self._texts.count

    @overload
    def __getitem__(self, index: int) -> Program: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Program]: ...
    def __getitem__(self, index: int | slice) -> Program | Sequence[Program]:
        """The program of a rank.

        Raises:
            IRError: its text is none of a program.
            OSError: the file cannot be read.
            ValueError: the text was changed since it was opened.
        """
        if isinstance(index, slice):
            return [self[rank] for rank in range(*index.indices(len(self)))]
        rank = range(len(self))[index]
        program = self._known.get(rank)
        if program is None:
            program = self._known[rank] = self._read(rank)
        return program

    def __iter__(self) -> Iterator[Program]:
        return (self[rank] for rank in range(len(self)))

    def _read(self, rank: int) -> Program:
        text, file = self._texts.program(rank), f"{self._texts.file}, rank {rank}"
        program = parse_program(text, self._declared, file)
        if program.rank != rank:
            raise self._texts.changed()
        return program


@dataclass(frozen=True)
class _PrintedPrograms:
    """Programs as they stand in the text of a module; implements `ProgramTexts`."""

    digest: str
    file: str
    programs: Sequence[str]

    @property
    def count(self) -> int:
        return len(self.programs)

    def program(self, rank: int) -> str:
        return self.programs[rank]

    def changed(self) -> ValueError:
        return ValueError(f"{self.file} has programs in another order than that of ranks")


def open_module(text: str, file: str) -> Module:
    """Read the declarations of a scheduled module, and each program when it is asked for.

    The digest of the programs is that of the module's text without locations, as it was read.

    Args:
        text: what `format_module` has written, with locations or without.
        file: the name of the text in errors.

    Raises:
        IRError: the declarations are malformed.
        ValueError: the programs do not stand in the order of ranks, as they are printed.
    """
    try:
        declarations, programs = split_module(text)
    except NotPrinted:
        raise ValueError(f"{file} is not as it was printed") from None
    module = parse_module(f"{declarations}}}\n", file)
    starts = [match.start() for match in _PROGRAM.finditer(programs)]
    texts = [programs[start:end] for start, end in pairwise([*starts, len(programs)])]
    digest = hashlib.sha256(without_locations(text).encode()).hexdigest()
    declared = Module(module.name, module.phase, module.world, module.meshes)
    module.programs = StoredPrograms(_PrintedPrograms(digest, file, texts), declared)
    return module
