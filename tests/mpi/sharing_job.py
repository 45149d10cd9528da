"""Actors that share state, on the ranks of a job; the same as in tests/launch, in processes.

mpiexec -n 2 python -m tests.mpi.sharing_job
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.passes.schedules import by_name
from tests.launch.test_apart import IDS, Average, Configured, First, Last, Log, Settings, tied
from tests.launch.test_sharing import SCHEDULES, Notes, Optimizer, SharingStage, batch, train_with


def make(cls: Any, rank: int, *args: Any) -> Any:
    return cls.on(rank)(*args)


def optimizer_of(stage: Any) -> Any:
    return make(Optimizer, stage.rank, stage.local.parameters() if stage.is_local else ())


class Plain:
    """Stands for an actor: its instance, in one process."""

    def __init__(self, instance: Any) -> None:
        self.local = instance

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)


def optimizers(schedule: str) -> None:
    """An optimizer beside each stage: what one process gets without cg."""
    stages = [make(SharingStage, rank, rank) for rank in range(2)]
    beside = [optimizer_of(stage) for stage in stages]
    step = cg.trace(train_with(stages, [], [c for o in beside for c in (o.step, o.zero)]))
    compiled = step.lower(*batch()).compile(schedule=by_name(schedule))
    plain = [Plain(SharingStage(rank)) for rank in range(2)]
    mine = [Optimizer(stage.local.parameters()) for stage in plain]
    eager = train_with(plain, [], [c for o in mine for c in (o.step, o.zero)])
    for seed in range(4):
        found, expected = compiled(*batch(seed))[0], eager(*batch(seed))[0]
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=0)


def notes() -> None:
    """The second note needs no value; the list alone keeps it behind the first."""
    into: list[str] = []
    stage = make(SharingStage, 1, 1)
    late, early = make(Notes, 0, "late", into), make(Notes, 0, "early", into)

    @cg.trace
    def step(x: Tensor) -> Any:
        late.note_after(stage.forward(x))
        early.note()
        return late.count()

    step(batch()[0])
    assert into == (["late", "early"] if cg.rank() == 0 else []), into


def refused(step: Callable[[], Any], kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        step()


def embeddings() -> None:
    torch.manual_seed(0)
    tokens = nn.Embedding(8, 4)
    first, last = make(First, 0, tokens), make(Last, 1, tokens)

    @cg.trace
    def evaluate(ids: Tensor) -> Any:
        return last.loss(first.forward(ids), ids)

    assert evaluate(IDS).isfinite()
    refused(lambda: tied(first, last)(IDS), cg.TraceError, "are one tensor, which @.*backward")
    refused(lambda: tied(first, last)(IDS), cg.TraceError, r"made at .*sharing_job\.py")
    for copies in (False, True):
        tokens = nn.Embedding(8, 4)
        given = tokens if copies else copy.deepcopy(tokens)
        assert tied(make(First, 0, tokens), make(Last, 1, given, copies))(IDS).isfinite()


TOKENS = nn.Embedding(8, 4)
HELD = SimpleNamespace(tokens=nn.Embedding(8, 4))


def by_variables() -> None:
    """Constructors that take nothing, and read what other ranks' actors have, too."""
    around = nn.Embedding(8, 4)

    class OfGlobal(First):
        def __init__(self) -> None:
            super().__init__(TOKENS)

    class OfClosure(First):
        def __init__(self) -> None:
            super().__init__(around)

    class OfAttribute(First):
        def __init__(self) -> None:
            super().__init__(HELD.tokens)

    for cls, tokens in ((OfGlobal, TOKENS), (OfClosure, around), (OfAttribute, HELD.tokens)):
        step = tied(make(cls, 0), make(Last, 1, tokens))
        refused(functools.partial(step, IDS), cg.TraceError, "are one tensor")

    class Named(OfAttribute):
        """Reads the same variable by another name, beside that of the class that it extends."""

        def __init__(self) -> None:
            super().__init__()
            self.other = TOKENS

    step = tied(make(OfGlobal, 0), make(Last, 1, TOKENS))
    refused(functools.partial(step, IDS), cg.TraceError, "are one tensor")
    step = tied(make(Named, 0), make(Last, 1, HELD.tokens))
    refused(functools.partial(step, IDS), cg.TraceError, "are one tensor")
    first, other = make(OfGlobal, 0), make(OfGlobal, 1)

    @cg.trace
    def train(ids: Tensor) -> Any:
        found = first.forward(ids), other.forward(ids)
        cg.backward(found[0].sum() + found[1].sum())
        return found

    refused(lambda: train(IDS), cg.TraceError, "are one tensor")


def opaque() -> None:
    tokens = nn.Embedding(8, 4)
    first, average = make(First, 0, tokens), make(Average, 1, tokens)

    @cg.trace
    def follow(ids: Tensor) -> Any:
        cg.backward(first.forward(ids).square().mean())
        return average.follow()

    refused(lambda: follow(IDS), cg.TraceError, "are one tensor")
    last = make(Last, 1, tokens)

    @cg.trace
    def clear(ids: Tensor) -> Any:
        first.clear()
        return last.loss(first.forward(ids), ids)

    refused(lambda: clear(IDS), cg.RemoteError, r"clear has changed 'tokens\.weight' of")


def objects() -> None:
    into: list[int] = []
    one, other = make(Log, 0, into), make(Log, 1, into)
    settings = Settings()
    configured = [make(Configured, rank, settings) for rank in range(2)]

    @cg.trace
    def read() -> Any:
        return one.read(), other.read(), [each.width() for each in configured]

    @cg.trace
    def write() -> Any:
        return one.write(), other.read()

    @cg.trace
    def count() -> Any:
        return [each.count() for each in configured]

    assert read() == (0, 0, [8, 8])
    refused(write, cg.RemoteError, "write has changed 'into' of .* as well")
    refused(count, cg.RemoteError, "count has changed 'settings' of .* as well")


def main() -> None:
    torch.set_num_threads(1)
    for schedule in SCHEDULES:
        optimizers(schedule)
    notes()
    embeddings()
    by_variables()
    opaque()
    objects()
    print(f"rank {cg.rank()}: shared as it should be")


if __name__ == "__main__":
    main()
