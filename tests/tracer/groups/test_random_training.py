"""Random chains of layers on random meshes train exactly as they do in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.types import Mesh
from cg.launch.world.world import use_world
from cg.tracer.groups.gradient_buckets import BUCKET
from cg.tracer.groups.plan import Sharding

from ...sampling import examples
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
    Stage,
    train,
)

pytestmark = pytest.mark.timeout(7200)  # of thousands of draws

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

    cls: type[Stage]
    place: Mesh
    plan: str
    is_stored: bool

    @property
    def shardings(self) -> Mapping[str, Sharding]:
        return (OF_ATTENTION if self.cls is Attention else OF_AN_MLP)[self.plan]


@dataclass(frozen=True)
class Case:
    """What is drawn.

    Attributes:
        layers: of the chain.
        width: of the layers. This and `rows` are at least 2: a cut dimension of size 1 cannot be
            viewed together with another one.
        rows: of a microbatch.
        count: of microbatches.
        schedule: None for the order in which the step is written.
        keep, prefetch: of parameters that are cut where they rest, as `cg.fsdp` takes them.
        bucket_bytes: as `Cls.on` takes it; from a bucket for each gradient to one for all.
    """

    layers: tuple[Layer, ...]
    width: int
    rows: int
    count: int
    schedule: str | None
    keep: str
    prefetch: int
    bucket_bytes: int

    @property
    def is_stored(self) -> bool:
        """True if a parameter rests in smaller pieces than those in which it is used."""
        return any(each.is_stored and dict(each.place.grid)["dp"] > 1 for each in self.layers)


@st.composite
def layers(draw: st.DrawFn, place: Mesh, has_attention: bool) -> Layer:
    axes = dict(place.grid)
    cls: type[Stage] = Attention if has_attention and draw(st.booleans()) else Mlp
    names = sorted(OF_ATTENTION if cls is Attention else OF_AN_MLP)
    if HEADS % axes["tp"] and cls is Attention:
        names.remove("heads")
    plan = draw(st.sampled_from(names))
    return Layer(cls, place, plan, plan != "two axes of columns" and draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Chains of up to four layers; attention is the first one, or its numbers would grow."""
    schedule = draw(st.sampled_from([None, *cg.schedules.names()]))
    homes = HOMES.get(schedule or "", tuple(range(draw(st.integers(1, 3)))))
    if len(homes) == 1:
        schedule = None  # there is no pipeline
    ranks = draw(st.permutations(range(WORLD)))
    places = []
    for _ in range(max(homes) + 1):
        if schedule in HOMES:  # its meshes have no rank in common
            dp, tp = draw(st.sampled_from([grid for grid in GRIDS if math.prod(grid) < WORLD - 1]))
            dp, tp = (dp, tp) if dp * tp <= len(ranks) - (not places) else (1, 1)
            mine, ranks = ranks[: dp * tp], ranks[dp * tp :]
        else:
            dp, tp = draw(st.sampled_from(GRIDS))
            mine = draw(st.permutations(ranks))[: dp * tp]
        places.append(cg.mesh(mine, dp=dp, tp=tp))
    chosen = [draw(layers(places[home], not i)) for i, home in enumerate(homes)]
    has_attention = chosen[0].cls is Attention
    return Case(
        tuple(chosen),
        WIDTH if has_attention else draw(st.integers(2, 5)),
        draw(st.integers(2, 7)),
        draw(st.sampled_from([2, 4] if schedule else [1, 2])),
        schedule,
        draw(st.sampled_from(["step", "task"])),
        draw(st.integers(0, 3)),
        draw(st.sampled_from([1, 100, 400, BUCKET])),
    )


@pytest.fixture(autouse=True, scope="module")
def _world() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with use_world(VirtualWorld(WORLD)):
        yield
    torch.set_num_threads(threads)


@given(case=cases())
@examples(20)
def test_a_random_chain_trains_exactly(case: Case) -> None:
    """Outputs, all gradients, and parameters after each of three updates."""
    model = Model(
        [
            (each.cls, (seed, "signs") if each.cls is Attention else (seed, "signs", case.width))
            for seed, each in enumerate(case.layers)
        ]
    )
    stages = model.on(
        [each.place for each in case.layers],
        [each.shardings for each in case.layers],
        [cg.cut(0, "dp") if each.is_stored else cg.whole for each in case.layers],
        case.bucket_bytes,
    )
    rows = case.rows * case.count
    fsdp = cg.fsdp(keep=case.keep, prefetch=case.prefetch) if case.is_stored else None
    train(model, stages, rows, case.count, case.schedule, "integers", width=case.width, fsdp=fsdp)
