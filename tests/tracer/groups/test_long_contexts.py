"""Layers of attention train on meshes that cut the sequence as they do in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

import cg
from cg.ir.types import Mesh
from cg.tracer.values.plan import AttentionForm

from ...worlds import virtual_world
from .training import Attention, Model, train

FORMS: dict[str, tuple[AttentionForm | None, Literal["rows", "zigzag"]]] = {
    "best": (None, "rows"),
    "ring": ("ring", "rows"),
    "zigzag-ring": ("ring", "zigzag"),
    "zigzag-gather": ("gather", "zigzag"),
}


def plan_of(form: str) -> cg.ShardingPlan:
    """A plan that cuts rows, tokens and heads."""
    attention, order = FORMS[form]
    shardings = {
        "forward(x)|loss(h)|loss(y)": cg.cut(0, "dp") & cg.cut(1, "cp", order=order),
        "[qkv].weight": cg.cut(0, "tp"),
        "o.weight": cg.cut(1, "tp"),
    }
    return cg.plan(shardings, attention=attention)


MESHES: dict[str, Callable[[], tuple[Mesh, ...]]] = {
    "cp2": lambda: (cg.mesh(dp=1, cp=2, tp=1),),
    "cp3": lambda: (cg.mesh(dp=1, cp=3, tp=1),),
    "cp4": lambda: (cg.mesh(dp=1, cp=4, tp=1),),  # with an empty piece, of three tokens
    "cp2-tp2": lambda: (cg.mesh(dp=1, cp=2, tp=2),),
    "dp2-cp2": lambda: (cg.mesh(dp=2, cp=2, tp=1),),
    "dp2-cp3": lambda: (cg.mesh(dp=2, cp=3, tp=1),),
    "pp2-cp2": lambda: cg.mesh(pp=2, dp=1, cp=2, tp=1).unbind("pp"),
    "pp2-dp2-cp2": lambda: cg.mesh(pp=2, dp=2, cp=2, tp=1).unbind("pp"),
    "3-and-1": lambda: (cg.mesh(dp=1, cp=3, tp=1), cg.mesh([3], dp=1, cp=1, tp=1)),
}

_world = virtual_world(8, threads=1)


@pytest.mark.grid(1)
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MESHES)
def test_training(name: str, form: str, is_stored: bool) -> None:
    """Parameters may rest in pieces along the axis of the sequence, as along that of rows."""
    places = MESHES[name]()
    model = Model([(Attention, (seed,)) for seed in range(len(places))])
    store = cg.cut(0, "dp", "cp") if is_stored else cg.whole
    stages = model.on(places, plans=[plan_of(form)] * len(places), store=store)
    schedule = "zb-h1" if len(places) > 1 else None
    train(model, stages, 4, 2, schedule, "reals", steps=2)
