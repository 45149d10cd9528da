"""Where a device's graph leaves gradients: no other graph writes there, and they take no room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cg
from cg.backends.fake.device import FakeDevice
from cg.launch.world import world as worlds
from cg.launch.world.single_rank_world import SingleRankWorld
from tests.backends.devices.patience import loose_device
from tests.backends.memory import peak_of

from ..sampling import scaled

SIDE = 32
"""Inputs, weights and what is saved have one size, so that one serves as memory for another."""


class Layers(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 1.5
        return x

    def loss(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()


Actor = cg.actor(Layers)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    found = loose_device()
    with worlds.use_world(SingleRankWorld(found)):
        yield found


def training(actor: Any) -> Any:
    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss: Tensor = actor.loss(x)
        cg.backward(loss)
        return loss

    return step.lower(x_of(0)).compile()


def x_of(number: int) -> Tensor:
    return torch.full((SIDE, SIDE), 0.01 * (number + 1))


def test_a_graph_that_is_recorded_takes_no_more_memory_than_its_program(
    device: FakeDevice,
) -> None:
    actor, x = Actor.on(0)(4), x_of(0)
    with training(actor) as compiled:
        peaks, captures = [], [0]
        for _ in range(5):
            actor.local.zero_grad()
            peaks.append(peak_of(lambda: compiled(x)))
            (segment,) = compiled._runtimes[0].bound[0][0].segments
            captures.append(segment.captures)
        assert segment.replays == 3
    # The allocator may bring the input to one place twice in a row late: that is another graph.
    is_captured = [after > before for before, after in pairwise(captures)]
    assert is_captured[:3] == [False, False, True]
    assert captures[-1] <= 2
    program, recorded, replayed = peaks[1], peaks[2], peaks[is_captured.index(False, 3)]
    # A fake capture takes memory for a moment to find out about a result, and of the host's.
    assert recorded <= program + 2 * x.nbytes + 64
    assert replayed <= 2 * x.nbytes + 64


@dataclass
class Trained:
    """Layers that a program trains, and the same by themselves."""

    layers: int
    held: list[Tensor] | None = None

    def __post_init__(self) -> None:
        self.actor: Any = Actor.on(0)(self.layers)
        self.plain = Layers(self.layers)
        self.program = training(self.actor)

    def do(self, op: str, x: Tensor) -> None:
        """What a caller may do: a new step, one that adds gradients, or something between them."""
        for module in (self.actor.local, self.plain):
            if op == "step":
                module.zero_grad()
            elif op == "zero":
                module.zero_grad(set_to_none=False)
            elif op == "forget one":
                next(module.parameters()).grad = None
        if op == "hold":
            self.held = [] if self.held is None else None
        elif op in ("step", "add"):
            right = self.plain.loss(x)
            right.backward()
            loss = self.program(x)
            torch.testing.assert_close(loss.cpu(), right.detach())
            if self.held is not None:
                self.held.append(loss)

    def check(self) -> None:
        """All gradients are right."""
        pairs = zip(self.actor.local.parameters(), self.plain.parameters(), strict=True)
        for mine, right in pairs:
            gradient = None if mine.grad is None else mine.grad.cpu()
            torch.testing.assert_close(gradient, right.grad)


OPS = st.tuples(
    st.booleans(), st.sampled_from(["step", "step", "add", "zero", "forget one", "hold"])
)


@settings(max_examples=scaled(15), deadline=None)
@given(st.lists(OPS, max_size=12))
def test_gradients_are_those_of_autograd_whatever_is_replayed_between(
    ops: list[tuple[bool, str]],
) -> None:
    """The graphs of two programs share a pool. One that is larger, and comes first, writes to more
    of it than the other one saves, so that gradients would lie where it works.
    """
    begin = [(False, "step")] * 3 + [(True, "step")] * 3 + [(False, "step")]
    with worlds.use_world(SingleRankWorld(loose_device())), ExitStack() as stack:
        both = [Trained(8), Trained(4)]
        for each in both:
            stack.enter_context(each.program)
        for number, (which, op) in enumerate([*begin, *ops]):
            both[which].do(op, x_of(number))
            for each in both:
                each.check()
