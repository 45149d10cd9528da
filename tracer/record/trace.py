"""A traced step: a module, and what it takes to call it like the Python function."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...ir.location import Location
from ...ir.ops.module import Module
from ...ir.types import Place
from ..values.interface import Bodies, Guard, Owner
from ..values.specs import Fill, Tree, filler
from .session.inputs import InputSpec


@dataclass(frozen=True)
class OutputSpec:
    """The results of a traced step.

    Attributes:
        tree: its pytree; the value leaves are the program's outputs.
        place: the ranks that get it.
    """

    tree: Tree
    place: Place

    @cached_property
    def rebuild(self) -> Fill:
        """Makes what the step's Python would have returned from the program's outputs."""
        return filler(self.tree)


@dataclass(frozen=True)
class Given:
    """Plain arguments of a function of a step, beside values.

    Attributes:
        function: its name in the module.
        loc: the user's line.
        values: numbers, truths and slices, in Python's notation.
    """

    function: str
    loc: Location | None
    values: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """A traced step.

    Attributes:
        module: the step, in phase TRACED; equal on all ranks.
        bodies: what to run, by function name, for those functions that can run in this process.
        constants: the tensors that `constant` ops refer to, by name.
        inputs, outputs: the pytrees of arguments and result.
        guards: what the traces of this process's actors rely on; each says how it is broken. Beside
            it stand the ranks that have the actor; None if all do.
        instances: the objects of actors that the step calls, of all ranks that this process plays.
        given: what this rank has given to the functions that the step calls.
    """

    module: Module
    bodies: dict[str, Bodies]
    constants: dict[str, Any]
    inputs: InputSpec
    outputs: OutputSpec
    guards: tuple[tuple[Guard, Owner], ...]
    instances: tuple[Any, ...]
    given: tuple[Given, ...] = ()

    def guards_of(self, rank: int) -> tuple[Guard, ...]:
        """The guards of a rank's actors, if this process plays the rank."""
        return tuple(guard for guard, ranks in self.guards if ranks is None or rank in ranks)

    def check_guards(self, rank: int | None = None) -> None:
        """Return if this process's actors are still as they were traced.

        Args:
            rank: whose actors to look at; those of all ranks that this process plays if None.

        Raises:
            RuntimeError: one has changed in a way that the trace cannot follow.
        """
        for guard, ranks in self.guards:
            if rank is not None and ranks is not None and rank not in ranks:
                continue
            change = guard()
            if change is not None:
                raise RuntimeError(
                    f"{change}; step {self.module.name} was traced before that. Lower it again; a "
                    "step that is called without lower() needs clear_cache() on all ranks"
                )
