"""`cg.via` in a step: recorded, differentiated, and the value itself outside of one."""

from __future__ import annotations

import pytest
import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world


@cg.actor
class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w).sum()


def test_value_and_gradient_take_the_way_that_was_chosen() -> None:
    with use_world(VirtualWorld(2)):
        a, b = Scale.on(0)(), Scale.on(1)()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = b.loss(cg.via(a.forward(x), "mpi"))
            cg.backward(loss)
            return loss

        compiled = step.lower(torch.ones(4)).compile()
        edges = [c for c in compiled.module.channels.values() if not c.collective]
        ways = {channel.ranks: channel.via for channel in edges}
        assert (ways[0, 1], ways[1, 0]) == ("mpi", "mpi")
        assert compiled(torch.ones(4)).item() == 16.0
        assert a.local.w.grad.tolist() == [2.0] * 4
        assert b.local.w.grad.tolist() == [2.0] * 4


def test_outside_of_a_step_and_by_auto_it_is_the_value_itself() -> None:
    x = torch.ones(2)
    assert cg.via(x, "nccl") is x
    with use_world(VirtualWorld(2)):
        a, b = Scale.on(0)(), Scale.on(1)()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            return b.forward(cg.via(a.forward(x), "auto"))

        assert "transfer" not in step.lower(torch.ones(4)).as_text()


def test_what_cannot_be_sent_on_a_way() -> None:
    with use_world(VirtualWorld(2)):
        a = Scale.on(0)()

        @cg.trace
        def unnamed(x: torch.Tensor) -> torch.Tensor:
            return cg.via(a.forward(x), 3)  # type: ignore[arg-type]

        @cg.trace
        def plain(x: torch.Tensor) -> int:
            return cg.via(3, "nccl")

        with pytest.raises(cg.TraceError, match="via with the transport 3"):
            unnamed.lower(torch.ones(4))
        with pytest.raises(cg.TraceError, match="via of a int, which is not a value of the st"):
            plain.lower(torch.ones(4))


def test_a_transport_that_nobody_knows() -> None:
    with use_world(VirtualWorld(2)):
        a, b = Scale.on(0)(), Scale.on(1)()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            return b.forward(cg.via(a.forward(x), "carrier-pigeon"))

        @cg.trace
        def at_home(x: torch.Tensor) -> torch.Tensor:
            return a.forward(cg.via(a.forward(x), "carrier-pigeon"))

        for wrong in (step, at_home):
            lowered = wrong.lower(torch.ones(4))
            with pytest.raises(cg.IRError) as caught:
                lowered.compile()
            text = str(caught.value)
            assert "no transport 'carrier-pigeon'; known are: auto, cpu, fake, hccl" in text
            line = wrong.__wrapped__.__code__.co_firstlineno + 2
            assert f"written at {__file__}:{line}, in {wrong.__name__}:\n" in text
            assert "(by an entry point of group 'cg.communicators') on all ranks" in text
