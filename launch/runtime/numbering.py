"""Number the executions of a step, which its random numbers depend on, and resume the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from ...backends.agreement.gather import ComparedText, agree
from ...backends.base import World


class Numbering:
    """Counts the calls of a step, whichever of its programs runs.

    A call that is refused before anything of it runs does not count. One that fails later does.

    Attributes:
        next: the number of the next call.
    """

    __slots__ = ("__weakref__", "next")

    def __init__(self) -> None:
        self.next = 0


def check_state(
    world: World, step: str, state: Mapping[str, Any], seed: int, counts: tuple[str, ...]
) -> None:
    """Return if a step can go on from a state, and all ranks go on from the same; collective.

    Args:
        world: all ranks.
        step: its name.
        state: what `state_dict` has returned.
        seed: of the step's random numbers.
        counts: the keys of numbers of executions that the state must have.

    Raises:
        PlanMismatch: ranks go on from different states.
        TypeError: it is no such state.
        ValueError: it is of a run with another seed, or lacks something.
    """
    entries = sorted(f"{key}: {value!r}" for key, value in state.items())
    part = {"state": ComparedText("the state is", ", ".join(entries))}
    agree(world, f"the ranks resume step {step} differently", part, _ADVICE)
    keys = {"seed", *counts}
    if set(state) != keys:
        raise ValueError(
            f"load_state_dict() of step {step} takes what its state_dict() returns, with "
            f"{', '.join(sorted(keys))}, and was given {', '.join(sorted(state)) or 'nothing'}"
        )
    for key in counts:
        if type(state[key]) is not int or state[key] < 0:
            raise TypeError(f"{key}={state[key]!r} in the state of step {step}: an int, at least 0")
    if state["seed"] != seed:
        raise ValueError(
            f"the state of step {step} is of a run with seed {state['seed']}, and this one has "
            f"seed {seed}, so random numbers would differ: set CG_SEED={state['seed']}, or give "
            f"compile(seed={state['seed']})"
        )


_ADVICE = "Every rank must load the same checkpoint"


@dataclass(frozen=True)
class Definition:
    """The definition of a step.

    Attributes:
        name: of the step.
        fn: its Python function.
        driver: the rank that may start executions, if there is one.
        numberings: of programs that were compiled from it and count their own executions.
    """

    name: str
    fn: Callable[..., Any]
    driver: int | None
    numberings: WeakSet[Numbering]

    def number(self) -> Numbering:
        """A numbering for another program."""
        numbering = Numbering()
        self.numberings.add(numbering)
        return numbering
