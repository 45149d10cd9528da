"""Opaque methods of actors on meshes draw alike on all ranks, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import cg
from cg.ir.layout import Cut, Layout
from cg.tracer.function.groups.pieces_only import as_in_one_process
from cg.tracer.values.pieces import PieceMemory
from tests.sampling import examples

from ...worlds import virtual_world

Work = Callable[["Net"], Any]

ROWS = Layout((Cut(("dp",)), Cut()))
PROCESS = "from its process's own generator"
FOR_PIECE = "with numbers that it draws"


@cg.actor
class Net(nn.Module):
    """A layer whose gradients are changed before the update."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4)
        self.register_buffer("drawn", torch.zeros(4, 6))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.noise = torch.Generator().manual_seed(0)
        self.work = work
        self.calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.linear(x), y)

    def draw(self) -> None:
        self.drawn.normal_()

    @cg.opaque
    def update(self) -> None:
        self.calls += 1
        self.work(self)
        self.optimizer.step()
        self.optimizer.zero_grad()


PLACES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one": (0, {}),
    "copies": (cg.mesh(dp=2), {}),
    "rows": (cg.mesh(dp=2), {"plan": {"loss(x)|loss(y)": cg.cut(0, "dp")}}),
    "cut": (cg.mesh(tp=2), {"plan": {"linear.*|drawn": cg.cut(0, "tp")}}),
}


def on(kind: str, work: Work) -> Any:
    place, options = PLACES[kind]
    return Net.on(place, **options)(work)  # type: ignore[attr-defined]


def step_of(net: Any, *, draws: bool = False) -> Any:
    @cg.trace
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = net.loss(x, y)
        cg.backward(loss)
        if draws:
            net.draw()
        net.update()
        return loss

    return train


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=generator), torch.arange(8) % 4


_world = virtual_world(2)


def gradient(net: Net) -> Tensor:
    assert net.linear.weight.grad is not None
    return net.linear.weight.grad


OF_PROCESS: dict[str, tuple[Work, str]] = {
    "like": (lambda n: gradient(n).add_(torch.randn_like(gradient(n))), "randn_like"),
    "in place": (lambda n: gradient(n).normal_(), "normal_"),
    "of a shape": (lambda n: gradient(n).add_(torch.rand(4, 6)), "rand"),
    "a number": (lambda n: gradient(n).mul_(torch.rand(())), "rand"),
    "an order": (lambda n: torch.randperm(4), "randperm"),
    "dropout": (lambda n: functional.dropout(gradient(n)), "bernoulli_"),
    "the default one": (
        lambda n: torch.randn(4, generator=torch.default_generator),
        "randn",
    ),
    "shuffled": (lambda n: next(iter(DataLoader([1, 2], shuffle=True))), "random_"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", ["copies", "rows"])
@pytest.mark.parametrize("what", OF_PROCESS)
def test_draws_from_the_process_are_refused_on_a_mesh(what: str, kind: str) -> None:
    work, name = OF_PROCESS[what]
    with pytest.raises(cg.RemoteError) as info:
        step_of(on(kind, work))(*data())
    text = str(info.value)
    assert f"draws numbers by {name} {PROCESS}" in text
    assert f"at {__file__}:" in text
    assert "self.noise = torch.Generator().manual_seed(0)" in text
    assert "generator=self.noise" in text


@pytest.mark.parametrize("what", OF_PROCESS)
def test_an_actor_on_one_rank_draws_as_it_likes(what: str) -> None:
    step_of(on("one", OF_PROCESS[what][0]))(*data())


def test_a_late_draw_is_refused_and_says_since_when_calls_may_be_wrong() -> None:
    def late(net: Net) -> None:
        if net.calls > 5:
            gradient(net).add_(torch.randn_like(gradient(net)))

    train = step_of(on("rows", late))
    for _ in range(8):
        train(*data())
    with pytest.raises(cg.RemoteError) as info:
        train(*data())
    assert "this is call 9 of the method. Call 5 was the last that was looked at" in str(info.value)


OWN: dict[str, Work] = {
    "of a shape": lambda n: gradient(n).add_(torch.randn(4, 6, generator=n.noise)),
    "in place": lambda n: gradient(n).add_(torch.empty(4, 6).uniform_(generator=n.noise)),
    "of a gradient": lambda n: gradient(n).normal_(generator=n.noise),
    "a mask": lambda n: gradient(n).mul_(torch.rand(4, 6, generator=n.noise) < 0.5),
    "loaded": lambda n: gradient(n).mul_(
        next(iter(DataLoader([1, 2, 3], shuffle=True, generator=n.noise)))  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("kind", ["copies", "rows"])
@pytest.mark.parametrize("what", OWN)
def test_a_generator_of_the_actor_draws_what_one_process_draws(what: str, kind: str) -> None:
    x, y = data()
    plain, net = Net(OWN[what]), on(kind, OWN[what])
    train = step_of(net)
    for _ in range(4):
        loss = plain.loss(x, y)
        loss.backward()
        plain.update()
        torch.testing.assert_close(train(x, y), loss.detach(), rtol=1e-5, atol=1e-6)
    one, other = net.instances.values()
    assert torch.equal(one.linear.weight, other.linear.weight)


FOR_PIECES: dict[str, Work] = {
    "like": OF_PROCESS["like"][0],
    "in place": OWN["of a gradient"],
    "of its shape": lambda n: gradient(n).add_(
        0.1 * torch.randn(gradient(n).shape, generator=n.noise)
    ),
    "of its size": lambda n: gradient(n).mul_(
        torch.rand(gradient(n).numel(), generator=n.noise).view_as(gradient(n)) < 0.5
    ),
    "assigned": lambda n: setattr(
        n.linear.weight, "grad", torch.randn(gradient(n).shape, generator=n.noise)
    ),
    "in a list": lambda n: torch._foreach_add_(
        [gradient(n)], [torch.randn(gradient(n).shape, generator=n.noise)]
    ),
    "written": lambda n: gradient(n).copy_(
        torch.zeros(2, 6).copy_(torch.randn(2, 6, generator=n.noise))
    ),
}


@pytest.mark.parametrize("what", FOR_PIECES)
def test_draws_for_pieces_are_refused(what: str) -> None:
    """Each rank would draw the same for another part."""
    with pytest.raises(cg.RemoteError) as info:
        step_of(on("cut", FOR_PIECES[what]))(*data())
    text = str(info.value)
    assert FOR_PIECE in text
    assert f"at {__file__}:" in text
    assert "write to a buffer that the plan cuts as this tensor" in text


@pytest.mark.parametrize("kind", ["one", "rows", "cut"])
def test_the_remedy_for_pieces_gives_the_numbers_of_one_rank(kind: str) -> None:
    """A traced method draws, into a buffer that is cut as the gradient is."""
    trained = []
    for place in ("one", kind):
        train = step_of(on(place, lambda n: gradient(n).add_(n.drawn)), draws=True)
        trained.append([train(*data()) for _ in range(4)])
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-6)


def outcome(work: Callable[[Tensor, torch.Generator], Any]) -> str:
    """What a function of a piece and a generator is told; "" if it is not refused."""
    memory, given = PieceMemory(), torch.ones(3, 4)
    memory.note(given, ROWS)
    try:
        with as_in_one_process(memory, "update"):
            work(given, torch.Generator().manual_seed(0))
    except RuntimeError as error:
        return str(error)
    return ""


PASSING: dict[str, Callable[[Tensor, torch.Generator], Any]] = {
    "a number": lambda p, g: p.mul_(torch.rand((), generator=g)),
    "a Python number": lambda p, g: p.mul_(float(torch.rand(1, generator=g))),
    "of what is not cut": lambda p, g: p.mul_(torch.rand(1, 4, generator=g)).add_(
        torch.rand(4, generator=g)
    ),
    "its part of the whole": lambda p, g: p.add_(0.1 * torch.randn(6, 4, generator=g)[:3]),
    "no dropout": lambda p, g: functional.dropout(p, training=False) + functional.dropout(p, 0.0),
    "attention": lambda p, g: functional.scaled_dot_product_attention(*torch.ones(3, 1, 4, 2)),
    "evaluated": lambda p, g: functional.rrelu(torch.ones(4), training=False),
}


@pytest.mark.parametrize("is_inferring", [False, True])
@pytest.mark.parametrize("what", PASSING)
def test_what_is_the_same_on_all_ranks_passes(what: str, is_inferring: bool) -> None:
    with torch.inference_mode(is_inferring):
        assert outcome(PASSING[what]) == ""


@pytest.mark.parametrize("is_inferring", [False, True])
def test_recurrent_networks_draw_only_what_they_drop(is_inferring: bool) -> None:
    still, dropping = (nn.LSTM(4, 4, num_layers=2, dropout=rate) for rate in (0.0, 0.5))
    x = torch.ones(2, 1, 4)
    with torch.inference_mode(is_inferring):
        assert outcome(lambda p, g: still(x)) == ""
        assert outcome(lambda p, g: dropping.eval()(x)) == ""
        assert PROCESS in outcome(lambda p, g: dropping.train()(x))


DRAWS: list[Callable[[tuple[int, ...], torch.Generator], Tensor]] = [
    lambda shape, g: torch.randn(shape, generator=g),
    lambda shape, g: torch.randint(9, shape, generator=g).float(),
    lambda shape, g: torch.empty(shape).exponential_(generator=g),
    lambda shape, g: torch.bernoulli(torch.full(shape, 0.5), generator=g),
    lambda shape, g: torch.normal(torch.zeros(shape), 1.0, generator=g),
]
CHANGES: list[Callable[[Tensor], Tensor]] = [
    lambda x: 0.1 * x,
    lambda x: x.abs().sqrt(),
    lambda x: torch._foreach_neg([x])[0],
    lambda x: torch.zeros_like(x).copy_(x),
    lambda x: x.double().float(),
    lambda x: x.reshape(-1).view(x.shape),
    lambda x: torch.where(x > 0, x, 0.0),
]


@examples(100, shrinks=True)
@given(
    draw=st.sampled_from(DRAWS),
    changes=st.lists(st.sampled_from(CHANGES), max_size=4),
    shape=st.sampled_from([(), (1,), (4,), (1, 4), (3, 1), (3, 4)]),
)
def test_drawn_numbers_meet_pieces_only_if_all_ranks_need_the_same(
    draw: Callable[[tuple[int, ...], torch.Generator], Tensor],
    changes: list[Callable[[Tensor], Tensor]],
    shape: tuple[int, ...],
) -> None:
    def work(piece: Tensor, generator: torch.Generator) -> None:
        made = draw(shape, generator)
        for change in changes:
            made = change(made)
        piece.add_(made)

    assert (FOR_PIECE in outcome(work)) == (len(shape) == 2 and shape[0] > 1)
