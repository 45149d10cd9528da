"""Methods of actors on meshes write in place to their pieces, in the order of the user's lines."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg

from ...worlds import virtual_world

STEPS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "up": lambda m, i, y, h: (y, torch.tanh(y @ m.up.t())),
    "down": lambda m, i, y, h: (y + h @ m.down.t(), h),  # an exchange
    "replace rows": lambda m, i, y, h: (m.rows.index_copy_(0, i, h), (y, h))[1],
    "add to rows": lambda m, i, y, h: (m.rows.index_add_(0, i, h), (y, h))[1],
    "put rows": lambda m, i, y, h: (m.rows.index_put_((i,), h), (y, h))[1],
    "shrink rows": lambda m, i, y, h: (m.rows.mul_(0.5), (y, h))[1],
    "read rows": lambda m, i, y, h: (y, h + m.rows.index_select(0, i)),
    "count": lambda m, i, y, h: (m.seen.add_(y.sum(0)), (y, h))[1],
    "shrink by a view": lambda m, i, y, h: (m.seen.view(2, 2).mul_(0.9), (y, h))[1],
    "read count": lambda m, i, y, h: (y + m.seen.view(1, 4), h),
}


@cg.actor
class Memory(nn.Module):
    """Has hidden rows, which are cut, and a count, of which every rank has a copy."""

    def __init__(self, program: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, 6), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("rows", torch.randn(5, 6))
        self.register_buffer("seen", torch.randn(4))
        self.program = program

    def run(self, y: Tensor, index: Tensor) -> Tensor:
        h = y @ self.up.t()
        for name in self.program:
            y, h = STEPS[name](self, index, y, h)
        return y + h @ self.down.t()

    def crosses(self, y: Tensor) -> Tensor:
        view = self.seen.view(2, 2)
        view.mul_(0.5)
        y = (y @ self.up.t()) @ self.down.t()
        view.add_(y.sum())
        return y

    def gives(self, y: Tensor) -> Tensor:
        self.seen.add_(y.sum(0))
        return self.seen

    def adds_what_is_cut(self, y: Tensor) -> Tensor:
        self.copies.add_((y @ self.up.t()).sum(0))
        return y

    def learns(self, y: Tensor) -> Tensor:
        self.seen.add_(y.detach().sum(0))
        return (y * self.gain).sum()

    def replaces(self, y: Tensor) -> Tensor:
        self.seen = self.seen + y.detach().sum(0)
        return y * self.gain


class Copies(Memory):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("copies", torch.zeros(6))


PLAN = {"up": cg.cut(0, "tp"), "down|rows": cg.cut(1, "tp")}

_world = virtual_world(4)


def on(*args: Any, kind: Any = Memory, **axes: int) -> Any:
    return kind.on(cg.mesh(**(axes or {"tp": 2})), plan=PLAN)(*args)


def programs() -> list[tuple[str, ...]]:
    chosen = random.Random(0)
    return [tuple(chosen.choices(list(STEPS), k=9)) for _ in range(12)]


@pytest.mark.parametrize("program", programs(), ids=range(12))
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_writes_and_reads_keep_their_order(program: tuple[str, ...], axes: dict[str, int]) -> None:
    actor, plain = on(program, **axes), Memory(program)
    step = cg.trace(lambda y, index: actor.run(y, index))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        y, index = torch.randn(2, 4, generator=generator), torch.randperm(5)[:2]
        torch.testing.assert_close(step(y, index), plain.run(y, index))
    for rank, piece in actor.instances.items():
        torch.testing.assert_close(piece.rows, plain.rows.chunk(2, 1)[rank % 2])
        torch.testing.assert_close(piece.seen, plain.seen)


def test_what_is_added_up_over_rows_that_are_cut() -> None:
    """Each rank has a part of the rows, and all have the sum over all."""
    plan = {**PLAN, "gives_nothing_back(y)": cg.cut(0, "dp")}

    @cg.actor
    class Counter(Memory):
        def gives_nothing_back(self, y: Tensor) -> None:
            self.seen.add_(y.sum(0))

    actor, plain = Counter.on(cg.mesh(dp=2, tp=2), plan=plan)(), Counter()  # type: ignore[attr-defined]
    step = cg.trace(lambda y: actor.gives_nothing_back(y))
    y = torch.randn(3, 4)
    step(y)
    plain.gives_nothing_back(y)
    for piece in actor.instances.values():
        torch.testing.assert_close(piece.seen, plain.seen)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("crosses", "is used before and behind an exchange between ranks"),
        ("gives", "is given, and shares memory with state that is written in place"),
        ("replaces", "it changes 'seen', and its actor is on a mesh"),
    ],
)
def test_what_no_part_can_do(method: str, said: str) -> None:
    actor = on()
    with pytest.raises(cg.TraceError, match=said):
        cg.trace(lambda y: getattr(actor, method)(y)).lower(torch.ones(2, 4))


def test_copies_take_no_pieces() -> None:
    actor = on(kind=Copies)
    with pytest.raises(cg.TraceError, match=r"would have to be gathered|writes in place"):
        cg.trace(lambda y: actor.adds_what_is_cut(y)).lower(torch.ones(2, 4))


def test_a_derivative_of_what_writes() -> None:
    actor, plain, y = on(), Memory(), torch.randn(2, 4)
    cg.trace(lambda y: cg.backward(actor.learns(y)))(y)
    plain.learns(y).backward()
    for piece in actor.instances.values():
        torch.testing.assert_close(piece.seen, plain.seen)
        torch.testing.assert_close(piece.gain.grad, plain.gain.grad)


def test_a_derivative_of_what_gives_its_actor_a_new_tensor() -> None:
    actor = on()
    with pytest.raises(cg.TraceError, match="it changes 'seen', and its actor is on a mesh") as e:
        cg.trace(lambda y: cg.backward(actor.replaces(y))).lower(torch.ones(2, 4))
    assert "self.seen.add_(x)" in str(e.value)


@cg.actor
class Normed(nn.Module):
    """Ends with a batch norm, whose operator writes to statistics without saying so."""

    def __init__(self, tracks: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, track_running_stats=tracks)

    def loss(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x))).square().mean()


def test_a_batch_norm_counts_the_whole_batch() -> None:
    actor = Normed.on(cg.mesh(dp=2, tp=2), plan={"loss(x)": cg.cut(0, "dp")})()  # type: ignore[attr-defined]
    plain, x = Normed(), torch.randn(6, 4)
    found = cg.trace(lambda x: actor.loss(x))(x)
    torch.testing.assert_close(found, plain.loss(x).detach())
    for piece in actor.instances.values():
        torch.testing.assert_close(piece.norm.state_dict(), plain.norm.state_dict())


def test_a_batch_norm_without_running_statistics_is_trained() -> None:
    plan = {"loss(x)": cg.cut(0, "dp")}
    actor = Normed.on(cg.mesh(dp=2, tp=2), plan=plan)(tracks=False)  # type: ignore[attr-defined]
    plain, x = Normed(tracks=False), torch.randn(6, 4)
    cg.trace(lambda x: cg.backward(actor.loss(x)))(x)
    plain.loss(x).backward()
    for piece in actor.instances.values():
        for mine, other in zip(piece.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


class Scaled(nn.Module):
    """Its backward reads `down` and `seen`, and neither `up` nor `other`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Parameter(torch.randn(6, 4))
        self.down = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("seen", torch.randn(4))
        self.register_buffer("other", torch.randn(4))

    def loss(self, y: Tensor) -> Tensor:
        return (((y * self.seen) @ self.up.t()) @ self.down.t()).square().sum()

    def count(self, y: Tensor) -> None:
        with torch.no_grad():
            self.seen.add_(y.sum(0))

    def count_other(self, y: Tensor) -> None:
        with torch.no_grad():
            self.other.add_(y.sum(0))

    def shift_up(self, y: Tensor) -> None:
        with torch.no_grad():
            self.up.add_(y.sum())

    def shift_down(self, y: Tensor) -> None:
        with torch.no_grad():
            self.down.add_(y.sum())

    @cg.opaque
    def anything(self, y: Tensor) -> None:
        pass

    @cg.opaque
    def double_down(self, y: Tensor) -> None:
        with torch.no_grad():
            self.down.mul_(2)


CUT = {"up": cg.cut(0, "tp"), "down": cg.cut(1, "tp")}


def trained(
    name: str, plan: dict[str, Any] | None = CUT
) -> tuple[Any, Scaled, Callable[[Tensor], None]]:
    """An actor, its plain twin, and a step with a call between the forward and the backward."""
    actor = cg.actor(Scaled).on(cg.mesh(tp=2), plan=plan)()  # type: ignore[attr-defined]

    @cg.trace
    def step(y: Tensor) -> None:
        loss = actor.loss(y)
        getattr(actor, name)(y)
        cg.backward(loss)

    return actor, Scaled(), step


@pytest.mark.parametrize("name", ["count", "count_other", "shift_up"])
def test_a_call_before_the_backward_that_changes_nothing_the_backward_reads(name: str) -> None:
    actor, plain, step = trained(name)
    y = torch.randn(2, 4, generator=torch.Generator().manual_seed(2))
    step(y)
    # Eagerly `seen` would be noticed by its version; the step has kept what the forward has seen.
    plain.loss(y).backward()
    getattr(plain, name)(y)
    for rank, piece in actor.instances.items():
        torch.testing.assert_close(piece.up.grad, plain.up.grad.chunk(2, 0)[rank])
        torch.testing.assert_close(piece.down.grad, plain.down.grad.chunk(2, 1)[rank])
        torch.testing.assert_close(piece.up, plain.up.chunk(2, 0)[rank])
        torch.testing.assert_close(piece.seen, plain.seen)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shift_down", "needs 'down' as its forward has seen it, but a call between the two has"),
        ("anything", "may change what the gradient of Scaled.loss needs"),
    ],
)
def test_a_call_before_the_backward_that_may_change_what_the_backward_reads(
    name: str, message: str
) -> None:
    _, _, step = trained(name)
    with pytest.raises(cg.TraceError, match=message):
        step(torch.ones(2, 4))


def test_copies_notice_an_opaque_call_that_changes_what_the_backward_reads() -> None:
    actor, plain, step = trained("anything", None)
    y = torch.ones(2, 4)
    step(y)
    plain.loss(y).backward()
    for copied in actor.instances.values():
        torch.testing.assert_close(copied.down.grad, plain.down.grad)
    _, _, step = trained("double_down", None)
    with pytest.raises(cg.RemoteError, match="needs 'down' as its forward has seen it"):
        step(y)
