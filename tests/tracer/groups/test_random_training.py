"""Random chains of layers on random meshes train exactly as they do in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.types import Mesh
from cg.launch.world.world import use_world
from cg.tracer.groups.plan import Sharding

from ...sampling import examples, scale
from .training import MLP_PLAN, ROWS, Mlp, Model, train

pytestmark = pytest.mark.timeout(900)

WORLD = 6
ALL = "forward(x)|loss(h)|loss(y)"
PLANS: Mapping[str, Mapping[str, Sharding]] = {
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


@dataclass(frozen=True)
class Case:
    """What is drawn.

    Attributes:
        places: the mesh of each stage.
        plans: the name of each stage's plan.
        width: of the layers. This and `rows` are at least 2: a cut dimension of size 1 cannot be
            viewed together with another one.
        rows: of a microbatch.
        count: of microbatches.
        schedule: None for the order in which the step is written.
        store: how the parameters of all stages are cut where they rest.
        keep, prefetch: as `cg.fsdp` takes them.
    """

    places: tuple[Mesh, ...]
    plans: tuple[str, ...]
    width: int
    rows: int
    count: int
    schedule: str | None
    store: Sharding = cg.whole
    keep: str = "auto"
    prefetch: int = 1


STORES = (cg.cut(0, "dp"), cg.cut(-1, "dp"))
STORABLE = sorted(set(PLANS) - {"two axes of columns"})
"""Plans that cut no weight along dp."""


@st.composite
def stored(draw: st.DrawFn) -> Case:
    """Cases whose parameters are stored in pieces."""
    case = draw(cases(STORABLE))
    return replace(
        case,
        store=draw(st.sampled_from(STORES)),
        keep=draw(st.sampled_from(["step", "task"])),
        prefetch=draw(st.integers(0, 3)),
    )


@st.composite
def cases(draw: st.DrawFn, names: Sequence[str] = tuple(sorted(PLANS))) -> Case:
    stages = draw(st.integers(1, 3))
    places, plans = [], []
    for _ in range(stages):
        dp, tp = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (2, 2), (3, 2)]))
        ranks = draw(st.permutations(range(WORLD)))[: dp * tp]
        places.append(cg.mesh(ranks, dp=dp, tp=tp))
        plans.append(draw(st.sampled_from(names)))
    schedules = [None, "gpipe", "1f1b", "zb-h1", "zb-h2"] if stages > 1 else [None]
    return Case(
        tuple(places),
        tuple(plans),
        draw(st.integers(2, 5)),
        draw(st.integers(2, 7)),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from(schedules)),
    )


@pytest.fixture(autouse=True, scope="module")
def _world() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with use_world(VirtualWorld(WORLD)):
        yield
    torch.set_num_threads(threads)


@given(case=cases())
@examples(20 if scale() == 1 else 100)
def test_a_random_chain_trains_exactly(case: Case) -> None:
    check(case)


@given(case=stored())
@examples(6 if scale() == 1 else 80)
def test_a_random_chain_of_stored_parameters_trains_exactly(case: Case) -> None:
    assume(any(dict(place.grid)["dp"] > 1 for place in case.places))
    check(case, cg.fsdp(keep=case.keep, prefetch=case.prefetch))


def check(case: Case, fsdp: Any = None) -> None:
    """Train the chain, and the same in one process."""
    model = Model([(Mlp, (seed, "signs", case.width)) for seed in range(len(case.places))])
    stages = model.on(case.places, [PLANS[name] for name in case.plans], case.store)
    train(
        model,
        stages,
        case.rows * case.count,
        case.count,
        case.schedule,
        "integers",
        steps=2,
        width=case.width,
        fsdp=fsdp,
    )
