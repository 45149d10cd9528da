"""State that rests in the memory of the host: the same bits, and where it is when.

With "host-state" that is what optimizers keep, with "host" parameters, too.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.fake.device import FakeDevice
from cg.backends.virtual.world import VirtualWorld
from cg.ir.ops import Call, CopyStart
from cg.launch.world import world as worlds
from cg.launch.world.single_rank_world import SingleRankWorld
from cg.tracer.values import optimizer_state
from tests.backends.devices.patience import loose_device

WIDTH, ROWS = 8, 16


class Layer(nn.Module):
    def __init__(self, seed: int, optimizer: Callable[..., Any], scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.optimizer = optimizer(self.parameters())
        self.scale, self.fails = scale, False

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale

    def update(self) -> None:
        self.optimizer.step()
        if self.fails:
            self.fails = False
            raise ArithmeticError("once")
        self.optimizer.zero_grad()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    chosen = loose_device()
    with worlds.use_world(SingleRankWorld(chosen)):
        yield chosen


class Training:
    """Some layers on one rank, each an actor with its optimizer, and their step."""

    def __init__(
        self,
        store: Any,
        optimizer: Callable[..., Any] = adamw,
        updates: int = 1,
        layers: int = 2,
    ) -> None:
        more = {} if store is None else {"store": store}
        place = cg.mesh(dp=1) if isinstance(store, tuple) else 0
        actors = [cg.actor(Layer).on(place, **more)(i, optimizer) for i in range(layers)]
        self.layers = actors

        @cg.trace
        def step(x: Tensor) -> Tensor:
            for _ in range(updates):
                y = x
                for layer in actors:
                    y = layer.forward(y)
                loss = y.square().mean()
                cg.backward(loss)
                cg.clip_grad_norm(actors, 1.0)
                for layer in actors:
                    layer.update()
            return loss

        self.x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
        self.step = step
        self.lowered = step.lower(self.x)

    def run(self, compiled: cg.Compiled, times: int = 5) -> list[Tensor]:
        """The losses; from the third execution on what is captured is replayed."""
        return [compiled(self.x).detach().cpu() for _ in range(times)]

    @property
    def kept(self) -> list[Tensor]:
        """What the optimizers keep for parameters."""
        return [
            value
            for layer in self.layers
            for parameter in layer.local.parameters()
            for key, value in layer.local.optimizer.state[parameter].items()
            if key != "step"
        ]

    @property
    def values(self) -> list[Tensor]:
        """Parameters and what optimizers keep, on the host."""
        parameters = [p.detach().cpu() for layer in self.layers for p in layer.local.parameters()]
        return [*parameters, *(value.cpu() for value in self.kept)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(-(-tensor.nbytes // 256) * 256 for tensor in tensors)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.grid(1)
@pytest.mark.parametrize("store", ["host-state", "host"])
@pytest.mark.parametrize(
    ("optimizer", "updates", "passes"),
    [(adamw, 1, ""), (adamw, 2, "-overlap"), (momentum, 1, "-capture")],
)
def test_state_rests_on_the_host_and_values_are_the_same_bits(
    device: FakeDevice, optimizer: Callable[..., Any], updates: int, passes: str, store: str
) -> None:
    plain, resting = (Training(place, optimizer, updates) for place in (None, store))
    expected, compiled = (t.lowered.compile(passes=passes) for t in (plain, resting))
    assert same(plain.run(expected), resting.run(compiled))
    assert same(plain.values, resting.values)
    assert {t.device.type for t in plain.kept} == {"fake"}
    assert {t.device.type for t in resting.kept} == {"cpu"}
    parameters = [p for layer in resting.layers for p in layer.local.parameters()]
    assert {p.device.type for p in parameters} == {"cpu" if store == "host" else "fake"}
    moved = compiled.memory_analysis()[0].moved
    at_rest = [*resting.kept, *(parameters if store == "host" else ())]
    assert moved == updates * bytes_of(at_rest)
    assert expected.memory_analysis()[0].moved == 0
    replays = sum(s.replays for s in compiled._runtimes[0].bound[0][0].segments)
    assert (replays > 0) == (passes != "-capture")


def test_memory_is_taken_from_the_fetch_to_the_end_of_the_copy_back(device: FakeDevice) -> None:
    compiled = Training("host-state", layers=3).lowered.compile()
    plan = compiled.memory_analysis()[0]
    (size,) = {op.result.type.value.nbytes for op in copies(compiled)}
    assert plan.host == plan.moved == 3 * size
    # One comes, one is used, and one goes.
    there, most = 0, 0
    for op in compiled.module.program_of(0).ops:
        there += isinstance(op, CopyStart) and not op.is_to_host
        there -= isinstance(op, Call) and op.fn.name.endswith(".settle")
        most = max(most, there)
    assert (most, there) == (3, 0)
    updates = {name: 0.001 for name in compiled.module.functions if name.endswith(".update")}
    links = {bandwidth: cg.Link(0.0, bandwidth) for bandwidth in (1e6, 1e-6)}
    times = {
        bandwidth: compiled.simulate(cg.Costs(functions=updates, host=link)).makespan
        for bandwidth, link in links.items()
    }
    assert times[1e-6] > 3 * times[1e6]


def copies(compiled: cg.Compiled) -> list[CopyStart]:
    return [op for op in compiled.module.program_of(0).ops if isinstance(op, CopyStart)]


def test_state_is_that_of_the_last_step_as_soon_as_it_has_ended() -> None:
    """A late copy would show: the fake device takes its time."""
    chosen = loose_device(delay=0.002)
    with worlds.use_world(SingleRankWorld(chosen)):
        resting = Training("host", momentum)
        compiled = resting.lowered.compile()
        for _ in range(2):
            compiled(resting.x)
            at_once = [value.clone() for value in resting.kept]
            chosen.synchronize()
            assert same(at_once, resting.kept)


@pytest.mark.parametrize(("saved", "loaded"), [("host", None), (None, "host")])
def test_checkpoints_do_not_depend_on_where_state_rests(
    device: FakeDevice, tmp_path: Path, saved: str | None, loaded: str | None
) -> None:
    first = Training(saved)
    first.run(first.lowered.compile(), 2)
    cg.save(tmp_path / "state", {f"layer{i}": layer for i, layer in enumerate(first.layers)})
    then = first.run(first.lowered.compile(), 2)
    second = Training(loaded)
    compiled = second.lowered.compile()
    second.run(compiled, 1)
    cg.load(tmp_path / "state", {f"layer{i}": layer for i, layer in enumerate(second.layers)})
    assert same(second.run(compiled, 2), then)
    assert same(second.values, first.values)


def test_a_failed_update_loses_no_state(device: FakeDevice) -> None:
    plain, resting = Training(None), Training("host")
    steps = [(t, t.lowered.compile()) for t in (plain, resting)]
    for training, compiled in steps:
        training.run(compiled, 2)
        training.layers[1].local.fails = True
        with pytest.raises(cg.RemoteError, match="ArithmeticError"):
            compiled(training.x)
        for layer in training.layers:
            layer.local.zero_grad()
        training.run(compiled, 2)
    assert same(plain.values, resting.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_tensor_at_rest_is_saved_by_itself(device: FakeDevice, dtype: torch.dtype) -> None:
    def adamw_of_two_types(parameters: Any) -> torch.optim.Optimizer:
        other = nn.Parameter(torch.zeros(3, dtype=dtype))
        other.grad = torch.ones_like(other)
        return adamw([*parameters, other])

    training = Training("host", adamw_of_two_types, layers=1)
    training.run(training.lowered.compile(), 1)
    optimizer = training.layers[0].local.optimizer
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)  # refuses a storage that has two types
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in training.kept)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")["state"]
    assert same([kept["exp_avg"] for kept in loaded.values()][:-1], training.kept[::2])


def test_steps_lowered_before_and_while_parameters_are_frozen(device: FakeDevice) -> None:
    both = []
    for store in (None, "host"):
        training = Training(store)
        compiled = training.lowered.compile()
        training.run(compiled, 1)
        frozen = training.layers[0].local.up
        frozen.requires_grad_(False)
        other = training.step.lower(training.x).compile()
        training.run(other, 1)
        frozen.requires_grad_(True)
        training.run(compiled, 1)
        training.run(training.step.lower(training.x).compile(), 1)
        training.run(compiled, 1)
        both.append(training.values)
    assert same(*both)


def test_a_step_from_before_state_came_to_rest_is_lowered_again(device: FakeDevice) -> None:
    training = Training("host", lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    before = training.lowered.compile()
    for layer in training.layers:
        layer.local.optimizer.param_groups[0]["momentum"] = 0.9
    training.run(training.step.lower(training.x).compile(), 2)
    assert {value.device.type for value in training.kept} == {"cpu"}
    with pytest.raises(RuntimeError, match=r"come to rest on the host; .* Lower it again"):
        before(training.x)
    training.run(training.step.lower(training.x).compile(), 1)


class Hooked(Layer):
    """Updates a parameter as soon as its gradient is there."""

    def __init__(self, seed: int, optimizer: Callable[..., Any]) -> None:
        super().__init__(seed, optimizer)
        self.optimizer = optimizer([self.down.weight])
        self.down.weight.register_post_accumulate_grad_hook(lambda _: Layer.update(self))

    def update(self) -> None:
        self.optimizer.zero_grad()


@pytest.mark.parametrize("is_updated", [False, True])
def test_hooks_of_parameters_use_state_that_rests(device: FakeDevice, is_updated: bool) -> None:
    both = []
    for more in ({}, {"store": "host"}):
        layer: Any = cg.actor(Hooked).on(0, **more)(0, adamw)

        @cg.trace
        def step(x: Tensor, layer: Any = layer) -> Tensor:
            loss = layer.forward(x).square().mean()
            cg.backward(loss)
            if is_updated:
                layer.update()
            return loss

        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
        compiled = step.lower(x).compile()
        for _ in range(3):
            compiled(x)
        (kept,) = layer.local.optimizer.state.values()
        assert kept["exp_avg"].device.type == ("cpu" if more else "fake")
        weight = layer.local.down.weight.detach()
        both.append([value.cpu() for value in (weight, kept["exp_avg"], kept["exp_avg_sq"])])
    assert same(*both)


def test_an_actor_on_a_mesh_says_both(device: FakeDevice) -> None:
    plain, resting = Training((cg.cut(0, "dp"),)), Training((cg.cut(0, "dp"), "host"))
    assert same(*(t.run(t.lowered.compile(), 3) for t in (plain, resting)))
    assert same(plain.values, resting.values)
    assert {t.device.type for t in resting.kept} == {"cpu"}


def test_a_limit_of_memory_goes_with_it(device: FakeDevice) -> None:
    plain, resting = Training(None), Training("host-state")
    compiled = resting.lowered.compile()
    limit = int(0.9 * compiled.memory_analysis()[0].peak)
    limited = resting.lowered.compile(memory=limit)
    assert limited.memory_analysis()[0].peak <= limit
    assert same(plain.run(plain.lowered.compile(), 3), resting.run(limited, 3))
    assert same(plain.values, resting.values)


def test_ranks_without_a_device_have_it_on_the_host_anyway() -> None:
    with worlds.use_world(VirtualWorld(1)):
        plain, resting = Training(None), Training("host")
        compiled = resting.lowered.compile()
        assert not copies(compiled)
        assert same(plain.run(plain.lowered.compile(), 1), resting.run(compiled, 1))


def test_steps_that_one_rank_drives_are_refused(device: FakeDevice) -> None:
    layer = cg.actor(Layer).on(0, store="host-state")(0, adamw)

    @cg.trace(inputs=cg.on(0))
    def step(x: Tensor) -> Tensor:
        loss = layer.forward(x).square().mean()
        cg.backward(loss)
        layer.update()
        return loss

    with pytest.raises(cg.IRError, match="one rank starts the executions") as refused:
        step.lower(torch.randn(ROWS, WIDTH)).compile()
    assert "layer.update()" in str(refused.value)
    assert "help: let all ranks run the step" in str(refused.value)


class Updater:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def update(self) -> None:
        self.optimizer.step()


def test_an_optimizer_of_two_actors_is_refused(device: FakeDevice) -> None:
    layer = cg.actor(Layer).on(0)(0, adamw)
    updater = cg.actor(Updater).on(0, store="host")(layer.local.optimizer)

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = layer.forward(x).square().mean()
        cg.backward(loss)
        updater.update()
        return loss

    with pytest.raises(cg.TraceError, match=r"layer\d+ holds this optimizer, too"):
        step.lower(torch.randn(ROWS, WIDTH))


def test_an_optimizer_that_takes_a_closure_is_refused(device: FakeDevice) -> None:
    with pytest.raises(cg.TraceError, match="what a LBFGS keeps is not known"):
        Training("host", torch.optim.LBFGS)


@pytest.mark.parametrize("store", ["device", ("host", "host"), (), 3])
def test_a_place_is_one(store: Any) -> None:
    with worlds.use_world(VirtualWorld(1)), pytest.raises(TypeError, match="it is a sharding"):
        cg.actor(Layer).on(0, store=store)


def test_state_of_all_groups_rests_where_a_step_on_fakes_ends_early() -> None:
    """ASGD reads a number of its state, which a fake lacks, in the first of its groups."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 4)]
    optimizer = torch.optim.ASGD([{"params": [parameter]} for parameter in parameters])
    state = optimizer_state._after_step(optimizer, parameters, "it", torch.device("cpu"))
    assert all(state[parameter]["ax"].shape == parameter.shape for parameter in parameters)
