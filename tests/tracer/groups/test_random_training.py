"""Random chains of layers on random meshes train exactly as they do in one process.

A chain is traced once, and trained by up to five programs that are compiled of the trace: under
other schedules, or with parameters gathered for other times. Each of these is a training of its
own, from the first numbers on: three steps, of which outputs, all gradients and all parameters are
compared. A run says how many trainings there were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cg
from cg.ir.types import Mesh
from cg.tracer.values.gradient_buckets import BUCKET
from cg.tracer.values.plan import Sharding

from ...sampling import of_shard, scale, shards
from ...worlds import virtual_world
from .training import (
    HEADS,
    HOMES,
    MLP_PLAN,
    PLANS,
    ROWS,
    WIDTH,
    Attention,
    Mlp,
    Model,
    RecordingStage,
    alone,
    batch,
    compare_all,
    step_of,
)

pytestmark = pytest.mark.timeout(900)

WORLD = 6
ALL = "forward(x)|loss(h)|loss(y)"
OF_AN_MLP: Mapping[str, Mapping[str, Sharding]] = {
    "columns, rows": MLP_PLAN,
    "copies": ROWS,
    "two axes of rows": {ALL: cg.cut(0, "dp", "tp")},
    "the minor axis first": {ALL: cg.cut(0, "tp", "dp")},
    "rows and tokens": {ALL: cg.cut(0, "dp") & cg.cut(1, "tp")},
    "two axes of columns": {
        ALL: cg.whole,
        "up.*": cg.cut(0, "dp", "tp"),
        "down.weight": cg.cut(1, "dp", "tp"),
    },
    "all whole": {ALL: cg.whole},
}
OF_ATTENTION: Mapping[str, Mapping[str, Sharding]] = {
    "heads": PLANS[Attention],
    "copies": ROWS,
    "two axes of rows": {ALL: cg.cut(0, "dp", "tp")},
    "all whole": {ALL: cg.whole},
}
SHARDS = 6 if scale() == 1 else 10
"""Each of ten chains; more with --slow."""
MOST = 5
"""Orders of a chain."""
LINES = ("zb-h1", "zb-h2")
"""Schedules that want the stages of a rank side by side."""
GRIDS = [(1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (2, 2), (3, 2)]


@dataclass(frozen=True)
class Layer:
    """A stage of a chain.

    Attributes:
        cls: its class.
        place: its mesh.
        plan: the name of its plan.
        is_stored: whether its parameters are cut along `dp` where they rest.
    """

    cls: type[RecordingStage]
    place: Mesh
    plan: str
    is_stored: bool

    @property
    def shardings(self) -> Mapping[str, Sharding]:
        return (OF_ATTENTION if self.cls is Attention else OF_AN_MLP)[self.plan]


@dataclass(frozen=True)
class Order:
    """In which order a chain trains, and how parameters are gathered.

    Attributes:
        schedule: None for the order in which the step is written.
        keep, prefetch: as `cg.fsdp` takes them; None where nothing is gathered.
    """

    schedule: str | None
    keep: str | None
    prefetch: int

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `compile`."""
        fsdp = None if self.keep is None else cg.fsdp(keep=self.keep, prefetch=self.prefetch)
        schedule = None if self.schedule is None else cg.schedules.by_name(self.schedule)
        return {"schedule": schedule, "fsdp": fsdp}


@dataclass(frozen=True)
class Case:
    """A training that was drawn.

    Attributes:
        layers: of the chain.
        width: of the layers. This and `rows` are at least 2: a cut dimension of size 1 cannot be
            viewed together with another one.
        rows: of a microbatch.
        count: of microbatches.
        orders: those in which the chain is trained.
        bucket_bytes: as `Cls.on` takes it; from a bucket for each gradient to one for all.
    """

    layers: tuple[Layer, ...]
    width: int
    rows: int
    count: int
    orders: tuple[Order, ...]
    bucket_bytes: int


@st.composite
def layers(draw: st.DrawFn, place: Mesh, has_attention: bool) -> Layer:
    axes = dict(place.grid)
    cls: type[RecordingStage] = Attention if has_attention and draw(st.booleans()) else Mlp
    names = sorted(OF_ATTENTION if cls is Attention else OF_AN_MLP)
    if HEADS % axes["tp"] and cls is Attention:
        names.remove("heads")
    plan = draw(st.sampled_from(names))
    return Layer(cls, place, plan, plan != "two axes of columns" and draw(st.booleans()))


@st.composite
def places(draw: st.DrawFn, count: int, are_apart: bool) -> list[Mesh]:
    """Meshes of the world's ranks; those that are apart have no rank in common."""
    ranks = draw(st.permutations(range(WORLD)))
    found: list[Mesh] = []
    for _ in range(count):
        if are_apart:
            dp, tp = draw(st.sampled_from([grid for grid in GRIDS if math.prod(grid) < WORLD - 1]))
            dp, tp = (dp, tp) if dp * tp <= len(ranks) - (not found) else (1, 1)
            mine, ranks = ranks[: dp * tp], ranks[dp * tp :]
        else:
            dp, tp = draw(st.sampled_from(GRIDS))
            mine = draw(st.permutations(ranks))[: dp * tp]
        found.append(cg.mesh(mine, dp=dp, tp=tp))
    return found


@st.composite
def orders(draw: st.DrawFn, schedules: Sequence[str | None], is_stored: bool) -> tuple[Order, ...]:
    """Up to `MOST` orders, each of which makes another program."""
    each = st.builds(
        Order,
        st.sampled_from(schedules),
        st.sampled_from(["step", "task"]) if is_stored else st.none(),
        st.integers(0, 3) if is_stored else st.just(0),
    )
    most = min(MOST, len(schedules) * (8 if is_stored else 1))
    return tuple(draw(st.lists(each, min_size=most, max_size=most, unique=True)))


def surrounds(where: Sequence[Mesh]) -> bool:
    """True if the first and the last of three stages share ranks, and none with the middle one."""
    first, middle, last = (set(mesh.ranks) for mesh in where)
    return bool(first & last) and not middle & (first | last)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Chains of up to four layers; attention is the first one, or its numbers would grow."""
    first = draw(st.sampled_from([None, *cg.schedules.names()]))
    homes = HOMES.get(first or "", tuple(range(draw(st.integers(1, 3)))))
    where = draw(places(max(homes) + 1, first in HOMES))
    names: list[str | None] = [None]  # where there is no pipeline
    if first in HOMES:
        names = [name for name, others in HOMES.items() if others == homes]
    elif len(homes) > 1:
        names = [None, *(name for name in cg.schedules.names() if name not in HOMES)]
        if len(where) == 3 and surrounds(where):
            names = [name for name in names if name not in LINES]
    chosen = [draw(layers(where[home], not i)) for i, home in enumerate(homes)]
    has_attention = chosen[0].cls is Attention
    is_stored = any(each.is_stored and dict(each.place.grid)["dp"] > 1 for each in chosen)
    return Case(
        tuple(chosen),
        WIDTH if has_attention else draw(st.integers(2, 5)),
        draw(st.integers(2, 7)),
        draw(st.sampled_from([2, 4] if len(homes) > 1 else [1, 2])),
        draw(orders(names, is_stored)),
        draw(st.sampled_from([1, 100, 400, BUCKET])),
    )


_world = virtual_world(WORLD, threads=1, scope="module")


@pytest.mark.parametrize("shard", shards(SHARDS))
def test_random_chains_train_exactly(
    shard: int, record_property: Callable[[str, object], None]
) -> None:
    """Outputs, all gradients, and parameters after each of three updates."""
    done = 0

    @of_shard(shard, 4 if scale() == 1 else 7)
    @given(case=cases())
    def search(case: Case) -> None:
        nonlocal done
        train_exactly(case)
        done += len(case.orders)

    try:
        search()
    finally:
        record_property("trainings", done)


def train_exactly(case: Case) -> None:
    """Train a chain in all its orders, each from the first numbers on, and compare."""
    made = [
        (each.cls, (number, "signs") if each.cls is Attention else (number, "signs", case.width))
        for number, each in enumerate(case.layers)
    ]
    model = Model(made)
    stages = model.on(
        [each.place for each in case.layers],
        [each.shardings for each in case.layers],
        [cg.cut(0, "dp") if each.is_stored else cg.whole for each in case.layers],
        case.bucket_bytes,
    )
    rows = case.rows * case.count
    batches = [batch(number, rows, "integers", case.width) for number in range(3)]
    moments = alone(model, rows, case.count, "integers", width=case.width)
    lowered = cg.trace(step_of(stages, case.count)).lower(*batches[0])
    first = [parameter.detach().clone() for parameter in parameters(stages)]
    for order in case.orders:
        with torch.no_grad():
            for parameter, number in zip(parameters(stages), first, strict=True):
                parameter.copy_(number)
        with lowered.compile(**order.options) as compiled:
            for number, (values, moment) in enumerate(zip(batches, moments, strict=True)):
                compare_all(stages, compiled(*values), moment, True, f"{order}, step {number}")


def parameters(stages: Sequence[Any]) -> Iterator[nn.Parameter]:
    """All pieces that this process holds."""
    for stage in stages:
        for instance in stage.instances.values():
            yield from instance.parameters()
