"""Test actors whose parameters are cut where they rest, and gathered where they are used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.ops import Call, Transfer
from cg.ir.ops.module import Program
from cg.launch.world.world import use_world

D, ROWS = 6, 8
PLAN = {
    "forward(x)|loss(x)|loss(y)": cg.cut(0, "dp"),
    "up.*": cg.cut(0, "tp"),
    "down.weight": cg.cut(1, "tp"),
}


@cg.actor
class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.opt = torch.optim.Adam(self.parameters(), lr=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.forward(x) - y).square().mean()

    def update(self) -> None:
        self.opt.step()
        self.opt.zero_grad()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, ROWS, D, generator=generator)
    return x, y


@pytest.mark.grid(1)
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (3, 1), (2, 2)])
def test_training_is_that_of_one_process(dp: int, tp: int, schedule: str) -> None:
    x, y = data()
    first, second = Layer(1), Layer(2)
    losses = []
    for _ in range(3):
        parts = [second.loss(first(a), b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        (sum(parts) / 2).backward()
        losses.append(torch.stack(parts).mean().detach())
        first.update()
        second.update()
    with use_world(VirtualWorld(2 * dp * tp)):
        grid = cg.mesh(pp=2, dp=dp, tp=tp)
        store = cg.cut(0, "dp")
        one, other = (
            Layer.on(m, plan=PLAN, store=store)(i) for i, m in enumerate(grid.unbind("pp"), 1)
        )

        @cg.trace
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found = []
            for xs, ys in cg.microbatches((x, y), 2):
                loss = other.loss(one.forward(xs), ys)
                cg.backward(loss / 2)
                found.append(loss)
            one.update()
            other.update()
            return cg.mean(found)

        compiled = step.lower(x, y).compile(schedule=getattr(cg.schedules, schedule)())
        for right in losses:
            torch.testing.assert_close(compiled(x, y), right)
        shape = one.instances[0].up.weight.shape
        rows = 2 * D // tp
        assert shape[0] == rows // dp
        assert one.instances[0].scale.shape == ()


def test_parameters_are_gathered_for_the_forward_and_again_for_the_backward() -> None:
    x, _ = data()
    with use_world(VirtualWorld(2)):
        layer = Layer.on(cg.mesh(dp=2), plan={"forward(x)": cg.cut(0, "dp")}, store=cg.cut(0, "dp"))

        actor = layer(1)

        @cg.trace
        def step(x: torch.Tensor) -> None:
            cg.backward(actor.forward(x).sum())

        module = step.lower(x).trace.module
    (forward,) = (
        body for name, body in module.bodies.items() if name.endswith(".forward.vjp.forward")
    )
    (backward,) = (
        body for name, body in module.bodies.items() if name.endswith(".forward.vjp.backward")
    )
    assert handed(forward, ".rest", ".whole")["up.weight"] == (f"{2 * D * D}/dp", f"{2 * D * D}")
    assert handed(backward, ".rest", ".whole")["down.weight"] == (
        f"{2 * D * D}/dp",
        f"{2 * D * D}",
    )
    reduced = handed(backward, ".gradient.dp", ".add.dp")["up.weight"]
    assert reduced == (f"{2 * D * D}|+dp", f"{2 * D * D}/dp"), "to the piece at rest"


def handed(body: Program, first: str, last: str) -> dict[str, tuple[str, str]]:
    """The shapes before and after the transfer between two functions, by parameter."""
    makers = {value: op for op in body.ops for value in op.results}
    found = {}
    for op in body.ops:
        if isinstance(op, Call) and op.fn.name.endswith(last):
            transfer = makers[op.operands[0]]
            assert isinstance(transfer, Transfer)
            start = makers[transfer.operands[0]]
            assert isinstance(start, Call)
            assert start.fn.name.endswith(first)
            path = op.fn.name.removesuffix(last).partition(".")[2]
            types = (str(each.result.type) for each in (start, transfer))
            before, after = (text[4:-1] for text in types)
            found[path] = before, after
    return found


class Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(D, 2 * D)
        self.norm = nn.LayerNorm(2 * D)
        self.opt = torch.optim.SGD(self.parameters(), lr=0.1)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x)).square().mean()

    def update(self) -> None:
        self.opt.step()


cg.actor(Meta)


def test_an_actor_may_begin_on_the_meta_device() -> None:
    torch.manual_seed(11)
    state = torch.get_rng_state()
    right = nn.Linear(D, 2 * D)
    torch.set_rng_state(state)
    with use_world(VirtualWorld(2)):
        plan = {"up.*": cg.cut(0, "tp")}
        actor = Meta.on(cg.mesh(tp=2), plan=plan, init="meta")()
    for rank, one in actor.instances.items():
        rows = slice(rank * D, (rank + 1) * D)
        assert torch.equal(one.up.weight, right.weight[rows])
        assert torch.equal(one.up.bias, right.bias[rows])
        assert torch.equal(one.norm.weight, torch.ones(2 * D))
        assert one.opt.param_groups[0]["params"][0] is one.up.weight


def test_what_cannot_begin_on_the_meta_device() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(4))

    with use_world(VirtualWorld(2)):
        factory = cg.actor(Table).on(cg.mesh(tp=2), init="meta")
        with pytest.raises(ValueError, match=r"no reset_parameters\(\) that says what 'table'"):
            factory()


@pytest.mark.parametrize("first", ["loss", "penalty"])
def test_a_sum_and_a_copy_are_not_added_to_one_gradient(first: str) -> None:
    class Penalized(Meta):
        def penalty(self) -> torch.Tensor:
            return self.up.weight.square().sum()

    with use_world(VirtualWorld(2)):
        actor = Penalized.on(cg.mesh(dp=2), plan={"loss(x)": cg.cut(0, "dp")})()

        def step(x: torch.Tensor) -> None:
            calls = {"loss": lambda: actor.loss(x), "penalty": actor.penalty}
            second = "penalty" if first == "loss" else "loss"
            cg.backward(calls[first](), calls[second]())

        with pytest.raises(cg.TraceError, match=r"'up\.weight' .* is a sum along") as info:
            cg.trace(step)(data()[0])
    assert "no axis" in str(info.value)
    assert "cut the batch along the same axes" in str(info.value)
