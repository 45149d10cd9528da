"""Runs random steps on the ranks of a job, each against its own Python: see tests/properties.

    mpiexec -n 4 python -m tests.mpi.oracle_job 0 30 [EXECUTIONS]

Every rank draws the same recipes, and runs each step eagerly by itself, with actors of its own.
"""

from __future__ import annotations

import random
import sys

import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.text.diagnostics import IRError
from cg.launch.world import world as worlds
from cg.launch.world.world import use_world
from tests.properties.actors import KINDS
from tests.properties.oracle import (
    BASIC,
    check_sharing,
    compare,
    compare_states,
    lower,
    new_actors,
)
from tests.properties.recipes import ALL, Flavour, Recipe, draw_recipe
from tests.properties.steps import inputs, make_step


def main() -> None:
    first, last, *more = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    # A device replays what it has captured from the third execution on.
    executions = more[0] if more else 2 if worlds.world().device is None else 6
    flavour = Flavour(ALL, worlds=(cg.world_size(),))
    passed = 0
    for seed in range(first, last):
        recipe = draw_recipe(random.Random(seed).randint, flavour, BASIC, KINDS)
        try:
            # What is kept is nobody else's; what is dropped, a graph may use again.
            passed += check(recipe, executions, keeps=seed % 2 == 0)
        except BaseException as error:
            error.add_note(f"seed {seed}: {recipe}")
            raise
    print(f"rank {cg.rank()}: {passed} of {last - first} agree")


def check(recipe: Recipe, executions: int, keeps: bool) -> bool:
    """Compare some executions on this rank; whether the schedule has taken the step.

    Args:
        keeps: whether to keep all results, and to look at them once more at the end.
    """
    with use_world(VirtualWorld(cg.world_size())):
        eager_actors = new_actors(recipe)
    eager = make_step(recipe, eager_actors)
    actors = new_actors(recipe)
    lowered = lower(recipe, actors)
    schedule = cg.schedules.by_name(recipe.schedule)
    try:
        compiled = lowered.compile(schedule=schedule, passes=recipe.passes)
    except IRError:
        if recipe.must_overlap:
            raise
        return False
    kept = []
    for execution in range(executions):
        given = inputs(execution)
        expected, actual = eager(*given), compiled(*given)
        gets = recipe.outputs is None or cg.rank() in recipe.outputs
        assert (actual is not None) == gets
        if gets:
            compare(f"rank {cg.rank()}", expected, actual)
            check_sharing(f"rank {cg.rank()}", given, expected, actual)
            if keeps:
                kept.append((expected, actual))
        compare_states(f"rank {cg.rank()}", eager_actors, actors)
    for execution, (expected, actual) in enumerate(kept):
        compare(f"rank {cg.rank()}, kept of execution {execution}", expected, actual)
    compiled.close()
    return True


if __name__ == "__main__":
    main()
