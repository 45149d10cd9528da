"""Linear layers in float8 on one rank: the formula, bit for bit, and what is left as it is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import cg
from cg.tracer.graph.codegen.bodies import GraphBody
from cg.tracer.method.float8.eager import computing_in_float8
from cg.tracer.method.float8.formula import FLOAT8_MM, quantised, scales
from cg.tracer.values.float8_layers import Float8Recipe, Float8Use, unsupported

from ..worlds import virtual_world

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

_world = virtual_world(2)


def cast(x: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """What a float8 copy stands for, as float32, and the scale, by the definition of the recipe."""
    amax = x.float().abs().amax(-1, keepdim=True) if by_row else x.float().abs().max()
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=1e-12)).float()
    if by_row:
        scale = 2.0 ** scale.log2().floor()
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype).float(), scale


def product(a: Tensor, b: Tensor, kinds: tuple[Any, Any], by_row: bool, to: Any) -> Tensor:
    """`a @ b.T`."""
    (left, s), (right, t) = (cast(x, kind, by_row) for x, kind in zip((a, b), kinds, strict=True))
    inverse = s.reciprocal() * t.reciprocal().t()
    return ((left @ right.t()) * inverse).to(torch.bfloat16 if by_row else to).to(to)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_has_the_bits_of_the_formula(recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)

    @cg.actor
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 48, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

        def weigh(self, h: Tensor, by: Tensor) -> Tensor:
            return (h * by).sum()

    layer = Layer.on(0, plan=cg.float8("linear", recipe=recipe))()
    first = Layer.on(0)()

    @cg.trace
    def step(x: Tensor, by: Tensor) -> Any:
        x = first.forward(x)
        h = layer.forward(x)
        cg.backward(layer.weigh(h, by))
        return x, h

    linear = layer.local.linear
    first.local.linear = nn.Linear(32, 32, dtype=dtype)
    given, by = torch.randn(2, 5, 32, dtype=dtype), torch.randn(2, 5, 48, dtype=dtype)
    x, h = step(given, by)
    rows, g, w = x.reshape(10, 32), by.reshape(10, 48), linear.weight.detach()
    is_row = recipe == "rowwise"
    expected = product(rows, w, (E4M3, E4M3), is_row, dtype) + linear.bias.detach()
    assert torch.equal(h.reshape(10, 48), expected)
    kind = E4M3 if is_row else E5M2
    assert torch.equal(linear.weight.grad, product(g.t(), rows.t(), (kind, E4M3), is_row, dtype))
    to_x = product(g, w.t(), (kind, E4M3), is_row, dtype)
    assert torch.equal(first.local.linear.weight.grad, to_x.t() @ given.reshape(10, 32))


def test_the_greatest_magnitudes_and_zeros_are_kept() -> None:
    for dtype in (E4M3, E5M2):
        x = torch.tensor([[3.0, -7.0, 0.0], [0.0, 0.0, 0.0]])
        for by_row in (False, True):
            scale = scales(x, dtype, by_row)
            back = quantised(x, scale, dtype).float() / scale
            assert torch.equal(back[1], x[1])
            assert float((back - x).abs().max()) <= 0.25
        assert float(quantised(x, scales(x, dtype, False), dtype).float().min()) == -float(
            torch.finfo(dtype).max
        )


def test_the_product_is_that_of_torch() -> None:
    """`torch._scaled_mm` of the host, which rounds sums elsewhere."""
    torch.manual_seed(0)
    left, right = torch.randn(8, 32).to(E5M2), torch.randn(16, 32).to(E4M3)
    one, two = torch.tensor(0.5), torch.tensor(0.125)
    own = FLOAT8_MM(left, right, one, two, torch.float32, False)
    theirs = torch._scaled_mm(left, right.t(), one, two, out_dtype=torch.float32)
    torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-6)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 10)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = functional.gelu(block(x))
        return self.head(x)

    def loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten() % 10)

    @cg.opaque
    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


Actor = cg.actor(Blocks)


def step_of(stages: Any, count: int) -> Any:
    @cg.trace
    def step(ids: Tensor) -> Tensor:
        losses = []
        for part in cg.microbatches(ids, count):
            for stage in stages:
                losses.append(stage.loss(stage.forward(part), part))
        loss = cg.mean(losses)
        cg.backward(loss)
        for stage in stages:
            stage.update()
        return loss

    return step


def test_dumps_and_logs_say_what_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = Actor.on(0, plan=cg.float8("*", skip="blocks.1"))()
    with caplog.at_level(logging.INFO, "cg"):
        lowered = step_of([stage], 1).lower(torch.randint(16, (2, 4)))
    lowered.compile(dump=tmp_path)
    assert (tmp_path / "step.float8.txt").read_text().splitlines() == [
        "blocks0.blocks.1.weight is left as it is: skip= names it",
        "blocks0.head.weight is left as it is: its sizes, 10 x 32, are no multiples of 16",
        "blocks0.tokens.weight is left as it is: no linear layer of the traced methods takes it",
        "blocks0.blocks.0.weight in float8, tensorwise",
    ]
    assert "step step: blocks0.blocks.0.weight in float8, tensorwise" in caplog.messages


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_methods_outside_of_steps_compute_so_too(recipe: str) -> None:
    """And two stages of one class, one of which is a copy in float32, keep apart."""
    plan = cg.float8("blocks.*", recipe=recipe)
    stages = [Actor.on(0, plan=plan)(), Actor.on(0)()]
    alone = [Actor.on(1, plan=plan)(), Actor.on(1)()]
    ids = torch.randint(16, (4, 4))
    compiled = step_of(stages, 2).lower(ids).compile()
    for _ in range(2):
        loss = compiled(ids)
        losses = [s.loss(s.forward(part), part) for part in ids.chunk(2) for s in alone]
        expected = torch.stack(losses).mean()
        expected.backward()
        for one in alone:
            one.update()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    for one, other in zip(stages, alone, strict=True):
        for name, parameter in other.local.named_parameters():
            found = one.local.get_parameter(name)
            torch.testing.assert_close(found, parameter, rtol=1e-4, atol=1e-6)
    assert not torch.equal(stages[0].local.head.weight, stages[1].local.head.weight)


def test_autocast_casts_the_input_as_it_does_for_a_plain_layer() -> None:
    @cg.actor
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.linear(x)

    layer, x = Layer.on(0, plan=cg.float8("*"))(), torch.randn(4, 32)
    h = cg.trace(lambda x: layer.forward(x))(x)
    assert h.dtype == torch.bfloat16
    weight, bias = layer.local.linear.weight.detach(), layer.local.linear.bias.detach()
    plain = product(x.bfloat16(), weight, (E4M3, E4M3), False, torch.bfloat16) + bias.bfloat16()
    assert torch.equal(h, plain)


@cg.actor
class Checkpointed(nn.Module):
    """Two layers, of which a checkpoint computes the forward again, or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))

    def plain(self, x: Tensor) -> Tensor:
        return self.body(self.body(x)).square().sum()

    def checkpointed(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.body, x, use_reentrant=False)
        return x.square().sum()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("rows", [5, 0])
def test_checkpoints_compute_again_in_float8(recipe: str, rows: int) -> None:
    """A batch without rows has gradients of 0, as for a plain layer."""
    x = torch.randn(rows, 32)
    plain, again = (Checkpointed.on(0, plan=cg.float8("*", recipe=recipe))() for _ in range(2))

    @cg.trace
    def step(x: Tensor) -> Any:
        losses = plain.plain(x), again.checkpointed(x)
        cg.backward(losses[0] + losses[1])
        return losses

    values = [[loss] for loss in step(x)]
    for actor, mine in zip((plain, again), values, strict=True):
        mine += [parameter.grad for parameter in actor.local.parameters()]
    for one, other in zip(*values, strict=True):
        assert torch.equal(one, other)
        assert bool(one.any()) == bool(rows)


def test_weights_that_change_before_the_backward_are_cast_by_each_forward() -> None:
    @cg.actor
    class Shrinking(Blocks):
        @cg.opaque
        def note(self) -> None:
            """Nothing that the backward reads, which cg cannot know."""

    stage = Shrinking.on(0, plan=cg.float8("blocks.*"))()
    alone = Shrinking.on(1, plan=cg.float8("blocks.*"))()

    @cg.trace
    def step(ids: Tensor) -> Tensor:
        loss = stage.loss(stage.forward(ids), ids)
        stage.note()
        cg.backward(loss)
        stage.update()
        return loss

    ids = torch.randint(16, (2, 4))
    loss = step(ids)
    expected = alone.loss(alone.forward(ids), ids)
    expected.backward()
    alone.update()
    assert torch.equal(loss, expected.detach())
    for found, parameter in zip(stage.local.parameters(), alone.local.parameters(), strict=True):
        torch.testing.assert_close(found, parameter, rtol=1e-5, atol=1e-7)


def test_weights_of_equal_sizes_are_cast_by_one_graph() -> None:
    @cg.actor
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
            self.wide = nn.Linear(32, 48, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.wide(x)

    layers = Layers.on(0, plan=cg.float8("*"))()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        return layers.forward(x)

    x = torch.randn(16, 32)
    lowered = step.lower(x)
    torch.testing.assert_close(lowered.compile()(x), layers.forward(x))
    bodies = {n: b for n, b in lowered.trace.bodies.items() if n.endswith(".weight.float8")}
    graphs = [b.graph_and_lines()[0] for b in bodies.values() if isinstance(b, GraphBody)]
    assert len(graphs) == 4
    assert len(set(map(id, graphs))) == 2


def test_what_cannot_be_named_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no recipe 'blockwise'; there are tensorwise"):
        cg.float8("*", recipe="blockwise")
    with pytest.raises(ValueError, match="needs names of modules"):
        cg.float8()
    with pytest.raises(ValueError, match=r"'block.\*' names no module of Blocks .* blocks.0"):
        Actor.on(0, plan=cg.float8("block.*"))()
    with pytest.raises(ValueError, match=r"'heads' names no module of Blocks"):
        Actor.on(cg.mesh([0, 1], dp=2), plan=cg.plan({}) | cg.float8("heads", skip="tokens"))()
    cuts = cg.plan({"head.weight": cg.cut(0, "tp")}) | cg.float8("*")
    with pytest.raises(cg.ActorError, match=r"that of one rank names layers by cg\.float8"):
        Actor.on(0, plan=cuts)
    rows = cg.float8("*", recipe="rowwise").float8
    assert unsupported(rows, (8, 9)) == (
        "'rowwise' needs compute capability 9.0, and this device has 8.9"
    )
    assert unsupported(cg.float8("*").float8, (8, 9)) is None
    assert str(rows[0]) == 'cg.float8("*", recipe="rowwise")'
    assert rows[0].recipe is Float8Recipe.ROWWISE


def test_plans_show_their_layers() -> None:
    plan = cg.plan({"head.*": cg.cut(0, "tp")}) | cg.float8("blocks.*", skip=["blocks.0"])
    assert str(plan) == (
        'cg.plan({\n    "head.*": cg.cut(0, "tp"),\n})\n'
        '| cg.float8("blocks.*", recipe="tensorwise", skip=[\'blocks.0\'])'
    )


@cg.actor
class Sharing(nn.Module):
    """Two layers of one input, which may be written to in between."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.writes = writes
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)

    def loss(self, x: Tensor) -> Tensor:
        h = x * 2
        query = self.query(h)
        if self.writes:
            h.mul_(3)
        return (query * self.key(h)).sum()


@pytest.mark.parametrize(
    ("recipe", "writes"), [("tensorwise", False), ("tensorwise", True), ("rowwise", False)]
)
def test_layers_of_one_input_share_its_cast(recipe: str, writes: bool) -> None:
    """They have the bits of plain Python, where each casts it; a write in between parts them."""
    stage = Sharing.on(0, plan=cg.float8("*", recipe=recipe))(writes)

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = stage.loss(x)
        cg.backward(loss)
        return loss

    x = torch.randn(16, 32)
    loss = step(x)
    found = {name: p.grad.clone() for name, p in stage.local.named_parameters()}
    stage.local.zero_grad()
    with computing_in_float8(stage.local, Float8Use(cg.float8("*", recipe=recipe).float8)):
        expected = stage.local.loss(x)
        expected.backward()
    assert torch.equal(loss, expected)
    for name, parameter in stage.local.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


def test_a_scale_of_somebody_else_stays() -> None:
    """A weight may be cast by a formula of the user, too."""

    @cg.actor
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.linear.weight
            scale = 3 / weight.abs().amax()
            own = (weight * scale).clamp(-2, 2).to(E4M3).float()
            return self.linear(x) + x @ own

    own = Own.on(0, plan=cg.float8("*"))()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        return own.forward(x)

    x = torch.randn(16, 32)
    assert torch.equal(step(x), own.forward(x))
