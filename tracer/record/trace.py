"""A traced step: a module, and the data to call it like the Python function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...ir.location import Location
from ...ir.ops.module import Module
from ...ir.pipeline.tradeoff import Tradeoff
from ...ir.types import Place
from ..values.interface import Bodies, Guard, Owner
from ..values.specs import Fill, Tree, filler
from .session.inputs import InputSpec


@dataclass(frozen=True)
class OutputSpec:
    """The results of a traced step.

    Attributes:
        tree: the pytree of specs; its value leaves are the program's outputs.
        place: the ranks that get the results.
    """

    tree: Tree
    place: Place

    @cached_property
    def rebuild(self) -> Fill:
        """A function that makes the step's result from the program's outputs."""
        return filler(self.tree)


@dataclass(frozen=True)
class PlainArguments:
    """The static arguments of a function of a step, as far as ranks compare them.

    Attributes:
        function: the function's name in the module.
        loc: the user's line.
        values: the `repr` of the arguments that are numbers, booleans or slices.
    """

    function: str
    loc: Location | None
    values: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """A traced step.

    Attributes:
        module: the module, in phase TRACED; equal on all ranks.
        bodies: the bodies of the functions that can run in this process, by function name.
        constants: the tensors that `constant` ops refer to, by name.
        inputs, outputs: the pytrees of the arguments and of the results.
        guards: the guards of this process's actors, each with the ranks that have the actor (None
            for all). A guard checks the state that a trace relies on, and says what has changed.
        instances: the instances of the called actors on all ranks that this process plays.
        plain_arguments: the static arguments that this rank passes to the functions of the step.
        tradeoffs: for derivatives whose forward may have a limit, what it may save, by name.
        float8: of this process's actors that compute in float8, a line for each weight.
    """

    module: Module
    bodies: dict[str, Bodies]
    constants: dict[str, Any]
    inputs: InputSpec
    outputs: OutputSpec
    guards: tuple[tuple[Guard, Owner], ...]
    instances: tuple[Any, ...]
    plain_arguments: tuple[PlainArguments, ...] = ()
    tradeoffs: Mapping[str, Tradeoff] = field(default_factory=dict)
    float8: tuple[str, ...] = ()

    def guards_of(self, rank: int) -> tuple[Guard, ...]:
        """The guards of a rank's actors, if this process plays the rank."""
        return tuple(guard for guard, ranks in self.guards if ranks is None or rank in ranks)

    def check_guards(self, rank: int | None = None) -> None:
        """Return if no guard of this process's actors is broken.

        Args:
            rank: the rank whose actors are checked; None: all ranks that this process plays.

        Raises:
            RuntimeError: an actor has changed in a way that the trace cannot follow.
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
