"""A program that is one process on one device: its steps are captured and replayed there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.base import World
from cg.backends.devices import find
from cg.backends.fake.device import FakeDevice
from cg.launch.environment.config import Config
from cg.launch.world import devices
from cg.launch.world import world as worlds
from cg.launch.world.devices import DeviceError, VisibleDevices, for_process
from cg.launch.world.single_rank_world import SingleRankWorld
from tests.backends.devices.patience import loose_device

WIDTH = 8
EXECUTIONS = 6


ON_A_GPU = pytest.param(lambda: find.make("cuda", 0), id="gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=[pytest.param(FakeDevice, id="fake"), ON_A_GPU])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with worlds.use_world(SingleRankWorld(request.param())) as found:
        yield found


def check(mine: Tensor | None, right: Tensor | None) -> None:
    """Both are equal, but for rounding, wherever they are."""
    assert mine is not None
    torch.testing.assert_close(mine.cpu(), right, rtol=1e-5, atol=1e-5)


class Layer(nn.Module):
    """A layer with a memory, of as many operators as a graph takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.two(torch.relu(self.one(x)) * 2)) / 3

    def remember(self, x: Tensor) -> Tensor:
        y = self.forward(x)
        self.seen.mul_(0.5).add_(y.detach().sum(0))
        return y * self.seen

    def loss(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()


Actor = cg.actor(Layer)


def x_of(number: int) -> Tensor:
    return torch.full((3, WIDTH), 1.0 + number)


def replays(executables: Any) -> int:
    segments = [segment for each in executables for segment in each.segments]
    assert segments
    assert all(each.reason is None for each in segments)
    return sum(each.replays for each in segments)


def test_a_step_is_replayed_and_gives_what_the_module_gives(world: World) -> None:
    layer, plain = Actor.on(0)(), Layer()
    step = cg.trace(lambda x: layer.remember(x))
    with torch.no_grad(), step.lower(x_of(0)).compile() as compiled:
        for number in range(EXECUTIONS):
            check(compiled(x_of(number)), plain.remember(x_of(number)))
        assert replays(compiled._runtimes[0].bound[0]) == EXECUTIONS - 2
    check(layer.local.seen, plain.seen)


def test_a_backward_is_replayed_and_gives_the_gradients_of_autograd(world: World) -> None:
    layer, plain = Actor.on(0)(), Layer()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = layer.loss(x)
        cg.backward(loss)
        return loss

    with step.lower(x_of(0)).compile() as compiled:
        for number in range(EXECUTIONS):
            for module in (layer.local, plain):
                module.zero_grad(set_to_none=True)
            plain.loss(x_of(number)).backward()
            check(compiled(x_of(number)), plain.loss(x_of(number)))
            for mine, right in zip(layer.local.parameters(), plain.parameters(), strict=True):
                check(mine.grad, right.grad)
        assert replays(compiled._runtimes[0].bound[0]) == EXECUTIONS - 2


def test_a_driven_graph_with_state_is_replayed(world: World) -> None:
    layer, plain = Actor.on(0)(), Layer()
    carried = cg.carry(torch.zeros(3, WIDTH), on=0)

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x: Tensor) -> Tensor:
        y = layer.remember(x + carried.get())
        carried.set(y)
        return y

    before = torch.zeros(3, WIDTH)
    with torch.no_grad(), step.lower(x_of(0)).compile(max_inflight=2) as graph:
        futures = [graph.execute(x_of(number)) for number in range(EXECUTIONS)]
        for number, future in enumerate(futures):
            before = plain.remember(x_of(number) + before)
            check(future.result(), before)
        contexts = graph._open_graph.graph.contexts[0]
        instances = [each for context in contexts for each in context.instances]
        assert replays(instances) == EXECUTIONS - 2  # each ends at once, and all are of one context


def test_a_method_that_raises_is_an_error_of_its_execution_alone(world: World) -> None:
    @cg.actor
    class Picky:
        @cg.opaque
        def take(self, x: Tensor) -> Tensor:
            if x.sum() > 100:
                raise ValueError("too much")
            return x

    actor = Picky.on(0)()
    step = cg.trace(lambda x: actor.take(x))
    with step.lower(x_of(0)).compile() as compiled:
        with pytest.raises(cg.RemoteError, match="too much"):
            compiled(x_of(99))
        check(compiled(x_of(1)), x_of(1))


def test_a_process_that_is_alone_is_one_rank_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "look", lambda wanted, _: VisibleDevices(wanted, "cuda", ("a",)))
    monkeypatch.setattr(devices, "for_process", lambda sight, current: loose_device())
    for config in (Config(), Config(ranks=1)):
        world = worlds.start(config)
        assert isinstance(world, SingleRankWorld)
        assert (world.rank, world.size, world.device is None) == (0, 1, False)
    assert worlds.start(Config(ranks=2)).is_virtual
    assert worlds.start(Config(bind_devices=False)).is_virtual


def test_it_takes_the_device_that_is_torchs_current_one() -> None:
    def make(kind: str, index: int) -> Any:
        return f"{kind}:{index}"

    sight = VisibleDevices("auto", "cuda", ("a", "b", "c"))
    assert for_process(sight, lambda: 2, make) == "cuda:2"  # type: ignore[comparison-overlap]
    assert for_process(VisibleDevices("cpu"), lambda: 2, make) is None
    with pytest.raises(DeviceError, match="CG_DEVICE=cuda asks for an accelerator that this"):
        for_process(VisibleDevices("cuda"), lambda: 0, make)


def test_there_is_no_other_rank() -> None:
    world = SingleRankWorld(loose_device())
    assert world.allgather("a") == ["a"]
    assert world.broadcast("a", 0) == "a"
    assert world.plays(0)
    assert not world.plays(1)
    assert world.look([0], 1.0) == {}
    with pytest.raises(ValueError, match="root 1 is not a rank of 1"):
        world.broadcast("a", 1)


class OlderAdamW(torch.optim.AdamW):
    """Makes the numbers of steps on torch's default device, as torch before 2.13 does."""

    def step(self, closure: Any = None) -> Any:
        is_first = not self.state
        loss = super().step(closure)
        for kept in self.state.values() if is_first else ():
            kept["step"] = kept["step"].to(torch.zeros(()).device)
        return loss


class Trained(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = OlderAdamW(self.parameters(), lr=0.1)

    @cg.opaque
    def update(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize("world", [FakeDevice], indirect=True)
def test_an_optimizer_counts_its_steps_on_the_host(world: World) -> None:
    """It reads the numbers at every step, and would wait for the device."""
    layer = cg.actor(Trained).on(0)()

    @cg.trace
    def train(x: Tensor) -> Tensor:
        loss = layer.loss(x)
        cg.backward(loss)
        layer.update()
        return loss

    for number in range(1, 4):
        train(torch.ones(2, WIDTH))
        counts = [kept["step"] for kept in layer.local.optimizer.state.values()]
        assert [count.device.type for count in counts] == ["cpu"] * len(counts)
        assert [int(count) for count in counts] == [number] * len(counts)
    assert counts
