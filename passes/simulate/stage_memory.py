"""The memory that a microbatch holds on each stage, from a scheduled module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ir.attributes import Action, Effect
from ...ir.ops import Call, Free, Recv, Value
from ...ir.ops.module import Module, Program
from ...ir.ops.storage import SharedStorage
from ...ir.types import tensor_bytes
from .memory_plan import brings


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory of a step's stages.

    Attributes:
        activations: for each stage the bytes that a microbatch holds between F and B, the most of
            all microbatches. Storage that stages of one rank share counts for each of them;
            parameters of the step and the state of actors do not count.
        weights: for each stage the bytes that a microbatch holds between B and W; 0 if the schedule
            does not split backwards.
        actors: for each stage its actor.
    """

    activations: tuple[int, ...]
    weights: tuple[int, ...]
    actors: tuple[str, ...]


def stage_memory(module: Module) -> StageMemory:
    """Measure the stages of a scheduled module; they must be numbered from 0 without a gap."""
    activations: dict[int, int] = {}
    weights: dict[int, int] = {}
    actors: dict[int, str] = {}
    for program in module.programs:
        for op in program.ops:
            if isinstance(op, Call) and op.task is not None:
                actor = module.functions[op.fn.name].actor
                if actor is not None:
                    actors.setdefault(op.task.stage, actor)
        for held, most in zip(_held(program, module), (activations, weights), strict=True):
            for (stage, _), size in held.items():
                most[stage] = max(most.get(stage, 0), size)
    stages = sorted(actors)
    return StageMemory(
        tuple(activations.get(stage, 0) for stage in stages),
        tuple(weights.get(stage, 0) for stage in stages),
        tuple(actors[stage] for stage in stages),
    )


def recomputable(module: Module) -> frozenset[str]:
    """The actors whose differentiated calls can all be computed again in the backward.

    This excludes calls that draw random numbers, or that change their actor's state.
    """
    repeatable: dict[str, bool] = {}
    for vjp in module.vjps.values():
        forward = module.functions[vjp.forward]
        if forward.actor is not None:
            again = not forward.random and forward.effect in (Effect.PURE, Effect.READ)
            repeatable[forward.actor] = repeatable.get(forward.actor, True) and again
    return frozenset(actor for actor, again in repeatable.items() if again)


_Place = tuple[int, int]
"""A stage and a microbatch."""


def _held(program: Program, module: Module) -> tuple[Mapping[_Place, int], Mapping[_Place, int]]:
    """The bytes that microbatches hold on stages between F and B, and between B and W."""
    storage = SharedStorage(program, module.functions, collectives=True)
    sizes: dict[Value, int] = {}
    # The storage that each task uses; and the storage of F and of B that later tasks still use.
    used: dict[tuple[_Place, Action], set[Value]] = {}
    before: dict[_Place, set[Value]] = {}
    after: dict[_Place, set[Value]] = {}
    for op in program.ops:
        # A message that B needs stays in its slot, so it counts as well.
        is_message = isinstance(op, Recv) and not op.operands
        for value in op.results if is_message else brings(op, module.functions):
            group = storage.of(value)
            sizes[group] = sizes.get(group, 0) + tensor_bytes(value.type)
        if op.task is None or isinstance(op, Free):
            continue
        place, action = (op.task.stage, op.task.microbatch), op.task.action
        groups = {storage.of(value) for value in (*op.operands, *op.results)}
        used.setdefault((place, action), set()).update(groups)
        if action is not Action.FORWARD:
            of_forward = used.get((place, Action.FORWARD), set())
            before.setdefault(place, set()).update(groups & of_forward)
            if action is Action.WEIGHT:
                of_backward = used.get((place, Action.BACKWARD), set())
                after.setdefault(place, set()).update(groups & (of_forward | of_backward))
    return _sums(before, sizes), _sums(after, sizes)


def _sums(held: Mapping[_Place, set[Value]], sizes: Mapping[Value, int]) -> Mapping[_Place, int]:
    return {place: sum(sizes.get(group, 0) for group in groups) for place, groups in held.items()}
