"""What an optimizer keeps from its constructor on is cut as its parameters are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.values.optimizer_state import move

from ...worlds import virtual_world


class Sums(torch.optim.Optimizer):
    """Goes down by the mean of all gradients so far; its state is there from the beginning."""

    def __init__(self, parameters: Any, is_shared: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for each in self.param_groups[0]["params"]:
            kept = each.detach() if is_shared else torch.zeros_like(each)
            self.state[each] = {"sum": kept, "step": torch.zeros(()), "entries": torch.zeros(2, 3)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each, kept in self.state.items():
            kept["step"] += 1
            kept["sum"].add_(each.grad)
            each.sub_(kept["sum"] / kept["step"], alpha=self.param_groups[0]["lr"])


@cg.actor
class Net(nn.Module):
    """Two layers and a scalar."""

    def __init__(self, is_scheduled: bool = False, is_shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        optimizer = Sums(self.parameters(), is_shared)
        schedule = torch.optim.lr_scheduler.ConstantLR
        self.trainer: Any = schedule(optimizer, 1.0) if is_scheduled else optimizer

    def loss(self, x: Tensor) -> Tensor:
        return (self.scale * self.down(torch.relu(self.up(x)))).square().mean()

    @cg.opaque
    def update(self) -> None:
        optimizer_of(self).step()
        optimizer_of(self).zero_grad()

    @cg.opaque
    def total(self) -> float:
        return float(sum(kept["sum"].sum() for kept in optimizer_of(self).state.values()))


def optimizer_of(net: Any) -> Sums:
    trainer = net.trainer
    return trainer if isinstance(trainer, Sums) else trainer.optimizer


PLACES: dict[str, tuple[dict[str, int], dict[str, Any], Any]] = {
    "tp": ({"tp": 2}, {"up.*": cg.cut(0, "tp"), "down.weight": cg.cut(1, "tp")}, cg.whole),
    "dp": ({"dp": 2}, {"loss(x)": cg.cut(0, "dp")}, cg.whole),
    "stored": ({"dp": 3}, {"loss(x)": cg.cut(0, "dp")}, cg.cut(0, "dp")),
}
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

_world = virtual_world(3)


def on(name: str, **how: bool) -> Any:
    axes, plan, store = PLACES[name]
    return Net.on(cg.mesh(**axes), plan=plan, store=store)(**how)  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_it_is_cut_as_its_parameter(name: str, is_scheduled: bool) -> None:
    """Also where the actor holds no more than a scheduler of the optimizer; the rest is whole."""
    net, plain = on(name, is_scheduled=is_scheduled), Net()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = net.loss(x)
        cg.backward(loss)
        net.update()
        return loss

    for _ in range(3):
        loss = plain.loss(X)
        loss.backward()
        plain.update()
        torch.testing.assert_close(step(X), loss.detach())
    for instance in net.instances.values():
        state = optimizer_of(instance).state
        assert set(state) == set(instance.parameters())
        for parameter, kept in state.items():
            assert kept["sum"].shape == parameter.shape
            assert kept["entries"].shape == (2, 3)
            assert kept["step"] == 3
    assert (net.instances[0].up.weight.shape == (7, 4)) == (name == "dp")


def test_it_is_a_piece_to_opaque_methods() -> None:
    """From the first one on, which may look at it before anything else does."""
    net = on("tp")
    with pytest.raises(cg.RemoteError, match="takes sum of a piece of a tensor that is cut"):
        cg.trace(lambda: net.total())()


def test_it_may_not_share_memory_with_a_tensor_that_is_cut() -> None:
    with pytest.raises(ValueError, match=r"'up.weight' is cut, and shares memory .* optimizer"):
        on("tp", is_shared=True)
    assert on("dp", is_shared=True).instances


def test_on_the_meta_device_it_has_no_numbers() -> None:
    axes, plan, _ = PLACES["tp"]

    @cg.actor
    class Begun(nn.Module):
        def __init__(self, optimizer: type[torch.optim.Optimizer]) -> None:
            super().__init__()
            self.up = nn.Linear(4, 7)
            self.down = nn.Linear(7, 4)
            self.optimizer = optimizer(self.parameters())  # type: ignore[call-arg]

    make = Begun.on(cg.mesh(**axes), plan=plan, init="meta")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Adagrad has made its state there") as caught:
        make(torch.optim.Adagrad)
    assert "such as AdamW" in str(caught.value)
    assert make(torch.optim.AdamW).instances[0].up.weight.shape == (3, 4)


@pytest.mark.gpu
def test_it_goes_to_a_device_with_its_parameter() -> None:
    net = Net()
    move(net, torch.device("cuda"))
    for parameter, kept in optimizer_of(net).state.items():
        assert parameter.is_cuda
        assert kept["sum"].is_cuda
        assert not kept["step"].is_cuda
    net.loss(X.cuda()).backward()
    net.update()


def test_gradients_of_the_constructor_are_on_all_ranks() -> None:
    with use_world(VirtualWorld(4)):
        net = Begun.on(cg.mesh(dp=2, tp=2), plan={"up.*": cg.cut(0, "tp")})()
        for rank, piece in net.instances.items():
            whole = Begun().up.weight.grad
            assert whole is not None
            assert torch.equal(piece.up.weight.grad, whole[:3] if rank % 2 == 0 else whole[3:])
            assert torch.equal(piece.down.bias.grad, torch.arange(4.0))


@cg.actor
class Begun(Net):
    """A net that has gradients from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.parameters():
            each.grad = torch.arange(float(each.numel())).view_as(each)
