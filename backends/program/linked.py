"""A scheduled module, and a rank's program, with the bodies and values behind their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...ir.ops.module import Module, Program
from ..base import Body, Communicator
from ..failures.fallbacks import Fallbacks


@dataclass(frozen=True, slots=True)
class LinkedModule:
    """A scheduled module, and what the ranks that this process plays run it with.

    Attributes:
        module: the scheduled module, which declares functions and channels.
        bodies: for every function that their programs call, by `Function.body_name`; builtins need
            none.
        constants: the values that `constant` ops refer to, by name.
        seed: the seed of all random numbers; the same on all ranks.
        fallbacks: is told of graphs that are not replayed; None to make one on demand.
        rank_bodies: bodies that some ranks have in the place of `bodies`, by rank and name.
    """

    module: Module
    bodies: Mapping[str, Body]
    constants: Mapping[str, Any]
    seed: int = 0
    fallbacks: Fallbacks | None = None
    rank_bodies: Mapping[int, Mapping[str, Body]] = field(default_factory=dict)

    def bodies_of(self, rank: int) -> Mapping[str, Body]:
        """The bodies of a rank, by `Function.body_name`."""
        own = self.rank_bodies.get(rank)
        return {**self.bodies, **own} if own else self.bodies

    def program(
        self, rank: int, communicators: Mapping[int, Communicator] | None = None
    ) -> LinkedProgram:
        """The program of a rank, with the communicators of its channels, by channel id."""
        return LinkedProgram(
            self.module,
            rank,
            self.bodies_of(rank),
            self.constants,
            communicators or {},
            self.seed,
            self.fallbacks,
        )


@dataclass(frozen=True, slots=True)
class LinkedProgram:
    """The program of a rank, with all that a binder needs to bind it.

    Attributes:
        module: the scheduled module of the program, which declares functions and channels.
        rank: the rank of the program.
        bodies: for every function that the program calls, by `Function.body_name`; builtins need
            none.
        constants: the values that `constant` ops refer to, by name.
        communicators: for every channel that the program uses, by channel id.
        seed: the seed of all random numbers; the same on all ranks.
        fallbacks: is told of graphs that are not replayed; None to make one on demand.
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
        """The functions that move the communicators on."""
        unique = {id(communicator): communicator for communicator in self.communicators.values()}
        return tuple(communicator.progress for communicator in unique.values())
