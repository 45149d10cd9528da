"""A rank's program with all that its names stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...ir.module import Module, Program
from ..base import Body, Communicator
from ..failures.fallbacks import Fallbacks


@dataclass(frozen=True, slots=True)
class LinkedProgram:
    """What a binder binds: the program of a rank.

    Attributes:
        module: what the program is part of, scheduled; declares functions and channels.
        rank: whose program.
        bodies: for every function that the program calls, by name; builtins need none.
        constants: the values that `constant` ops refer to, by name.
        communicators: for every channel that the program uses, by channel id.
        seed: of all random numbers; the same on all ranks.
        fallbacks: hears of graphs that are not replayed; made by whoever needs it if None.
    """

    module: Module
    rank: int
    bodies: Mapping[str, Body] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    communicators: Mapping[int, Communicator] = field(default_factory=dict)
    seed: int = 0
    fallbacks: Fallbacks | None = None

    @property
    def program(self) -> Program:
        """The program."""
        return self.module.program_of(self.rank)

    @property
    def progress(self) -> tuple[Callable[[], None], ...]:
        """What moves each of the communicators on."""
        unique = {id(each): each for each in self.communicators.values()}
        return tuple(each.progress for each in unique.values())
