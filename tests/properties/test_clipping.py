"""Clipping by the norm over all actors: as torch does it, with the same bits if not awaited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg

from ..stages import mean_loss
from ..worlds import virtual_world

pytestmark = pytest.mark.timeout(120)

P, M, WIDTH = 3, 4, 4
QUIET, LOUD = 0.1, 3.0
MOST = {3: 2.0, 6: 11.0}
"""A norm between those of quiet and of loud batches, by the number of stages."""


@cg.actor
class ClippedStage(nn.Module):
    """Tensors are float64[rows, WIDTH]. Writes down the sizes of the gradients it updates by."""

    def __init__(self, number: int, drops: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        draw = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(draw)
        self.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.drops = drops
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        self.updates: list[float] = []
        self.fragile = False

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        h = nn.functional.dropout(x, 0.2) if self.drops else x
        return x + torch.tanh(h @ self.weight + self.bias)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x - y) ** 2).mean()

    @cg.opaque(fake=lambda self: torch.empty((), dtype=torch.float64))
    def squared_norm(self) -> Tensor:
        return sum(p.grad.square().sum() for p in self.parameters() if p.grad is not None)

    def clip_and_update(self, squared: Tensor, most: float) -> None:
        coefficient = torch.clamp(most / (squared.sqrt() + 1e-6), max=1.0)
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(coefficient)
        self.update()

    def restart(self, number: int) -> None:
        """Be as new."""
        self.load_state_dict(ClippedStage(number).state_dict())
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        self.scheduler.last_epoch = 0
        self.updates.clear()
        for p in self.parameters():
            p.grad = None

    def update(self) -> None:
        self.updates.append(float(self.weight.grad.norm()))
        if self.fragile and self.updates[-1] > 0.5:
            raise ValueError("a gradient that should have been clipped")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def forward_backward(stages: Sequence[Any], x: Tensor, y: Tensor) -> Tensor:
    return mean_loss(stages, (x, y), M)


def by_hand(stages: Sequence[Any], most: float) -> Callable[..., Tensor]:
    """As a user may write it, with a collective."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = forward_backward(stages, x, y)
        totals = cg.all_reduce([stage.squared_norm() for stage in stages], op="sum")
        for stage, total in zip(stages, totals, strict=True):
            stage.clip_and_update(total, most)
        return loss

    return step


def rounds(stages: Sequence[Any], most: float, count: int = 1) -> Callable[..., list[Any]]:
    """So many updates in one step."""

    def step(x: Tensor, y: Tensor) -> list[Any]:
        found = []
        for one, two in zip(x.chunk(count), y.chunk(count), strict=True):
            loss = forward_backward(stages, one, two)
            norm = cg.clip_grad_norm(stages, most)
            for stage in stages:
                stage.update()
            found.append((loss, norm))
        return found

    return step


def plainly(
    stages: Sequence[ClippedStage], most: float, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """One step, in PyTorch alone."""
    total = torch.zeros((), dtype=torch.float64)
    for part, target in zip(x.chunk(M), y.chunk(M), strict=True):
        for stage in stages:
            part = stage.forward(part)
        loss = stages[-1].loss(part, target) / M
        loss.backward()
        total += loss.detach()
    parameters = [p for stage in stages for p in stage.parameters()]
    norm = nn.utils.clip_grad_norm_(parameters, most)
    for stage in stages:
        stage.update()
    return total, norm


def batch(seed: int, count: int = 1, size: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 2 * M * count, WIDTH)
    x, y = size * torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, y


def make(schedule: str, drops: bool = False) -> list[Any]:
    vee = schedule in ("zb-v", "dualpipe-v")
    ranks = (*range(P), *reversed(range(P))) if vee else tuple(range(P))
    return [ClippedStage.on(rank)(number, drops) for number, rank in enumerate(ranks)]


def state(stage: Any) -> list[Any]:
    """All that a stage holds."""
    local = stage.local if isinstance(stage, cg.ActorHandle) else stage
    optimizer = local.optimizer.state_dict()
    return [
        *local.state_dict().values(),
        *(value for each in optimizer["state"].values() for value in each.values()),
        torch.tensor(optimizer["param_groups"][0]["lr"]),
        torch.tensor(local.updates),
        torch.tensor(local.scheduler.last_epoch),
        *(p.grad for p in local.parameters()),
    ]


def assert_same(one: Sequence[Any], other: Sequence[Any], tolerance: float) -> None:
    """Hold the states of stages against others; 0 means bit for bit."""
    for a, b in zip(one, other, strict=True):
        for x, y in zip(state(a), state(b), strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


_world = virtual_world(P, threads=1, scope="module")


@pytest.fixture(scope="module")
def traced() -> dict[Any, tuple[list[Any], cg.Lowered]]:
    """Stages and their step, by what clips and how many stages there are."""
    return {}


@pytest.mark.grid(1)
@pytest.mark.parametrize("build", [by_hand, rounds], ids=["by hand", "clip_grad_norm"])
@pytest.mark.parametrize("schedule", cg.schedules.names())
def test_clipping_is_torchs_under_every_schedule(
    schedule: str, build: Any, traced: dict[Any, tuple[list[Any], cg.Lowered]]
) -> None:
    made = make(schedule)
    alone, most = [handle.local for handle in make(schedule)], MOST[len(made)]
    key = build, len(made)
    if key not in traced:
        traced[key] = made, cg.trace(build(made, most)).lower(*batch(0))
    stages, lowered = traced[key]
    for number, stage in enumerate(stages):
        stage.local.restart(number)
    compiled = lowered.compile(schedule=cg.schedules.by_name(schedule))
    clipped = 0
    for seed, size in enumerate((LOUD, QUIET, LOUD)):
        found = compiled(*batch(seed, 1, size))
        loss, norm = plainly(alone, most, *batch(seed, 1, size))
        clipped += bool(norm > most)
        wanted = loss if build is by_hand else [(loss, norm)]
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
        assert_same(stages, alone, 1e-10)
    assert clipped == 2


def test_the_norm_is_torchs_bit_for_bit() -> None:
    """Gradients of the same bits give a norm, and clipped gradients, of the same bits."""
    stages = make("1f1b")
    for number, stage in enumerate(stages):
        for p in stage.local.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)).double()
    parameters = [p for stage in stages for p in stage.local.parameters()]
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    for most in (100.0, 0.3):
        for kind in (2.0, 1.0, float("inf")):
            for p, copy in zip(parameters, copies, strict=True):
                copy.grad = p.grad.clone()
            expected = nn.utils.clip_grad_norm_(copies, most, kind)
            step = cg.trace(partial(cg.clip_grad_norm, stages, most, kind))
            assert torch.equal(step(), expected)
            assert all(torch.equal(p.grad, c.grad) for p, c in zip(parameters, copies, strict=True))
    assert torch.equal(cg.clip_grad_norm(stages, 100.0), nn.utils.clip_grad_norm_(copies, 100.0))


@pytest.mark.parametrize(
    "schedule",
    ["zb-h2", "zb-v", *(pytest.param(n, marks=pytest.mark.slow) for n in ("1f1b", "zb-h1"))],
)
def test_what_is_not_awaited_gives_the_same_bits(schedule: str) -> None:
    """Quiet batches go through; loud ones are undone; after these some run as they are."""
    made = [make(schedule, drops=True) for _ in range(2)]
    order = cg.schedules.by_name(schedule)
    most = 25.0 if len(made[0]) > P else 2.0
    sure, bold = (cg.trace(rounds(stages, most, 3)).lower(*batch(0, 3)) for stages in made)
    awaited = sure.compile(schedule=order, seed=5)
    optimistic = bold.compile_optimistic(schedule=order, seed=5)
    undone = []
    for seed, loud in enumerate([0, 0, 1, 1, 0, 1, 0, 0, 0]):
        size = 10 * LOUD if loud else QUIET
        expected = awaited(*batch(seed, 3, size))
        found = optimistic(*batch(seed, 3, size))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert_same(made[1], made[0], 0)
        undone.append(optimistic.undone)
    assert undone == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    optimistic.close()


def test_nothing_waits_for_the_norm() -> None:
    """On paper, two updates in a step with ZB-H2 cost no bubble between them."""
    stages = make("zb-h2")
    lowered = cg.trace(rounds(stages, 1e9, 2)).lower(*batch(0, 2))
    optimistic = lowered.compile_optimistic(schedule=cg.schedules.zb_h2())
    sure, bold = (c.simulate(cg.Costs()).bubble_ratio for c in (optimistic.plain, optimistic.bold))
    assert bold < sure / 1.4


def test_an_error_that_only_the_assumption_causes_is_undone() -> None:
    stages, plain = make("1f1b"), make("1f1b")
    for stage in (*stages, *plain):
        stage.local.fragile = True
    optimistic = cg.trace(rounds(stages, 0.5)).lower(*batch(0)).compile_optimistic()
    awaited = cg.trace(rounds(plain, 0.5)).lower(*batch(0)).compile()
    torch.testing.assert_close(
        optimistic(*batch(0, size=3.0)), awaited(*batch(0, size=3.0)), rtol=0, atol=0
    )
    assert optimistic.undone == 1
    assert_same(stages, plain, 0)
    for stage in stages:
        stage.local.fragile = False
        stage.local.weight.grad = None
    stages[0].local.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="has changed since it was"):
        optimistic(*batch(0))


def test_an_actor_that_is_no_module_and_one_without_gradients() -> None:
    @cg.actor
    class Plain:
        def __init__(self) -> None:
            self.weights = [torch.ones(3, requires_grad=True)]

        def loss(self, x: Tensor) -> Tensor:
            return (self.weights[0] * x).sum()

    @cg.actor
    class Idle:
        pass

    plain, idle = Plain.on(1)(), Idle.on(0)()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        cg.backward(plain.loss(x))
        return cg.clip_grad_norm([idle, plain], 1.0)

    assert float(step(torch.tensor([2.0, 3.0, 6.0]))) == 7.0
    torch.testing.assert_close(plain.local.weights[0].grad.norm(), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("actors", "most", "message"),
    [
        ([], 1.0, "clip_grad_norm of no actors"),
        ([nn.Linear(1, 1)], 1.0, "clip_grad_norm of a Linear, which is not an actor"),
        (None, 0.0, "with max_norm=0.0"),
    ],
)
def test_what_cannot_be_clipped(actors: Any, most: float, message: str) -> None:
    stages = make("1f1b") if actors is None else actors
    with pytest.raises(cg.TraceError, match=message) as caught:
        cg.trace(lambda: cg.clip_grad_norm(stages, most)).lower()
    assert caught.value.loc is not None
    assert caught.value.loc.file == __file__


def test_one_signature_alone_can_be_optimistic() -> None:
    lowered = cg.trace(rounds(make("1f1b"), 1.0)).lower_many([batch(0)])
    with pytest.raises(ValueError, match=r"a step that lower\(\) has traced"):
        lowered.compile_optimistic()


@cg.actor
class Share:
    """Trains one layer of a model that it holds whole."""

    def __init__(self, model: nn.ModuleList, number: int) -> None:
        self.model, self.number = model, number
        self.optimizer = torch.optim.SGD(model[number].parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.model[self.number](x))

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return ((h - y) ** 2).mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("ranks", [(0, 0), (0, 1), (1, 0)], ids=str)
def test_a_parameter_that_several_actors_hold_counts_once(
    ranks: tuple[int, ...], eager: bool
) -> None:
    def model() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in ranks)

    alone, whole = model(), model()
    shares = [Share.on(rank)(whole, number) for number, rank in enumerate(ranks)]
    step: Callable[..., Any] = cg.trace(rounds(shares, 0.1))
    step = step.__wrapped__ if eager else step  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for seed in range(3):
        x, y = batch(seed, size=LOUD)
        [(_, norm)] = step(x, y)
        ((torch.tanh(alone[1](torch.tanh(alone[0](x)))) - y) ** 2).mean().backward()
        wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(norm, wanted, rtol=1e-10, atol=0)
    for found, expected in zip(whole.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
