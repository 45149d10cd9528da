"""A resumed run draws the random numbers of an uninterrupted one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg

from ..worlds import virtual_world


@cg.actor
class Part(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 4)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), 0.5)

    def loss(self, h: Tensor) -> Tensor:
        return self.forward(h).square().mean()

    @cg.opaque
    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


_world = virtual_world(2)


class Run:
    """A model and its training step, as a process makes them when it starts."""

    def __init__(self) -> None:
        self.parts = parts = [Part.on(rank)(rank) for rank in range(2)]

        @cg.trace
        def train(x: Tensor) -> Tensor:
            loss = parts[1].loss(parts[0].forward(x))
            cg.backward(loss)
            for part in parts:
                part.update()
            return loss

        self.step = train

    def state(self) -> list[Any]:
        return [(part.local.state_dict(), part.local.optimizer.state_dict()) for part in self.parts]

    def load(self, state: list[Any]) -> None:
        for part, (model, optimizer) in zip(self.parts, state, strict=True):
            part.local.load_state_dict(model)
            part.local.optimizer.load_state_dict(optimizer)


LARGE, SMALL = torch.ones(6, 4), torch.ones(3, 4)
CALLS = [LARGE, LARGE, SMALL, LARGE, SMALL, SMALL, LARGE, LARGE]


def stored(state: dict[str, int]) -> dict[str, int]:
    loaded: dict[str, int] = json.loads(json.dumps(state))
    return loaded


@pytest.mark.grid(1)
@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("kind", ["called", "compiled", "cleared"])
def test_losses_are_bit_equal(kind: str, at: int) -> None:
    """The two ways to run: the step is called as it is, or compiled for both signatures."""

    def callee(run: Run) -> Any:
        return run.step.lower_many([LARGE, SMALL]).compile() if kind == "compiled" else run.step

    whole = Run()
    call = callee(whole)
    expected = [float(call(x)) for x in CALLS]
    begun = Run()
    call = callee(begun)
    losses = [float(call(x)) for x in CALLS[:at]]
    if kind == "cleared":
        call.clear_cache()  # which forgets no number
        losses += [float(call(x)) for x in CALLS[at:]]
    else:
        resumed = Run()
        resumed.load(begun.state())
        again = callee(resumed)
        again.load_state_dict(stored(call.state_dict()))
        losses += [float(again(x)) for x in CALLS[at:]]
    assert losses == expected


def test_without_its_state_a_resumed_run_differs() -> None:
    whole = Run()
    expected = [float(whole.step(x)) for x in CALLS]
    begun, resumed = Run(), Run()
    for x in CALLS[:3]:
        begun.step(x)
    resumed.load(begun.state())
    assert [float(resumed.step(x)) for x in CALLS[3:]] != expected[3:]


def test_variants_draw_different_numbers() -> None:
    run = Run()

    @cg.trace
    def draw(x: Tensor) -> Tensor:
        return run.parts[0].forward(x)

    assert not torch.equal(draw(LARGE)[:3], draw(SMALL))
    assert draw.state_dict() == {"seed": 0, "calls": 2}


def test_a_step_that_was_never_called_itself_has_no_state() -> None:
    run = Run()
    compiled = run.step.lower(CALLS[0]).compile()
    assert run.step.state_dict()["calls"] == 0
    for x in CALLS[:2]:
        compiled(x)
    message = r"step train was never called itself, .* was, 2 times, and counts for itself"
    with pytest.raises(RuntimeError, match=message):
        run.step.state_dict()
    run.step(CALLS[2])
    assert run.step.state_dict()["calls"] == 1
    assert compiled.state_dict()["calls"] == 2


def test_driven_executions() -> None:
    parts = Run().parts

    @cg.trace(inputs=cg.on(0))
    def draw(x: Tensor) -> Tensor:
        return parts[1].forward(parts[0].forward(x))

    graph, again = draw.lower(LARGE).compile(), draw.lower(LARGE).compile()
    drawn = [graph.execute(LARGE).result() for _ in range(4)]
    graph(LARGE)
    assert graph.state_dict() == {"seed": 0, "calls": 1, "executions": 4}
    again.load_state_dict(stored(graph.state_dict()) | {"executions": 2})
    assert torch.equal(again.execute(LARGE).result(), drawn[2])
    assert torch.equal(again.execute(LARGE).result(), drawn[3])
    assert torch.equal(again(LARGE), graph(LARGE))


def test_a_state_of_another_run_is_refused() -> None:
    step = Run().step
    compiled = step.lower(LARGE).compile(seed=3)
    with pytest.raises(ValueError, match=r"with seed 4, and this one has seed 3.*CG_SEED=4"):
        compiled.load_state_dict({"seed": 4, "calls": 1})
    with pytest.raises(ValueError, match="with calls, seed, and was given nothing"):
        step.load_state_dict({})
    with pytest.raises(ValueError, match="and was given calls, executions, seed"):
        compiled.load_state_dict({"seed": 3, "calls": 1, "executions": 1})
    with pytest.raises(TypeError, match=r"calls='2' in the state of step train: an int"):
        compiled.load_state_dict({"seed": 3, "calls": "2"})
    with pytest.raises(TypeError, match="at least 0"):
        compiled.load_state_dict({"seed": 3, "calls": -1})
    assert compiled.state_dict() == {"seed": 3, "calls": 0}


def test_an_optimistic_step() -> None:
    def make() -> Any:
        parts = [Part.on(rank)(rank) for rank in range(2)]

        @cg.trace
        def train(x: Tensor) -> Tensor:
            loss = parts[1].loss(parts[0].forward(x))
            cg.backward(loss)
            cg.clip_grad_norm(parts, 1e9)
            return loss

        return train.lower(LARGE).compile_optimistic()

    whole, begun, resumed = make(), make(), make()
    expected = [float(whole(LARGE)) for _ in range(4)]
    losses = [float(begun(LARGE)) for _ in range(2)]
    resumed.load_state_dict(stored(begun.state_dict()))
    assert losses + [float(resumed(LARGE)) for _ in range(2)] == expected
