"""Tensors that rest in the memory of a host: the same bits, less memory, by hand and by a limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cg
from cg.backends.fake.device import FakeDevice
from cg.backends.virtual.world import VirtualWorld
from cg.ir.ops import CopyStart
from cg.launch.world import world as worlds
from cg.launch.world.single_rank_world import SingleRankWorld
from tests.backends.devices.patience import loose_device

WIDTH, ROWS, LAYERS = 16, 32, 3
FAST, SLOW = cg.Link(0.0, 1e9), cg.Link(0.01, 1e-6)


class Layer(nn.Module):
    def __init__(self, seed: int, marks: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.marks = marks

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x.t().contiguous().t())
        if self.marks:
            hidden = cg.offload(hidden)
        return x + self.down(functional.gelu(hidden))


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    @cg.opaque(returns=0)
    def look(self, x: Tensor) -> tuple[()]:
        self.seen += 1
        return ()


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    chosen = loose_device()
    with worlds.use_world(SingleRankWorld(chosen)):
        yield chosen


class Training:
    """Some layers on one rank, each an actor, and their step."""

    def __init__(self, marks: bool = False, microbatches: int = 1) -> None:
        self.layers = [cg.actor(Layer).on(0)(seed, marks) for seed in range(LAYERS)]
        layers = self.layers

        @cg.trace
        def step(x: Tensor) -> Tensor:
            losses = []
            for part in cg.microbatches(x, microbatches):
                for layer in layers:
                    part = layer.forward(part)
                losses.append(part.square().mean())
            loss = cg.mean(losses)
            cg.backward(loss)
            return loss

        self.x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
        self.lowered = step.lower(self.x)

    def run(self, compiled: cg.Compiled, times: int = 5) -> list[Tensor]:
        """The losses and gradients of some executions; from the third on they are replayed."""
        values = []
        for _ in range(times):
            for layer in self.layers:
                layer.local.zero_grad()
            values.append(compiled(self.x).detach().cpu())
            values += [p.grad.cpu() for layer in self.layers for p in layer.local.parameters()]
        return values


def copies(compiled: cg.Compiled) -> list[CopyStart]:
    return [op for op in compiled.module.program_of(0).ops if isinstance(op, CopyStart)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def replays(compiled: cg.Compiled) -> int:
    return sum(s.replays for s in compiled._runtimes[0].bound[0][0].segments)


@pytest.mark.parametrize(("microbatches", "passes"), [(1, ""), (2, "-overlap"), (2, "-capture")])
def test_marked_values_rest_on_the_host(device: FakeDevice, microbatches: int, passes: str) -> None:
    plain, marked = Training(False, microbatches), Training(True, microbatches)
    expected = plain.lowered.compile(passes=passes)
    compiled = marked.lowered.compile(passes=passes)
    assert same(plain.run(expected), marked.run(compiled))
    out = [op for op in copies(compiled) if op.is_to_host]
    assert len(out) == len(copies(compiled)) / 2 == LAYERS * microbatches
    before, after = (c.memory_analysis()[0] for c in (expected, compiled))
    assert after.peak < before.peak
    size = 4 * ROWS * 4 * WIDTH
    assert after.moved == size * LAYERS
    assert size / microbatches <= after.host <= after.moved
    assert before.moved == before.host == 0
    assert (replays(compiled) > 0) == (passes != "-capture")


def test_a_limit_moves_what_the_link_carries_and_computes_the_rest_again(
    device: FakeDevice,
) -> None:
    training = Training(microbatches=2)
    plain = training.lowered.compile()
    expected = training.run(plain)
    peak = plain.memory_analysis()[0].peak
    costs = cg.Costs(functions=dict.fromkeys(plain.module.functions, 1.0))
    chosen = {}
    for link in (FAST, SLOW):
        options = {"memory": int(0.85 * peak), "host_link": link, "costs": costs}
        compiled = training.lowered.compile(**options)
        assert compiled.memory_analysis()[0].peak <= 0.85 * peak
        assert same(training.run(compiled), expected)
        chosen[link] = compiled
    assert "bytes to its host and back" in chosen[FAST].memory_report
    assert all("computes 0.0 %" in line for line in chosen[FAST].memory_report.split("\n")[2:])
    assert not copies(chosen[SLOW])
    assert "bytes to its host" not in chosen[SLOW].memory_report


def test_a_pass_that_is_off_moves_nothing(device: FakeDevice) -> None:
    training = Training(marks=True)
    peak = training.lowered.compile(passes="-offload").memory_analysis()[0].peak
    compiled = training.lowered.compile(passes="-offload", memory=int(0.9 * peak), host_link=FAST)
    assert not copies(compiled)


def test_copies_beside_an_opaque_method_are_left_to_the_host(device: FakeDevice) -> None:
    """A graph reads no memory of the host, so these copies are in none."""
    layers = [cg.actor(Layer).on(0)(seed, True) for seed in range(3)]
    watcher = cg.actor(Opaque).on(0)()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        y = layers[0].forward(x)
        watcher.look(y)
        for layer in layers[1:]:
            y = layer.forward(y)
        loss = y.square().mean()
        cg.backward(loss)
        return loss

    x = torch.randn(ROWS, WIDTH)
    compiled = step.lower(x).compile()
    plain = nn.Sequential(*(Layer(seed, False) for seed in range(3)))
    for _ in range(4):
        for layer in layers:
            layer.local.zero_grad()
        loss = compiled(x)
        plain.zero_grad()
        right = plain(x).square().mean()
        right.backward()
        assert torch.allclose(loss.cpu(), right)
        for layer, other in zip(layers, plain, strict=True):
            for mine, its in zip(layer.local.parameters(), other.parameters(), strict=True):
                assert torch.allclose(mine.grad.cpu(), its.grad, atol=1e-6)
    assert watcher.local.seen == 4
    crossing = copies(compiled)[0]
    assert crossing.graph is None


def test_the_simulator_counts_the_link(device: FakeDevice) -> None:
    compiled = Training(marks=True).lowered.compile()
    times = {
        bandwidth: compiled.simulate(cg.Costs(host=cg.Link(0.0, bandwidth))).makespan
        for bandwidth in (1e6, 1e-6)
    }
    assert times[1e-6] > 2 * times[1e6]


def test_ranks_without_a_device_refuse_marks() -> None:
    with worlds.use_world(VirtualWorld(1)):
        training = Training(marks=True)
        with pytest.raises(cg.IRError, match=r"cg\.offload is given .* has no device") as refused:
            training.lowered.compile()
        assert "part = layer.forward(part)" in str(refused.value)
        assert "copy_start" not in training.lowered.as_text("scheduled")
        compiled = training.lowered.compile(passes="-offload")
        assert not copies(compiled)
        plain = Training()
        assert same(training.run(compiled, 1), plain.run(plain.lowered.compile(), 1))


def test_steps_that_one_rank_drives_refuse_marks(device: FakeDevice) -> None:
    layers = [cg.actor(Layer).on(0)(seed, True) for seed in range(2)]

    @cg.trace(inputs=cg.on(0))
    def step(x: Tensor) -> Tensor:
        y = layers[1].forward(layers[0].forward(x))
        loss = y.square().mean()
        cg.backward(loss)
        return loss

    with pytest.raises(cg.IRError, match="one rank starts the executions of the step"):
        step.lower(torch.randn(ROWS, WIDTH)).compile()


def test_a_mesh_refuses_marks() -> None:
    with worlds.use_world(VirtualWorld(2)):
        plan = {"up.*": cg.cut(0, "tp"), "down.weight": cg.cut(1, "tp")}
        layer = cg.actor(Layer).on(cg.mesh(tp=2), plan=plan)(0, True)

        @cg.trace
        def step(x: Tensor) -> Tensor:
            loss = layer.forward(x).square().mean()
            cg.backward(loss)
            return loss

        with pytest.raises(cg.TraceError, match=r"cg\.offload is given a value of .* in pieces"):
            step.lower(torch.randn(ROWS, WIDTH))


class Twice(nn.Module):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.linear, self.first, self.second = nn.Linear(4, 4), first, second

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return self.second(self.first(hidden)).exp()


@pytest.mark.parametrize("other", [cg.keep, cg.recompute])
def test_one_value_has_one_mark(other: Any) -> None:
    with worlds.use_world(VirtualWorld(1)):
        actor = cg.actor(Twice).on(0)(cg.offload, other)

        @cg.trace
        def step(x: Tensor) -> Tensor:
            loss = actor.forward(x).sum()
            cg.backward(loss)
            return loss

        with pytest.raises(cg.TraceError, match=r"given to cg\.offload and to cg\.") as refused:
            step.lower(torch.randn(2, 4))
        assert "in forward" in str(refused.value)
        advice = "leave cg.keep out" if other is cg.keep else "give it to one of them"
        assert f"help: {advice}" in str(refused.value)


def test_a_link_is_one() -> None:
    with worlds.use_world(VirtualWorld(1)), pytest.raises(TypeError, match="host_link=50"):
        Training().lowered.compile(host_link=50)  # type: ignore[arg-type]
