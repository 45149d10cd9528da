"""Recipes for random steps, as plain data: what a step does, and how it is compiled.

A recipe is drawn from numbers alone, so hypothesis can shrink it and a job of several processes
can draw the same one in each of them from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Number = Callable[[int, int], int]
"""Draws an integer between two bounds, both included."""

ROWS, WIDTH = 4, 3
"""The shape of the step's input."""

READS = ("linear", "mix", "split", "peek", "same", "strided", "join", "half")
"""Methods that only read, or do not touch, the actor's state."""
WRITES = ("accumulate", "average", "reread", "note", "draft", "check")
"""Methods that write to it: buffers in place, buffers by assignment, a Python list."""
VALUES = ("weight", "project", "indices", "look", "look_given")
"""Methods around a weight that travels, and around integers."""
TORCH = ("add", "inplace", "cat", "where", "broadcasted", "index", "made", "literal")
"""Torch functions of the step itself."""
GROUPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
)
"""Collectives."""
LOSSES = ("loss", "mean_square")
"""The lines that make a loss."""


@dataclass(frozen=True)
class Line:
    """One line of a step: what it does, with which actor, on which earlier values.

    Indices count from the latest value backwards, modulo how many there are.
    """

    what: str
    actor: int
    first: int
    second: int


@dataclass(frozen=True)
class Block:
    """Lines that run once, or, if there are microbatches, once in each of them.

    Attributes:
        microbatches: how many; 0 for none.
        lines: what is done.
        kept: which value goes on to the next block, for all microbatches together.
        last: a value of the last microbatch alone that the step returns; None for no such value.
        trained: whether each microbatch ends with a backward of its own losses.
        carried: whether each microbatch takes what the same one of the block before has kept.
    """

    microbatches: int
    lines: tuple[Line, ...]
    kept: int
    last: int | None
    trained: bool
    carried: bool


@dataclass(frozen=True)
class Recipe:
    """A step, and how it is compiled and run.

    Attributes:
        world: number of ranks.
        ranks: for each actor its rank.
        blocks: what the step does, in order.
        trained: whether it ends with a backward of all losses that are left.
        inside: whether the losses of a last block of microbatches are all losses; else there is
            one of what its microbatches have made together.
        updates: actors that are updated after that.
        inputs, outputs: ranks of `inputs=` and `outputs=`, or None.
        returned: which of the last values are returned.
        schedule: name of a schedule.
        passes: switches, as in `-overlap,-cse`.
        shuffle: seed of the order in which the ranks of the second execution take turns.
    """

    world: int
    ranks: tuple[int, ...]
    blocks: tuple[Block, ...]
    trained: bool
    inside: bool
    updates: tuple[int, ...]
    inputs: tuple[int, ...] | None
    outputs: tuple[int, ...] | None
    returned: tuple[int, ...]
    schedule: str
    passes: str
    shuffle: int

    @property
    def must_overlap(self) -> bool:
        """True if any schedule has to take it: no microbatch waits for a later one.

        That is so for one loop over microbatches, with the losses in it.
        """
        *before, last = self.blocks
        return (
            not self.writes_in_microbatches
            and not any(block.microbatches for block in before)
            and (not self.trained or not last.microbatches or self.inside or last.trained)
        )

    @property
    def writes_in_microbatches(self) -> bool:
        """True if actors are written to inside of microbatches."""
        return any(
            line.what in WRITES
            for block in self.blocks
            if block.microbatches
            for line in block.lines
        )


@dataclass(frozen=True)
class Flavour:
    """Which recipes to draw.

    Attributes:
        methods: what lines may do.
        worlds: numbers of ranks.
        microbatches: what a block may have; 0 for none.
        blocks: how many there may be.
        lines: how many a block may have.
        trained: whether there may be a backward.
        optional: passes that may be switched off.
    """

    methods: Sequence[str]
    worlds: Sequence[int] = (1, 2, 3, 4, 5, 6)
    microbatches: Sequence[int] = (0, 2, 4)
    blocks: int = 3
    lines: int = 6
    trained: bool = True
    optional: Sequence[str] = ("overlap", "cse", "dce", "place")


ALL = (*READS, *READS, *WRITES, *VALUES, *TORCH, *GROUPS, *LOSSES)
PIPELINE = (*READS, *READS, "weight", "project", "indices", "look", "add", "inplace", *LOSSES)


def draw_recipe(number: Number, flavour: Flavour, schedules: Sequence[str], actors: int) -> Recipe:
    """A recipe of a flavour.

    Args:
        number: draws integers.
        flavour: which.
        schedules: names to choose from.
        actors: the most actors that there may be.
    """

    def some(of: Sequence[str]) -> str:
        return of[number(0, len(of) - 1)]

    def coin(of: int = 2) -> bool:
        return number(1, of) == of

    world = flavour.worlds[number(0, len(flavour.worlds) - 1)]
    ranks = tuple(number(0, world - 1) for _ in range(number(1, actors)))

    def lines() -> tuple[Line, ...]:
        return tuple(
            Line(some(flavour.methods), number(0, len(ranks) - 1), number(0, 5), number(0, 5))
            for _ in range(number(1, flavour.lines))
        )

    def block() -> Block:
        count = flavour.microbatches[number(0, len(flavour.microbatches) - 1)]
        trained = flavour.trained and coin(5)
        last = number(0, 3) if coin(6) else None
        return Block(count, lines(), number(0, 3), last, trained, coin(3))

    def place() -> tuple[int, ...] | None:
        if not coin(3):
            return None
        return tuple(sorted({number(0, world - 1) for _ in range(number(1, 2))}))

    trained = flavour.trained and not coin(4)
    return Recipe(
        world=world,
        ranks=ranks,
        blocks=tuple(block() for _ in range(number(1, flavour.blocks))),
        trained=trained,
        inside=coin(),
        updates=tuple(i for i in range(len(ranks)) if trained and coin()),
        inputs=place(),
        outputs=place(),
        returned=tuple(number(0, 6) for _ in range(number(0, 3))),
        schedule=some(schedules),
        passes=",".join(f"-{name}" for name in flavour.optional if coin(5)),
        shuffle=number(0, 1000),
    )
