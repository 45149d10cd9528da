"""Make the bodies of a step's functions, fused by a compiler where a function asks for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from ...backends.base import Body, World
from ...backends.fusion.fuse import FuseError, fuser
from ...ir.ops import Call
from ...ir.ops.module import Function, Module
from ...passes.lower.fuse import refusal
from ...tracer.graph.codegen.bodies import Compiler, GraphBody, each_body
from ...tracer.values.interface import Bodies, RankBodies


@dataclass(frozen=True)
class Fused:
    """The bodies that the ranks of this process run.

    Attributes:
        bodies: by `Function.body_name`: those of the trace, some of them made anew.
        rank_bodies: by rank and name, those that ranks of this process have of their own.
        reasons: for each function that a program of this process calls, why it is not compiled; an
            empty text if it is. There are none if the step asks for no compiler.
    """

    bodies: Mapping[str, Body]
    rank_bodies: Mapping[int, Mapping[str, Body]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(bodies: Mapping[str, Bodies], reasons: Mapping[str, str]) -> Fused:
        """The bodies of a trace, sorted by who runs them."""
        common: dict[str, Body] = {}
        of_rank: dict[int, dict[str, Body]] = {}
        for name, body in bodies.items():
            if isinstance(body, RankBodies):
                for rank, rank_body in body.of_rank.items():
                    of_rank.setdefault(rank, {})[name] = rank_body
            else:
                common[name] = body
        return Fused(common, of_rank, reasons)

    def describe(self) -> str:
        """A line for each function."""
        lines = [
            f"{name}: {f'runs as it is: {why}' if why else 'compiled'}"
            for name, why in self.reasons.items()
        ]
        return "\n".join(lines) + "\n"


class Fusing:
    """Makes the bodies of one trace, each once, whichever programs call it.

    Args:
        bodies: of the trace, by function.
    """

    def __init__(self, bodies: Mapping[str, Bodies]) -> None:
        self._bodies = bodies
        self._known: dict[tuple[str, str | None], Bodies | str] = {}
        self._fusers: dict[str, Compiler] = {}

    def plain(self, module: Module, world: World) -> Fused:
        """The bodies of a scheduled module that asks for no compiler."""
        return Fused.of(self._plain(module, world), {})

    def _plain(self, module: Module, world: World) -> dict[str, Bodies]:
        adding = {
            function.body_name: self._adding(function.body_name)
            for function in _called(module, world)
            if function.adds_products and function.body_name in self._bodies
        }
        return {**self._bodies, **adding}

    def apply(self, module: Module, world: World) -> Fused:
        """The bodies of a scheduled module, compiled where its functions ask for it; collective.

        Raises:
            FuseError: what their compiler needs is missing, on any rank; every rank raises it.
        """
        fused, trouble = Fused({}), None
        try:
            fused = self._apply(module, world)
        except FuseError as error:
            trouble = f"rank {world.rank}: {error}"
        troubles = [message for message in world.allgather(trouble) if message is not None]
        if troubles:
            raise FuseError(troubles[0])
        return fused

    def make(self, module: Module, world: World) -> None:
        """Compile the bodies of a scheduled module that ask for it; `apply` then has them.

        Raises:
            FuseError: what their compiler needs is missing.
        """
        for function in _called(module, world):
            if function.fuse is not None:
                self._compiled(function.body_name, function.fuse)

    def _apply(self, module: Module, world: World) -> Fused:
        bodies, reasons = self._plain(module, world), {}
        for function in _called(module, world):
            if function.fuse is None:
                reasons[function.name] = refusal(function) or "nothing asks for it"
                continue
            body = self._compiled(function.body_name, function.fuse)
            reasons[function.name] = body if isinstance(body, str) else ""
            if not isinstance(body, str):
                bodies[function.body_name] = body
        return Fused.of(bodies, reasons)

    def _adding(self, name: str) -> Bodies:
        """The body of a function with `adds_products`, made anew if it has a graph."""
        cached = self._known.get((name, None))
        if cached is None:
            body = self._bodies[name]
            cached = self._known[name, None] = each_body(body, _refitted)
        return cast(Bodies, cached)

    def _compiled(self, name: str, by: str) -> Bodies | str:
        """The compiled body of a function, or why there is none."""
        cached = self._known.get((name, by))
        if cached is None:
            if by not in self._fusers:
                self._fusers[by] = fuser(by)
            cached = _compiled(self._bodies.get(name), by, self._fusers[by])
            self._known[name, by] = cached
        return cached


def _called(module: Module, world: World) -> list[Function]:
    """The functions that programs of this process call."""
    names = dict.fromkeys(
        op.fn.name
        for rank in range(module.world)
        if world.plays(rank)
        for op in module.program_of(rank).ops
        if isinstance(op, Call)
    )
    return [module.functions[name] for name in names]


def _refitted(body: Body) -> Body:
    return body.refit(None) if isinstance(body, GraphBody) else body


def _compiled(body: Bodies | None, by: str, compiler: Compiler) -> Bodies | str:
    rank_bodies = body.of_rank.values() if isinstance(body, RankBodies) else (body,)
    if body is None or not all(isinstance(rank_body, GraphBody) for rank_body in rank_bodies):
        return "it has no graph"
    try:
        return each_body(body, lambda rank_body: cast(GraphBody, rank_body).refit(compiler))
    except FuseError:
        raise
    except Exception as error:  # whatever a compiler of a third party raises
        first = str(error).strip().partition("\n")[0]
        return f"{by} cannot compile it: {type(error).__name__}: {first}"
