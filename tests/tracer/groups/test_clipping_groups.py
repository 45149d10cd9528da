"""Test norms and clipping of the gradients of actors on meshes against one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

D = 6
PLAN = {
    "forward(x)": cg.cut(0, "dp"),
    "up.*": cg.cut(0, "tp"),
    "down.weight": cg.cut(1, "tp"),
}
X = torch.randn(5, D, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@cg.actor
class Actor(Layer):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.opt = torch.optim.SGD(self.parameters(), lr=0.1)

    def update(self) -> None:
        self.opt.step()
        self.opt.zero_grad()

    @cg.opaque(fake=lambda self: torch.empty(()))
    def size(self) -> torch.Tensor:
        return self.up.weight.norm()


@cg.actor
class Frozen(Layer):
    """It trains nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.to(torch.bfloat16).requires_grad_(False)


@cg.actor
class Half(Layer):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.to(torch.bfloat16)


@pytest.mark.parametrize("place", ["rank", "mesh"])
def test_an_actor_that_trains_nothing_has_no_norm(place: str) -> None:
    """The type of the norm is that of the others' parameters."""
    with use_world(VirtualWorld(3)):
        frozen = Frozen.on(0)(1) if place == "rank" else Frozen.on(cg.mesh(dp=2), plan={})(1)
        other = Half.on(2)(2)

        @cg.trace
        def step(x: torch.Tensor) -> list[torch.Tensor]:
            loss = other.forward(frozen.forward(x)).square().mean()
            cg.backward(loss)
            orders = ([other, frozen], [frozen, other], [frozen])
            return [cg.clip_grad_norm(actors, math.inf) for actors in orders]

        found = step(X.bfloat16())
        plain, loss = Half(2), Frozen(1)(X.bfloat16())
        plain(loss).square().mean().backward()
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), math.inf)
        assert found == [wanted, wanted, torch.tensor(0.0)]
        assert [norm.dtype for norm in found] == [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("norm_type", [0, 0.5, 1.0, 2.0, 3, math.inf])
def test_the_norm_of_pieces_is_the_norm_of_the_whole(norm_type: float) -> None:
    with use_world(VirtualWorld(5)):
        one = Actor.on(cg.mesh(dp=2, tp=2), plan=PLAN)(1)
        other = Actor.on(4)(2)

        @cg.trace
        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = other.forward(one.forward(x)).square().mean()
            cg.backward(loss)
            norm = cg.clip_grad_norm([one, other], 0.1, norm_type)
            one.update()
            other.update()
            return loss, norm

        compiled = step.lower(X).compile()
        mine = [compiled(X) for _ in range(3)]
    first, second = Actor(1), Actor(2)
    for loss, norm in mine:
        right = second(first(X)).square().mean()
        right.backward()
        both = [*first.parameters(), *second.parameters()]
        total = nn.utils.clip_grad_norm_(both, 0.1, norm_type)
        first.update()
        second.update()
        torch.testing.assert_close(loss, right.detach())
        torch.testing.assert_close(norm, total)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [0, 1.0, 2.0, 3.0, math.inf])
def test_norms_of_16_bits_are_added_up_in_32(norm_type: float, dtype: torch.dtype) -> None:
    """The square of a float16 norm above 256 is no float16 number, and gradients became 0."""

    @cg.actor
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(7, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum()

    x = torch.tensor([300, -400, 512, 0, 1, 2.5, 1000], dtype=dtype)
    with use_world(VirtualWorld(2)):
        weight = Weight.on(cg.mesh(tp=2), plan={"weight": cg.cut(0, "tp")})()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            cg.backward(weight.forward(x))
            return cg.clip_grad_norm([weight], 1.0, norm_type)

        total = step.lower(x).compile()(x)
        pieces = [piece.weight.grad for piece in weight.instances.values()]
    plain = Weight()
    plain(x).backward()
    right = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
    torch.testing.assert_close(total, right)
    torch.testing.assert_close(torch.cat(pieces), plain.weight.grad)


@pytest.mark.parametrize("norm_type", [-1.0, -math.inf, math.nan])
def test_a_norm_below_0_is_refused(norm_type: float) -> None:
    with use_world(VirtualWorld(5)):
        one = Actor.on(cg.mesh(dp=2, tp=2), plan=PLAN)(1)

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            cg.backward(one.forward(x).sum())
            return cg.clip_grad_norm([one], 0.1, norm_type)

        with pytest.raises(cg.TraceError, match=f"norm_type={norm_type}") as info:
            step.lower(X)
    assert "give 2.0, 1.0, math.inf" in str(info.value)


def test_an_opaque_method_of_pieces_returns_no_tensor() -> None:
    with use_world(VirtualWorld(4)):
        actor = Actor.on(cg.mesh(dp=2, tp=2), plan=PLAN)(1)
        step = cg.trace(lambda: actor.size())
        with pytest.raises(cg.TraceError, match="calls it with pieces") as info:
            step.lower()
    assert "let a traced method compute" in str(info.value)


def test_norms_of_pieces_are_refused() -> None:
    class Clipping(Layer):
        def __init__(self) -> None:
            super().__init__(1)
            self.opt = torch.optim.SGD(self.parameters(), lr=0.1)

        def update(self) -> None:
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            self.opt.step()

    with use_world(VirtualWorld(4)):
        actor = cg.actor(Clipping).on(cg.mesh(dp=2, tp=2), plan=PLAN)()

        @cg.trace
        def step(x: torch.Tensor) -> None:
            cg.backward(actor.forward(x).sum())
            actor.update()

        with pytest.raises(cg.RemoteError, match="takes _foreach_norm of a piece") as info:
            step(X)
    assert "cg.clip_grad_norm([actor], max_norm)" in str(info.value)


def test_optimizers_of_whole_tensors_are_refused() -> None:
    class Stepping(Layer):
        def __init__(self) -> None:
            super().__init__(1)
            self.opt = torch.optim.Adafactor(self.parameters())

    with use_world(VirtualWorld(4)), pytest.raises(ValueError, match="by Adafactor, which looks"):
        cg.actor(Stepping).on(cg.mesh(dp=2, tp=2), plan=PLAN)()
