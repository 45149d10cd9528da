"""Traces of methods whose shapes or checks follow from values serve a later start, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.api import step_function
from cg.launch.world.world import use_world
from cg.tracer.method.alike import Traces

from ..tracer.asserting import Asserting
from ..tracer.test_constant_values import Shown
from ..tracer.test_rows import WIDTH, Chosen
from .edited import MemoryStore, described

CASES: dict[str, tuple[type[nn.Module], str, tuple[int, ...]]] = {
    "rows": (Chosen, "by_tensors", (6, WIDTH)),
    "rows by numbers": (Chosen, "by_numbers", (6, WIDTH)),
    "assertion": (Asserting, "number", (2, 3)),
    "constants": (Shown, "forward", (5, 3)),
}


def traced(case: str, store: MemoryStore | None) -> str:
    """All that a trace of a step holds, as text."""
    kind, method, shape = CASES[case]
    with use_world(VirtualWorld(1)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_function, "new_traces", lambda: Traces(store))
        actor: Any = cg.actor(kind).on(0)()

        @cg.trace
        def step(x: Tensor) -> Tensor:
            loss: Tensor = getattr(actor, method)(x).sum()
            if any(True for _ in actor.local.parameters()):
                cg.backward(loss)
            return loss

        text = described(step.lower(torch.zeros(shape)).trace).replace(actor.name, "actor")
        if store is not None:
            store.flush()
        return text


@pytest.mark.parametrize("case", CASES)
def test_a_later_start_has_the_same_trace(case: str) -> None:
    fresh, store = traced(case, None), MemoryStore()
    assert traced(case, store) == fresh
    assert store.kept + len(store.reasons) > 0
    kept = store.kept
    assert traced(case, store) == fresh
    assert store.taken == kept
    assert ("_assert_async" in fresh) == (case == "assertion")


class Counted(nn.Module):
    """A mean over as many rows as a constant shows."""

    shown = (True, False, True)

    def forward(self, x: Tensor) -> Tensor:
        return x[torch.where(torch.tensor(self.shown))[0]].sum(0)


def test_another_constant_has_another_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "counted", (Counted, "forward", (3, 2)))
    store = MemoryStore()
    before = traced("counted", store)
    monkeypatch.setattr(Counted, "shown", (True, True, True))
    assert traced("counted", store) == traced("counted", None) != before
