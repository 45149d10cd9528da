"""Steps whose layers are compiled once give the values of those that are not compiled."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import cg
from cg.backends.fusion import fuse
from cg.backends.fusion.split import CompiledGraphs, Compute, compile_in_parts
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.graph.autodiff.products import ADD_PRODUCT
from cg.tracer.graph.codegen.bodies import Compiler

from ..worlds import virtual_world

LAYERS, WIDTH = 8, 8
X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))

_world = virtual_world(1)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """A compiler called `parts`, which runs what it is given; the graphs of parts."""
    graphs: list[fx.GraphModule] = []

    def whole(module: fx.GraphModule, examples: Sequence[Tensor]) -> Compute:
        graphs.append(module)
        return lambda values: fx.Interpreter(module).boxed_run(values)

    def make() -> Compiler:
        compiled = CompiledGraphs(whole)

        def compiler(module: fx.GraphModule, examples: Sequence[Tensor]) -> Compute:
            mode = FakeTensorMode(
                allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
            )
            with mode:
                fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in examples]
            return compile_in_parts(module, fakes, mode, compiled, 16)

        return compiler

    monkeypatch.setitem(fuse.FUSERS, "parts", make)
    return graphs


class Layer(nn.Module):
    """A gated layer behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        result: Tensor = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return result


@cg.actor
class Stack(nn.Module):
    """Layers between two others, and their training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01)

    def loss(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.last(x).square().mean()
        return result

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def trained(**options: Any) -> tuple[Any, list[Tensor], dict[str, Tensor]]:
    """The compiled step, its losses, and the weights behind three steps of two microbatches."""
    stack = Stack.on(0)()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = cg.mean([stack.loss(part) for part in cg.microbatches(x, 2)])
        cg.backward(loss)
        stack.update()
        return loss

    compiled = step.lower(X).compile(**options)
    losses = [compiled(X) for _ in range(3)]
    return compiled, losses, copy.deepcopy(stack.local.state_dict())


def test_layers_and_their_backwards_are_compiled_once(parts: list[fx.GraphModule]) -> None:
    _, right, weights = trained()
    _, losses, others = trained(fuse="parts")
    torch.testing.assert_close(losses, right)
    torch.testing.assert_close(others, weights)
    products = [
        sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes)
        + sum(node.target is ADD_PRODUCT for node in graph.graph.nodes)
        for graph in parts
    ]
    # A layer has three products and, in its backward, six; the whole stack has 9 times as many.
    assert max(products) < 2 * 6
    assert sum(products) < LAYERS * 9 / 2


@cg.actor
class Tower(nn.Module):
    """Layers without norms, of which two ranks hold halves."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Pair() for _ in range(layers))

    def loss(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Pair(nn.Module):
    """Two products, between which nothing is exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


def test_layers_that_exchange_are_compiled_once(parts: list[fx.GraphModule]) -> None:
    """Each is functions of its own, whose code equal layers share."""

    def count(layers: int) -> tuple[int, int]:
        plan = cg.plan({"*.up.weight": cg.cut(0, "tp"), "*.down.weight": cg.cut(1, "tp")})
        with use_world(VirtualWorld(2)):
            tower = Tower.on(cg.mesh([0, 1], tp=2), plan=plan)(layers)

            @cg.trace
            def step(x: Tensor) -> Tensor:
                loss = tower.loss(x)
                cg.backward(loss)
                return loss

            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
            lowered = step.lower(x)
            right = lowered.compile()(x)
            before = len(parts)
            compiled = lowered.compile(fuse="parts")
            torch.testing.assert_close(compiled(x), right)
            return len(parts) - before, len(compiled.fused)

    (few, functions), (many, more) = count(3), count(5)
    assert more >= functions + 4
    assert many == few


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_layers_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import _inductor

    sizes: list[int] = []
    compile_ = _inductor.compile

    def counted(module: fx.GraphModule, *arguments: Any) -> Any:
        sizes.append(1)
        return compile_(module, *arguments)

    monkeypatch.setattr(_inductor, "compile", counted)
    _, right, weights = trained()
    compiled, losses, others = trained(fuse="inductor")
    torch.testing.assert_close(losses, right)
    torch.testing.assert_close(others, weights)
    assert not any(why for name, why in compiled.fused.items() if "loss" in name)
    assert 4 <= len(sizes) <= 10
