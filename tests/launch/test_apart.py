"""State that actors of different ranks hold: an error where one changes what another uses."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

torch.set_num_threads(1)

IDS = torch.arange(4)


@cg.actor
class First(nn.Module):
    def __init__(self, tokens: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids)

    @cg.opaque
    def clear(self) -> None:
        nn.init.zeros_(self.tokens.weight)


@cg.actor
class Last(nn.Module):
    def __init__(self, tokens: nn.Module, copies: bool = False) -> None:
        super().__init__()
        self.tokens = copy.deepcopy(tokens) if copies else tokens
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, h: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(h @ self.tokens.weight.T * self.scale, targets)

    def alone(self, h: Tensor) -> Tensor:
        return (h * self.scale).mean()


@cg.actor
class Average:
    """Follows a module by the mean of what it has been."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.mean = [p.detach().clone() for p in module.parameters()]

    @cg.opaque
    def follow(self) -> float:
        for mean, now in zip(self.mean, self.module.parameters(), strict=True):
            mean.lerp_(now.detach(), 0.1)
        return float(sum(mean.sum() for mean in self.mean))


@cg.actor
class Log:
    def __init__(self, into: Any) -> None:
        self.into = into

    @cg.opaque
    def write(self) -> int:
        self.into.append(len(self.into))
        return len(self.into)

    @cg.opaque
    def read(self) -> int:
        return len(self.into)


class Settings:
    """A user's statement for all actors."""

    def __init__(self) -> None:
        self.width = 4
        self.steps = 0

    @property
    def twice(self) -> int:
        self.__dict__["_twice"] = 2 * self.width  # a cache, as cached_property has one
        return 2 * self.width


@cg.actor
class Configured:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @cg.opaque
    def width(self) -> int:
        return self.settings.twice

    @cg.opaque
    def count(self) -> int:
        self.settings.steps += 1
        return self.settings.steps


def make(cls: Any, rank: int, *args: Any) -> Any:
    return cls.on(rank)(*args)


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with use_world(VirtualWorld(2)):
        torch.manual_seed(0)
        yield


def tied(first: Any, last: Any) -> cg.Step:
    @cg.trace
    def step(ids: Tensor) -> Any:
        loss = last.loss(first.forward(ids), ids)
        cg.backward(loss)
        return loss

    return step


def test_a_module_that_actors_of_two_ranks_train() -> None:
    tokens = nn.Embedding(8, 4)
    first = make(First, 0, tokens)
    last = make(Last, 1, tokens)
    with pytest.raises(cg.TraceError, match=r"'tokens\.weight' of .* and .* are one tensor") as got:
        tied(first, last).lower(IDS)
    assert got.value.loc is not None
    assert got.value.loc.function == "make"
    assert "weights are tied by sending them as a value" in got.value.remedy
    assert "copy.deepcopy" in got.value.remedy


def test_what_is_only_read_may_be_shared() -> None:
    tokens = nn.Embedding(8, 4)
    first, last = make(First, 0, tokens), make(Last, 1, tokens)

    @cg.trace
    def evaluate(ids: Tensor) -> Any:
        return last.loss(first.forward(ids), ids)

    assert float(evaluate(IDS)) == float(evaluate.__wrapped__(IDS))
    tokens.requires_grad_(False)
    assert tied(first, last)(IDS).isfinite()  # the scale alone is trained


def test_a_copy_is_not_shared() -> None:
    tokens = nn.Embedding(8, 4)
    assert tied(make(First, 0, tokens), make(Last, 1, tokens, True))(IDS).isfinite()


def test_actors_that_use_different_parts_of_what_all_hold() -> None:
    """A whole model is handed to every actor, which trains the layers of its own."""

    @cg.actor
    class Part(nn.Module):
        def __init__(self, model: nn.Sequential, index: int) -> None:
            super().__init__()
            self.model, self.index = model, index
            self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.model[self.index](x)

        def update(self) -> None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parts = [make(Part, rank, model, rank) for rank in range(2)]

    @cg.trace
    def step(x: Tensor) -> Any:
        loss = parts[1].forward(parts[0].forward(x)).square().mean()
        cg.backward(loss)
        for part in parts:
            part.update()
        return loss.detach()

    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        loss = plain(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(step(torch.ones(2, 4)), loss.detach())


def test_an_actor_that_only_opaque_methods_use_uses_all_that_it_holds() -> None:
    tokens = nn.Embedding(8, 4)
    first, average = make(First, 0, tokens), make(Average, 1, tokens)

    @cg.trace
    def step(ids: Tensor) -> Any:
        cg.backward(first.forward(ids).square().mean())
        return average.follow()

    with pytest.raises(cg.TraceError, match="are one tensor"):
        step.lower(IDS)


def test_what_one_step_trains_and_another_reads() -> None:
    tokens = nn.Embedding(8, 4)
    first = make(First, 0, tokens)

    @cg.trace
    def train(ids: Tensor) -> Any:
        loss = first.forward(ids).square().mean()
        cg.backward(loss)
        return loss

    train(IDS)
    last = make(Last, 1, tokens)

    @cg.trace
    def apart(ids: Tensor) -> Any:
        return last.alone(first.forward(ids))

    @cg.trace
    def evaluate(ids: Tensor) -> Any:
        return last.loss(torch.ones(4, 4), ids)

    apart(IDS)  # which does not read it
    with pytest.raises(cg.TraceError, match=r"are one tensor, which @.*forward\.vjp\.backward"):
        evaluate(IDS)


def test_a_buffer_that_a_traced_method_writes_to() -> None:
    norm = nn.BatchNorm1d(4)

    @cg.actor
    class Normed(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    one, other = make(Normed, 0, norm), make(Normed, 1, norm)

    @cg.trace
    def step(x: Tensor) -> Any:
        return other.forward(one.forward(x))

    with pytest.raises(cg.TraceError, match=r"'norm\..*' of .* which @.*\.forward changes"):
        step.lower(torch.ones(2, 4))
    norm.eval()
    assert step(torch.ones(2, 4)).isfinite().all()


def test_a_parameter_that_an_opaque_method_writes_to() -> None:
    tokens = nn.Embedding(8, 4)
    first, last = make(First, 0, tokens), make(Last, 1, tokens)

    @cg.trace
    def step(ids: Tensor) -> Any:
        first.clear()
        return last.loss(first.forward(ids), ids)

    with pytest.raises(cg.RemoteError, match=r"clear has changed 'tokens\.weight' of .*rank 0"):
        step(IDS)


def test_a_list_that_an_opaque_method_writes_to() -> None:
    into: list[int] = []
    one, other = make(Log, 0, into), make(Log, 1, into)

    @cg.trace
    def read() -> Any:
        return one.read(), other.read()

    @cg.trace
    def write() -> Any:
        return one.write(), other.read()

    assert read() == (0, 0)
    with pytest.raises(cg.RemoteError, match=r"write has changed 'into' of .* as well; in proc"):
        write()


def test_settings_that_all_actors_read() -> None:
    settings = Settings()
    actors = [make(Configured, rank, settings) for rank in range(2)]

    @cg.trace
    def widths() -> Any:
        return [actor.width() for actor in actors]

    @cg.trace
    def counts() -> Any:
        return [actor.count() for actor in actors]

    assert [widths() for _ in range(3)] == [[8, 8]] * 3
    with pytest.raises(cg.RemoteError, match=r"count has changed 'settings' of"):
        counts()


def test_nothing_is_kept_alive() -> None:
    def use() -> Any:
        tokens = nn.Embedding(8, 4)
        actors = [make(First, rank, tokens) for rank in range(2)]

        @cg.trace
        def step(ids: Tensor) -> Any:
            return actors[1].forward(actors[0].forward(ids).argmax(-1))

        step(IDS)
        return weakref.ref(tokens.weight)

    weight = use()
    gc.collect()
    assert weight() is None
