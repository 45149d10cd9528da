"""Parameters that rest in the memory of the host: the same bits, and few of them on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.fake.device import FakeDevice
from cg.ir.ops import Call, CopyStart, Op
from cg.ir.types import Place, device_bytes
from cg.launch.world import world as worlds
from cg.launch.world.single_rank_world import SingleRankWorld
from cg.tracer.function.laid_out_pieces import LayoutPlan
from cg.tracer.values.optimizer_state import settings_of
from tests.backends.devices.patience import loose_device
from tests.backends.memory import peak_of

WIDTH, BLOCKS, MICROBATCHES = 16, 2, 2

Optimizer = Callable[..., torch.optim.Optimizer]
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Some layers in one actor."""

    seen: Tensor

    def __init__(self, optimizer: Optimizer = ADAMW, frozen: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)
        self.optimizer = optimizer([p for p in self.parameters() if p.requires_grad])
        self.register_buffer("seen", torch.zeros(()))
        self.clears = True

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)  # no parameter: it stays on the device, and orders no reads of those
        y: Tensor = self.blocks(x)
        return y

    def scale(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[0].down.bias.mul_(2.0)
        return x

    def update(self) -> None:
        self.optimizer.step()
        if self.clears:
            self.optimizer.zero_grad()


class Training:
    """The model on one rank, and its step."""

    def __init__(self, store: str | None, rows: int = 2, **options: Any) -> None:
        more = {} if store is None else {"store": store}
        self.actor: Any = cg.actor(Model).on(0, **more)(**options)
        width = options.get("width", WIDTH)

        @cg.trace
        def step(x: Tensor) -> Tensor:
            losses = []
            for part in cg.microbatches(x, MICROBATCHES):
                losses.append(self.actor.forward(part).square().mean())
            loss = cg.mean(losses)
            cg.backward(loss)
            self.actor.update()
            return loss

        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(rows * MICROBATCHES, width, generator=generator)
        self.lowered = step.lower(self.x)

    def run(self, compiled: cg.Compiled, times: int = 5) -> list[Tensor]:
        """The losses; from the third execution on what is captured is replayed."""
        return [compiled(self.x).detach().cpu() for _ in range(times)]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.actor.local.named_parameters())

    @property
    def values(self) -> list[Tensor]:
        """Parameters, gradients and what the optimizer keeps, on the host."""
        parameters = list(self.parameters.values())
        state = self.actor.local.optimizer.state
        kept = [v for p in parameters for v in state.get(p, {}).values() if torch.is_tensor(v)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        tensors = (*parameters, *gradients, *kept, self.actor.local.seen)
        return [tensor.detach().cpu() for tensor in tensors]


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    chosen = loose_device(delay=0.0005)
    with worlds.use_world(SingleRankWorld(chosen)):
        yield chosen


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def reads(compiled: cg.Compiled) -> list[Call]:
    """The calls that read a parameter at rest."""
    functions = compiled.module.functions
    calls = (op for op in compiled.module.program_of(0).ops if isinstance(op, Call))
    return [op for op in calls if functions[op.fn.name].parameter and op.fn.name.endswith(".rest")]


def is_fetch(op: Op) -> bool:
    """True for a copy of a parameter to the device."""
    return isinstance(op, CopyStart) and op.result.name.endswith("rest.fetch")


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (partial(torch.optim.Adam, lr=0.01, foreach=True), {"schedule": "zb-h1"}),
        (partial(ADAMW, foreach=False, amsgrad=True), {"fsdp": cg.fsdp(keep="step")}),
        pytest.param(partial(torch.optim.SGD, lr=0.1), {}, marks=pytest.mark.slow),
        pytest.param(ADAMW, {"passes": "-capture"}, marks=pytest.mark.slow),
    ],
)
def test_values_are_the_same_bits(
    device: FakeDevice, optimizer: Optimizer, options: dict[str, Any]
) -> None:
    plain, resting = (Training(store, optimizer=optimizer) for store in (None, "host"))
    if isinstance(options.get("schedule"), str):
        options = {**options, "schedule": cg.schedules.by_name(options["schedule"])}
    expected = plain.lowered.compile(**{k: v for k, v in options.items() if k != "fsdp"})
    compiled = resting.lowered.compile(**options)
    assert same(plain.run(expected), resting.run(compiled))
    assert same(plain.values, resting.values)
    assert {p.device.type for p in resting.parameters.values()} == {"cpu"}
    # A layer's forward takes six parameters, and its backward four: no biases of linear layers.
    count = 6 if "fsdp" in options else MICROBATCHES * (6 + 4)
    assert len(reads(compiled)) == BLOCKS * count


def test_a_device_holds_two_layers_at_most(device: FakeDevice) -> None:
    compiled = Training("host").lowered.compile()
    layer = sum(p.nbytes for p in Block(WIDTH).parameters())
    held, most = {}, 0
    for op in compiled.module.program_of(0).ops:
        if is_fetch(op):
            held[op.result.name.removesuffix(".fetch")] = device_bytes(op.result.type)
        elif op.opcode == "free":
            held.pop(op.operands[0].name, None)
        most = max(most, sum(held.values()))
    assert layer < most <= 2 * layer
    assert not held


def test_graphs_contain_the_copies_of_parameters(device: FakeDevice) -> None:
    training = Training("host")
    compiled = training.lowered.compile()
    training.run(compiled)
    ops = compiled.module.program_of(0).ops
    copies = [
        op for op in ops if isinstance(op, CopyStart) and op.result.name.endswith("rest.fetch")
    ]
    assert {op.graph for op in (*copies, *reads(compiled))} == {0}
    (segment,) = compiled._runtimes[0].bound[0][0].segments
    assert segment.reason is None
    assert segment.replays >= 2


def test_the_plan_counts_what_is_held() -> None:
    with worlds.use_world(SingleRankWorld(FakeDevice())):
        training = Training("host", width=128, rows=64)
        compiled = training.lowered.compile(passes="-capture")
        training.run(compiled, 2)
        gradients = sum(p.nbytes for p in training.parameters.values())
        held = peak_of(lambda: compiled(training.x)) - gradients
        assert compiled.memory_analysis()[0].peak == pytest.approx(held, rel=0.03)


def test_the_simulator_knows_the_link(device: FakeDevice) -> None:
    compiled = Training("host").lowered.compile()
    names = compiled.module.functions
    functions = {name: 0.001 for name in names if ".part" in name or name.endswith(".update")}
    moved = sum(
        device_bytes(op.result.type)
        for op in compiled.module.program_of(0).ops
        if isinstance(op, CopyStart) and not op.is_to_host
    )
    link = cg.Link(0.0, 1e-6)  # a byte takes a microsecond
    slow = compiled.simulate(cg.Costs(functions=functions, host=link)).makespan
    fast = compiled.simulate(cg.Costs(functions=functions, host=cg.Link(0.0, 1e6))).makespan
    assert fast < 1.0 < 0.001 * moved <= slow


def test_frozen_parameters_rest_and_updates_do_not_bring_them(device: FakeDevice) -> None:
    plain, resting = (Training(store, frozen=1) for store in (None, "host"))
    compiled = resting.lowered.compile()
    assert same(plain.run(plain.lowered.compile()), resting.run(compiled))
    assert same(plain.values, resting.values)
    assert {p.device.type for p in resting.parameters.values()} == {"cpu"}
    trained = [p for p in resting.parameters.values() if p.requires_grad]
    # AdamW keeps two tensors for each.
    assert compiled.memory_analysis()[0].moved == 3 * sum(
        -(-p.nbytes // 256) * 256 for p in trained
    )


def test_gradients_stay_on_the_device_over_steps(device: FakeDevice) -> None:
    both = []
    for store in (None, "host"):
        training = Training(store)
        training.actor.local.clears = False
        training.run(training.lowered.compile(), 4)
        assert {p.grad.device.type for p in training.parameters.values()} == {"fake"}
        both.append(training.values)
    assert same(*both)


def test_what_is_put_elsewhere_comes_to_rest_again(device: FakeDevice) -> None:
    both = []
    for store in (None, "host"):
        training = Training(store)
        compiled = training.lowered.compile()
        training.run(compiled, 3)
        weight = training.parameters["blocks.1.up.weight"]
        with torch.no_grad():
            weight.data = torch.full_like(weight, 0.5, device="fake")
            training.parameters["blocks.0.up.weight"].mul_(2.0)
        training.run(compiled, 3)
        both.append(training.values)
    assert same(*both)


class CountingDevice(FakeDevice):
    """Counts how often the host asks whether the device has come to an event."""

    asked = 0

    def event(self) -> Any:
        event = super().event()
        query = event.query

        def counted() -> bool:
            self.asked += 1
            return query()

        event.query = counted
        return event


@pytest.mark.parametrize("store", ["host", "host-state"])
def test_a_step_ends_when_parameters_at_rest_have_been_read(store: str) -> None:
    """Python may write to them then: the host waits, in replays as well."""
    device = CountingDevice()
    with worlds.use_world(SingleRankWorld(device)):
        actor: Any = cg.actor(Model).on(0, store=store)()

        @cg.trace
        def step(x: Tensor) -> Tensor:
            return actor.forward(x)

        x = torch.randn(2, WIDTH)
        compiled = step.lower(x).compile()
        for _ in range(5):
            device.asked = 0
            compiled(x)
        (segment,) = compiled._runtimes[0].bound[0][0].segments
        assert segment.is_replayed
        assert (device.asked > 0) == (store == "host")


def test_checkpoints_have_parameters_at_rest(device: FakeDevice, tmp_path: Path) -> None:
    first, second = Training("host"), Training(None)
    first.run(first.lowered.compile(), 2)
    cg.save(tmp_path / "state", {"model": first.actor})
    then = first.run(first.lowered.compile(), 2)
    cg.load(tmp_path / "state", {"model": second.actor})
    assert same(second.run(second.lowered.compile(), 2), then)


def test_a_traced_method_may_not_write_to_a_parameter_at_rest(device: FakeDevice) -> None:
    for store in ("host-state", "host"):
        actor: Any = cg.actor(Model).on(0, store=store)()

        @cg.trace
        def step(x: Tensor, actor: Any = actor) -> Tensor:
            return actor.scale(x)

        if store == "host-state":
            step.lower(torch.zeros(2, WIDTH))
            continue
        with pytest.raises(cg.TraceError, match=r"writes to 'blocks.0.down.bias', which rests"):
            step.lower(torch.zeros(2, WIDTH))


def test_an_update_ahead_of_the_backward_is_refused(device: FakeDevice) -> None:
    actor: Any = cg.actor(Model).on(0, store="host")()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = actor.forward(x).square().mean()
        actor.update()
        cg.backward(loss)
        return loss

    with pytest.raises(cg.TraceError, match="the parameters of its actor rest on the host"):
        step.lower(torch.zeros(2, WIDTH))


class Tied:
    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_parameter_of_two_actors_is_refused(device: FakeDevice) -> None:
    one = cg.actor(Tied).on(0)(nn.Parameter(torch.ones(WIDTH)))
    two = cg.actor(Tied).on(0, store="host")(one.local.weight)

    @cg.trace
    def step(x: Tensor) -> Tensor:
        return two.forward(one.forward(x))

    with pytest.raises(cg.TraceError, match=r"tied\d+ holds 'weight' of it, too|holds 'weight'"):
        step.lower(torch.zeros(2, WIDTH))


def test_weights_in_float8_do_not_rest(device: FakeDevice) -> None:
    plan = cg.float8("blocks.*.up")
    with pytest.raises(cg.ActorError, match='store="host-state" for what optimizers keep alone'):
        cg.actor(Model).on(0, plan=plan, store="host")


def test_a_limit_does_not_advise_what_is_there(device: FakeDevice) -> None:
    with pytest.raises(cg.TraceError, match="the least that its program") as refused:
        Training("host").lowered.compile(memory=100)
    assert "store=" not in str(refused.value)
    assert "help: give more memory" in str(refused.value)
    assert "make layers actors of their own" in str(refused.value)


def test_settings_have_what_is_in_tuples_and_dicts() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([parameter], betas=(torch.tensor(0.5), torch.tensor(0.25)))
    optimizer.param_groups[0]["more"] = {"a": [torch.tensor(3)], "b": "x"}
    words = settings_of(optimizer)
    assert "betas=(0.5, 0.25)" in words
    assert "more={'a': [3], 'b': 'x'}" in words
    assert "params" not in words


class NumberedLayer(nn.Module):
    """A layer whose parameters have its number in their paths, as those of a cut model do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.ModuleDict({str(number): Block(WIDTH)})
        self.optimizer = ADAMW(self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("count", [3, 5])
def test_equal_layers_are_cut_once(
    count: int, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutters = []
    make = LayoutPlan.cutter
    monkeypatch.setattr(
        LayoutPlan, "cutter", lambda plan, joint: cutters.append(plan) or make(plan, joint)
    )
    actor = cg.actor(NumberedLayer).on(0, store="host")
    layers = [actor(number) for number in range(count)]
    plain = [NumberedLayer(number) for number in range(count)]

    @cg.trace
    def train(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer.forward(x)
        loss = x.square().mean()
        cg.backward(loss)
        for layer in layers:
            layer.update()
        return loss

    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    for _ in range(3):
        y = x
        for layer in plain:
            y = layer(y)
        expected = y.square().mean()
        expected.backward()
        for layer in plain:
            layer.update()
        torch.testing.assert_close(train(x).cpu(), expected.detach())
    for mine, other in zip(layers, plain, strict=True):
        for one, two in zip(mine.local.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.detach().cpu(), two.detach())
    # The first layer takes an input without a gradient; the others are alike.
    assert len(cutters) <= 4


def test_a_plan_by_position_knows_layouts_and_layers() -> None:
    def plan(*layers: str, **changes: Any) -> LayoutPlan:
        fetched = tuple((f"{layer}.{name}", layer) for layer in layers for name in ("w", "b"))
        of_state = (("0.w", cg.cut(0, "tp")),)
        facts = {"inputs": (), "state": of_state, "gathered": (), "fetched": fetched}
        facts |= {"attention": None, "sequence": ()}
        return LayoutPlan(Place((0,)), (0,), **(facts | changes))

    paths = ["0.w", "0.b", "1.w", "1.b"]
    others = ["2.w", "2.b", "3.w", "3.b"]
    two = plan("0", "1", state=()).by_position(paths)
    assert plan("2", "3", state=()).by_position(others) == two
    assert plan("0", "1").by_position(paths) != two
    mixed = (("2.w", "2"), ("2.b", "3"), ("3.w", "2"), ("3.b", "3"))
    assert plan(state=(), fetched=mixed).by_position(others) != two
    assert plan("2", state=()).by_position(others) != two
    assert plan("2", "3", state=(), attention="ring").by_position(others) != two
