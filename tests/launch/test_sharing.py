"""Actors of one rank that share state: compiled steps keep the order that plain Python has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.passes.schedules import by_name

from ..sampling import scaled
from ..stages import mean_loss

torch.set_num_threads(1)

SCHEDULES = ("gpipe", "1f1b", "zb-h1")


@cg.actor
class SharingStage(nn.Module):
    """A linear layer, its own or one that another stage has, too."""

    def __init__(self, seed: int, linear: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 4, dtype=torch.float64) if linear is None else linear
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.linear(h), y)

    def weight(self) -> Any:
        return self.linear.weight

    def size(self) -> Tensor:
        return self.linear.weight.detach().norm()


@cg.actor
class Optimizer:
    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.Adam(list(parameters), lr=0.1)

    def step(self) -> None:
        self.optimizer.step()

    def zero(self) -> None:
        self.optimizer.zero_grad()


@cg.actor
class Notes:
    """Writes into what it has been given."""

    def __init__(self, name: str, into: Any) -> None:
        self.name = name
        self.into = into

    @cg.opaque
    def note(self) -> None:
        self.note_after(None)

    @cg.opaque
    def note_after(self, h: Any) -> None:
        if isinstance(self.into, dict):
            self.into[self.name] = len(self.into)
        elif isinstance(self.into, list):
            self.into.append(self.name)
        else:
            self.into.add_(self.into + len(self.name))

    @cg.opaque
    def count(self) -> float:
        """A number that says what is there, and in what order."""
        if isinstance(self.into, Tensor):
            return float(self.into)
        return float(sum(place * len(name) for place, name in enumerate(self.into, 1)))

    def read(self) -> Tensor:
        return self.into * 2


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with use_world(VirtualWorld(2)):
        yield


def make(cls: Any, rank: int, *args: Any) -> Any:
    return cls.on(rank)(*args)


def optimizer_of(stage: Any) -> Any:
    return make(Optimizer, stage.rank, stage.local.parameters())


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    return draw[0], draw[1]


Calls = list[Callable[[], Any]]


def train_with(stages: list[Any], first: Calls, last: Calls) -> Callable[..., Any]:
    """A step that calls `first`, trains stages on microbatches, and calls `last`."""

    def train(x: Tensor, y: Tensor) -> Any:
        before = [call() for call in first]
        loss = mean_loss(stages, (x, y), 4)
        return loss, before, [call() for call in last]

    return train


def assert_as_plain(build: Callable[[], Callable[..., Any]], schedule: str) -> None:
    """The step of `build` gives the same, compiled and as plain Python, four times in a row."""
    torch.manual_seed(0)
    compiled = cg.trace(build()).lower(*batch()).compile(schedule=by_name(schedule))
    plain = build()
    for seed in range(4):
        torch.testing.assert_close(compiled(*batch(seed)), plain(*batch(seed)), rtol=1e-9, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_optimizer_in_an_actor_of_its_own(two_ranks: None, schedule: str) -> None:
    def build() -> Callable[..., Any]:
        stages = [make(SharingStage, rank, rank) for rank in range(2)]
        optimizers = [optimizer_of(stage) for stage in stages]
        last = [call for o in optimizers for call in (o.step, o.zero)]
        return train_with(stages, [], [*last, *(stage.size for stage in stages)])

    assert_as_plain(build, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_that_the_optimizer_clears_first(two_ranks: None, schedule: str) -> None:
    def build() -> Callable[..., Any]:
        stages = [make(SharingStage, rank, rank) for rank in range(2)]
        optimizers = [optimizer_of(stage) for stage in stages]
        return train_with(stages, [o.zero for o in optimizers], [o.step for o in optimizers])

    assert_as_plain(build, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_module_that_two_stages_of_a_rank_train(two_ranks: None, schedule: str) -> None:
    def build() -> Callable[..., Any]:
        ends = [make(SharingStage, 0, 0), make(SharingStage, 1, 1)]
        stages = [ends[0], make(SharingStage, 0, 2, ends[0].local.linear), ends[1]]
        optimizers = [optimizer_of(stage) for stage in ends]
        return train_with(stages, [], [c for o in optimizers for c in (o.step, o.zero)])

    assert_as_plain(build, schedule)


def test_the_text_says_what_is_shared(two_ranks: None) -> None:
    stages = [make(SharingStage, rank, rank) for rank in range(2)]
    optimizer = optimizer_of(stages[0])
    one, other, third = stages[0].name, stages[1].name, optimizer.name
    lowered = cg.trace(train_with(stages, [], [optimizer.step])).lower(*batch())
    functions = lowered.trace.module.functions
    assert str(functions[f"{one}.forward"].shares) == f"{{{third}: read}}"
    assert str(functions[f"{one}.forward.vjp.backward"].shares) == f"{{{third}: accumulate}}"
    assert str(functions[f"{third}.step"].shares) == f"{{{one}: write}}"
    assert not functions[f"{other}.loss"].shares


def test_actors_that_share_nothing_say_nothing(two_ranks: None) -> None:
    settings_ = {"width": 4}
    stages = [make(SharingStage, 0, 0), make(SharingStage, 0, 1)]
    assert "shares" not in cg.trace(train_with(stages, [], [])).lower(*batch()).as_text()
    notes = [make(Notes, rank, "a", settings_) for rank in range(2)]  # of different ranks

    @cg.trace
    def count() -> Any:
        return [each.count() for each in notes]

    assert "shares" not in count.lower().as_text()


@pytest.mark.parametrize("make_it", [list, dict, lambda: torch.zeros(())])
def test_what_two_actors_write_to(two_ranks: None, make_it: Callable[[], Any]) -> None:
    """The second note needs no value, so nothing but what they share keeps it from being first."""

    def build() -> tuple[Callable[..., Any], Any]:
        into = make_it()
        stage = make(SharingStage, 1, 1)
        late, early = make(Notes, 0, "late", into), make(Notes, 0, "early", into)

        def step(x: Tensor) -> Any:
            late.note_after(stage.forward(x))
            early.note()
            return late.count()

        return step, into

    x, _ = batch()
    (step, into), (plain, plain_into) = build(), build()
    compiled = cg.trace(step).lower(x).compile()
    assert [compiled(x) for _ in range(2)] == [plain(x) for _ in range(2)]
    assert into == plain_into


def test_executions_in_flight_take_turns_on_what_actors_share() -> None:
    """The next execution's first actor waits for the last execution's second one."""
    with use_world(VirtualWorld(2)):
        into: list[str] = []
        stage = make(SharingStage, 1, 1)
        early, late = make(Notes, 0, "early", into), make(Notes, 0, "late", into)

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x: Tensor) -> Any:
            early.note()
            late.note_after(stage.forward(x))
            return x

        x, _ = batch()
        with step.lower(x).compile(max_inflight=4) as compiled:
            for future in [compiled.execute(x) for _ in range(4)]:
                future.result()
        assert into == ["early", "late"] * 4


def test_state_that_another_actor_has_written_is_not_used_as_it_was(two_ranks: None) -> None:
    stage = make(SharingStage, 0, 0)
    optimizer = optimizer_of(stage)

    @cg.trace
    def step() -> Any:
        weight = stage.weight()
        optimizer.step()
        return weight * 2

    with pytest.raises(cg.TraceError, match=rf"is state of {stage.name} itself.*written to since"):
        step.lower()


def test_a_gradient_of_weights_that_the_optimizer_has_changed(two_ranks: None) -> None:
    stage = make(SharingStage, 0, 0)
    optimizer = optimizer_of(stage)

    @cg.trace
    def step(x: Tensor, y: Tensor) -> Any:
        first = stage.loss(stage.forward(x), y)
        optimizer.step()
        cg.backward(first)
        return first

    stage.local.loss(stage.local(batch()[0]), batch()[1]).backward()
    compiled = step.lower(*batch()).compile()
    with pytest.raises(cg.RemoteError, match=rf"has changed it: @{optimizer.name}.step"):
        compiled(*batch())


def test_an_actor_that_holds_the_handle_of_another(two_ranks: None) -> None:
    @cg.actor
    class Caller:
        def __init__(self, other: Any) -> None:
            self.others = [other]

        @cg.opaque
        def note(self) -> None:
            self.others[0].note()

    def build() -> tuple[Callable[..., Any], Any]:
        into: list[str] = []
        stage = make(SharingStage, 1, 1)
        late = make(Notes, 0, "late", into)
        early = make(Caller, 0, make(Notes, 0, "early", into))

        def step(x: Tensor) -> Any:
            late.note_after(stage.forward(x))
            early.note()
            return 1

        return step, into

    (step, into), (plain, plain_into) = build(), build()
    x, _ = batch()
    cg.trace(step).lower(x).compile()(x)
    plain(x)
    assert into == plain_into == ["late", "early"]


@settings(deadline=None, max_examples=scaled(10))
@given(seed=st.integers(0, 10**6), schedule=st.sampled_from(SCHEDULES))
def test_any_pattern_of_sharing(seed: int, schedule: str) -> None:
    """Stages, optimizers over some of them, notes in lists and buffers; called in any order."""

    def build() -> Callable[..., Any]:
        draw = random.Random(seed)
        stages = [make(SharingStage, rank, rank) for rank in (0, 1)]
        if draw.random() < 0.5:
            stages.insert(1, make(SharingStage, 0, 2, draw.choice([None, stages[0].local.linear])))
        first: Calls = []
        last: Calls = [stage.size for stage in stages]
        for rank in (0, 1):
            own = [stage for stage in stages if stage.rank == rank]
            for _ in range(draw.randint(0, 2)):
                chosen = draw.sample(own, draw.randint(1, len(own)))
                held = {id(p): p for stage in chosen for p in stage.local.parameters()}
                optimizer = make(Optimizer, rank, held.values())
                draw.choice([first, last]).append(optimizer.zero)
                last.append(optimizer.step)
            into = draw.choice([[], {}, own[0].local.seen])
            for name in ("a", "bb", "cccc")[: draw.randint(0, 3)]:
                notes = make(Notes, rank, name, into)
                last += [notes.note, notes.count]
                if isinstance(into, Tensor):
                    last.append(notes.read)
        draw.shuffle(first)
        draw.shuffle(last)
        return train_with(stages, first, last)

    with use_world(VirtualWorld(2)):
        assert_as_plain(build, schedule)
