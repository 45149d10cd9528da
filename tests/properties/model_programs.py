"""Random trainings, drawn from numbers alone before any model is made.

A program says what blocks a model has, how it is cut into stages, where these are and how they are
laid out, and what trains them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import cg

from .blocks import BLOCKS
from .model_losses import LOSSES, OPTIMIZERS
from .recipes import Number

BLOCKS_ON_RANKS = tuple(BLOCKS)
BUFFER_WRITERS = ("Running", "Counted")
"""Blocks that write to buffers; a group of ranks refuses them where they are trained."""
BLOCKS_ON_MESHES = tuple(name for name in BLOCKS if name not in BUFFER_WRITERS)
MESSAGE_FORMS = ("tensor", "tuple", "dict", "dataclass", "nested", "surplus")
"""Forms of what a stage gives to the next one."""
DTYPES = (torch.float64, torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float64: 1e-8, torch.float32: 5e-4, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Of what is as large as 1, or as the largest element."""
HOMES_BY_SCHEDULE = {
    "interleaved": (0, 1, 0, 1),
    "looped-bfs": (0, 1, 0, 1),
    "zb-v": (0, 1, 1, 0),
    "dualpipe-v": (0, 1, 1, 0),
}
"""The place of each stage, under schedules that want several in certain places."""
GRIDS = ((2, 1), (1, 2), (2, 2), (3, 1))
EDITS = ("scale", "detach", "center", "write", "twice", "mask")
"""What a step may do to what a stage gives."""
OPTIONAL_PASSES = ("overlap", "cse", "dce", "fuse-accumulation")
"""Passes that may be switched off."""


@dataclass(frozen=True)
class Spec:
    """A stage.

    Attributes:
        blocks: their names and variants.
        gives: the form of what it gives to the next one.
        is_remat: whether its forward is computed again in the backward.
        is_wide: whether it is in float32 at least.
        behind: what the step does to what it gives.
    """

    blocks: tuple[tuple[str, int], ...]
    gives: str
    is_remat: bool
    is_wide: bool
    behind: str


@dataclass(frozen=True)
class Place:
    """Where stages are, and how they are laid out.

    Attributes:
        homes: for each stage the number of its rank or mesh.
        grid: sizes along dp and tp of a mesh; None for ranks.
        plan: `megatron`, `rows`, `whole` or `random`.
        cuts: numbers that choose what a random plan cuts.
        is_stored: whether parameters are cut along dp where they rest.
        keep: for how long they stay gathered.
        is_mixed: whether the last of several stages is on a rank, where others are on meshes.
    """

    homes: tuple[int, ...]
    grid: tuple[int, int] | None
    plan: str
    cuts: tuple[int, ...]
    is_stored: bool
    keep: str
    is_mixed: bool

    @property
    def world(self) -> int:
        size = 1 if self.grid is None else self.grid[0] * self.grid[1]
        return size * (max(self.homes) + 1)


@dataclass(frozen=True)
class Program:
    """A training.

    Attributes:
        seed: of weights and data.
        dtype: of the model.
        embedding: the variant of an embedding, or None for inputs that are real numbers.
        is_tied: whether the head is the embedding.
        stages, place: the model, and where it is.
        loss: the name of a loss, and its variant.
        ending: how losses become one backward, or several.
        skips: whether the last stage takes what the first one gives, too.
        repeats: whether the first stage is called once more at the end.
        microbatches, rows: how many, and of how many rows.
        schedule: its name.
        optimizer: its name.
        clip: the kind of norm by which gradients are clipped, or None.
        keeps_zeros: whether gradients are set to zero and not to None.
        update_every: in how many steps parameters are updated.
        steps: how many there are.
        infers: whether a step without gradients follows.
        evaluates: whether that is in evaluation mode.
        resizes: whether the last step has more rows, for which the step is compiled once more.
        inputs: the rank whose inputs count; None for all.
        by_name: whether methods are called with keywords.
        side: the stage whose values have a loss of their own, or None.
        rising: whether losses count more from microbatch to microbatch.
        passes: switches, as in `-overlap,-cse`.
        loop: over `microbatches`; or over `chunks`, which are nothing to a schedule; or with
            `updates` in each of them.
        teaches: whether values without gradients, of the same weights, have a part in the loss.
        is_counted: whether losses are divided by the number of labels of the whole batch.
        averages: whether a traced method keeps an average of weights, behind the update.
        looks_again: whether the step ends with outputs of the new weights.
        has_grads: whether there are gradients before the first step.
        shares: whether stages of one rank have the same blocks.
    """

    seed: int
    dtype: torch.dtype
    embedding: int | None
    is_tied: bool
    stages: tuple[Spec, ...]
    place: Place
    loss: tuple[str, int]
    ending: str
    skips: bool
    repeats: bool
    microbatches: int
    rows: int
    schedule: str
    optimizer: str
    clip: float | None
    keeps_zeros: bool
    update_every: int
    steps: int
    infers: bool
    evaluates: bool
    resizes: bool
    inputs: int | None
    by_name: bool
    side: int | None
    rising: bool
    passes: str
    loop: str
    teaches: bool
    is_counted: bool
    averages: bool
    looks_again: bool
    has_grads: bool
    shares: bool

    @property
    def tolerance(self) -> float:
        names = {name for spec in self.stages for name, _ in spec.blocks}
        tolerance = TOLERANCES[self.dtype]
        return max(tolerance, TOLERANCES[torch.bfloat16]) if "Autocast" in names else tolerance


class Draw:
    """What is drawn, each by one number or several."""

    def __init__(self, number: Number) -> None:
        self.number = number

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.number(0, len(options) - 1)]

    def one_in(self, count: int) -> bool:
        """True once in `count` times."""
        return self.number(1, count) == count


def draw_program(number: Number) -> Program:
    """A program, drawn from numbers."""
    draw = Draw(number)
    kind = draw.choice(("rank", "pipeline", "pipeline", "mesh", "mesh"))
    schedule, place = _draw_place(draw, kind)
    homes, grid = place.homes, place.grid
    stages = _draw_stages(draw, len(homes), grid is not None)
    embedding = number(0, 99) if draw.one_in(2) else None
    is_tied = embedding is not None and draw.one_in(3) and not writes(stages[0].blocks)
    endings = ("mean", "mean", "sum", "two", "inside")[: 4 if is_tied else 5]
    is_basic = schedule in ("gpipe", "1f1b", "auto")
    return Program(
        seed=number(0, 999),
        dtype=draw.choice(DTYPES),
        embedding=embedding,
        is_tied=is_tied,
        stages=stages,
        place=place,
        loss=(draw.choice(tuple(LOSSES)), number(0, 999)),
        ending=draw.choice(endings),
        skips=len(homes) > 1 and draw.one_in(5),
        repeats=len(homes) > 1 and is_basic and draw.one_in(8),
        microbatches=number(1, 4) if kind != "pipeline" else draw.choice((2, 4)),
        rows=max(2, grid[0] if grid else 1) + number(0, 1),
        schedule=schedule,
        optimizer=draw.choice(tuple(OPTIMIZERS)),
        clip=draw.choice((2.0, 2.0, 1.0, float("inf"))) if draw.one_in(3) else None,
        keeps_zeros=draw.one_in(4),
        update_every=2 if draw.one_in(5) else 1,
        steps=draw.choice((2, 2, 3)),
        infers=draw.one_in(5),
        evaluates=draw.one_in(2),
        resizes=draw.one_in(8),
        inputs=number(0, place.world - 1) if kind == "pipeline" and draw.one_in(5) else None,
        by_name=draw.one_in(4),
        side=number(0, len(homes) - 1) if grid is None and draw.one_in(5) else None,
        rising=draw.one_in(5),
        passes=",".join(f"-{name}" for name in OPTIONAL_PASSES if draw.one_in(6)),
        loop=draw.choice(("chunks", "updates")) if is_basic and draw.one_in(5) else "microbatches",
        teaches=draw.one_in(8),
        is_counted=draw.one_in(6),
        averages=draw.one_in(6),
        looks_again=draw.one_in(8),
        has_grads=draw.one_in(8),
        shares=grid is None and draw.one_in(3),
    )


def _draw_place(draw: Draw, kind: str) -> tuple[str, Place]:
    """The name of a schedule, and a place of stages that it can have."""
    is_any = kind != "rank" and draw.one_in(2)
    schedule = draw.choice(cg.schedules.names() if is_any else ("gpipe", "1f1b"))
    grid = draw.choice(GRIDS) if kind == "mesh" else None
    homes = _draw_homes(draw, kind, schedule)
    if kind != "pipeline" and schedule in HOMES_BY_SCHEDULE:
        schedule = "1f1b"
    return schedule, Place(
        homes=homes,
        grid=grid,
        plan=draw.choice(("megatron", "megatron", "rows", "whole", "random")),
        cuts=tuple(draw.number(0, 999) for _ in range(draw.number(1, 2))),
        is_stored=draw.one_in(3) and grid is not None and grid[0] > 1,
        keep=draw.choice(("task", "step")),
        is_mixed=grid is not None and len(homes) > 1 and draw.one_in(3),
    )


def _draw_homes(draw: Draw, kind: str, schedule: str) -> tuple[int, ...]:
    """For each stage the number of its rank or mesh."""
    if kind == "rank":
        return (0,) * draw.number(1, 2)
    if schedule in HOMES_BY_SCHEDULE:
        return HOMES_BY_SCHEDULE[schedule] if kind == "pipeline" else (0,) * draw.number(1, 2)
    if kind == "mesh":
        return tuple(range(draw.number(1, 2)))
    if schedule.startswith("zb") or draw.one_in(2):
        return tuple(range(draw.choice((2, 2, 3, 4))))
    numbers = [draw.number(0, 2) for _ in range(draw.number(2, 3))]
    return tuple(sorted(set(numbers)).index(number) for number in numbers)


def _draw_stages(draw: Draw, count: int, on_mesh: bool) -> tuple[Spec, ...]:
    block_names = BLOCKS_ON_MESHES if on_mesh and not draw.one_in(12) else BLOCKS_ON_RANKS
    max_blocks = 1 if count > 2 else 2
    blocks_by_stage = [
        tuple(
            (draw.choice(block_names), draw.number(0, 10**6))
            for _ in range(draw.number(0 if index else 1, max_blocks))
        )
        for index in range(count)
    ]
    edits = EDITS[:-1] if on_mesh else EDITS
    return tuple(
        Spec(
            blocks=blocks,
            gives=draw.choice(MESSAGE_FORMS),
            is_remat=draw.one_in(8) and not writes(blocks),
            is_wide=draw.one_in(4),
            behind=draw.choice(edits) if draw.one_in(3) else "nothing",
        )
        for blocks in blocks_by_stage
    )


def writes(blocks: Sequence[tuple[str, int]]) -> bool:
    """True if some of these blocks may write to their actor's state."""
    return any(name in (*BUFFER_WRITERS, "Wrapped") for name, _ in blocks)


def program_of(seed: int) -> Program:
    """The program of a seed."""
    return draw_program(random.Random(seed).randint)
