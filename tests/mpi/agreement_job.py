"""Programs whose ranks do not agree, each in one way, as a user would write them.

    mpiexec -n 2 python tests/mpi/agreement_job.py SCENARIO[,SCENARIO...]

A rank says what it has seen as a line of JSON, after its number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cg

torch.set_num_threads(1)


@cg.actor
class DropoutStage(nn.Module):
    """Dropout behind a linear layer, and a method that is called as it is."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 4)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.linear(x)), 0.5)

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return (self.linear(h) - y).square().mean()

    @cg.opaque(fake=lambda self, h, about: h.sum())
    def read(self, h: Tensor, about: Any) -> Tensor:
        self.steps += 1
        return h.detach().sum()


def say(**what: Any) -> None:
    """Report to the test, in one piece."""
    sys.stdout.write(f"rank {cg.rank()} in {scenario}: {json.dumps(what)}\n")
    sys.stdout.flush()


def attempt(call: Callable[[], Any]) -> None:
    """Say what a call raises; None if nothing."""
    try:
        call()
    except Exception as error:
        say(error=type(error).__name__, message=str(error))
    else:
        say(error=None)


def meet() -> None:
    """Wait for the other ranks: one that ends out of step ends the job, before they have spoken."""
    MPI.COMM_WORLD.Barrier()


mine = cg.rank()
stages = [DropoutStage.on(rank)(rank) for rank in range(cg.world_size())]
first, last = stages[0], stages[-1]
X, Y = torch.ones(4, 4), torch.zeros(4, 4)


@cg.trace
def train(x: Tensor, y: Tensor) -> Tensor:
    loss = last.loss(first.forward(x), y)
    cg.backward(loss)
    return loss


@cg.trace
def other(x: Tensor, y: Tensor) -> Tensor:
    return last.loss(x, y)


def shuffled() -> None:
    """Every rank shuffles the data by itself, and nobody has seeded it; then all seed it."""
    torch.manual_seed(torch.seed() % 1000 + mine)  # as processes are, but never equal
    data = TensorDataset(torch.arange(256.0).view(64, 4), torch.arange(256.0).view(64, 4))
    for x, y in DataLoader(data, batch_size=32, shuffle=True):
        attempt(lambda x=x, y=y: train(x, y))
    say(untouched=all(p.grad is None for p in stages[mine].local.parameters()))
    seeded = torch.Generator().manual_seed(0)
    for x, y in DataLoader(data, batch_size=32, shuffle=True, generator=seeded):
        attempt(lambda x=x, y=y: train(x, y))


def some() -> None:
    """One argument differs: given by name, in a dictionary, or as an object."""

    @cg.trace
    def step(batch: dict[str, Tensor], *, about: Any) -> Tensor:
        return last.read(batch["x"] + batch["y"], about)

    compiled = step.lower({"x": X, "y": Y}, about=cg.object).compile(check_inputs=True)
    turned = torch.arange(16.0).view(4, 4)
    nan = torch.full((4, 4), float("nan"))
    for x, y, about in (
        (X, Y + mine, {"k": 1}),
        (X, Y, {"k": [1, {2, "a"}], "l": mine}),
        (nan, turned.t() if mine else turned.t().contiguous(), {"k": {1, "a", "b"}}),
    ):
        attempt(lambda x=x, y=y, about=about: compiled({"x": x, "y": y}, about=about))
    say(steps=last.local.steps if last.is_local else None)


def seldom() -> None:
    """How often arguments are compared."""
    lowered = train.lower(X, Y)
    for check_inputs in (None, False, 3):
        compiled = lowered.compile(check_inputs=check_inputs)
        found = []
        for execution in range(9):
            try:
                compiled(X + mine, Y)
            except cg.InputError:
                found.append(execution)
        say(found=found)


def skipped() -> None:
    """Rank 1 leaves out a batch, and is one ahead from then on."""
    compiled = train.lower(X, Y).compile(check_inputs=True)
    batches = torch.ones(4, 4, 4).cumsum(0)
    for number in ((0, 1, 2), (0, 2, 3))[mine]:
        attempt(lambda number=number: compiled(batches[number], Y))
    sampled = train.lower(X, Y).compile()
    for number in range(5):
        later = mine if number > 2 else 0
        attempt(lambda number=number + later: sampled(X + number, Y))


def kinds() -> None:
    """The ranks call different steps, or one with arguments of different types."""
    attempt(lambda: (other if mine else train)(X, Y))
    attempt(lambda: train(X.double() if mine else X, Y))
    attempt(lambda: train(X[: 4 - mine], Y[: 4 - mine]))
    attempt(lambda: train(X.numpy() if mine else X, Y))
    scaled = cg.trace(lambda x, k: last.loss(x * k, x))
    attempt(lambda: scaled(X, 2 + mine))
    attempt(lambda: scaled(X, k="a" * (1 + mine)))
    attempt(lambda: np.testing.assert_allclose(float(train(X, Y)), float(train(X, Y)), 10))


def baked() -> None:
    """Values that are in no argument differ."""
    attempt(lambda: cg.trace(lambda x: x + torch.tensor([1.0 + mine]))(X))
    attempt(lambda: cg.trace(lambda x: x + torch.arange(32.0)[8 * mine :].sum())(X))
    attempt(lambda: cg.trace(lambda x: nn.functional.pad(x, (0, 1), value=0.5 * mine))(X))
    attempt(lambda: cg.trace(lambda x: (x + 1, mine))(X))
    names = ("loss", "right")[:: 1 - 2 * mine]  # as from a set of strings
    attempt(lambda: cg.trace(lambda x: dict(zip(names, (x + 1, x * 2), strict=True)))(X))
    lowered = train.lower(X, Y)
    for options in (
        {"seed": mine},
        {"schedule": cg.schedules.gpipe() if mine else None},
        {"passes": "-overlap" if mine else ""},
        {"check_inputs": bool(mine)},
        {"timeout": 100.0 + mine},
    ):
        attempt(lambda options=options: lowered.compile(**options))


def states() -> None:
    """Ranks go on from different states; then from the same."""
    compiled = train.lower(X, Y).compile()
    attempt(lambda: compiled.load_state_dict({"seed": 0, "calls": 2 + mine}))
    attempt(lambda: train.load_state_dict({"seed": 0, "calls": 2 + mine}))
    attempt(lambda: compiled.load_state_dict({"seed": 0, "calls": 2}))
    say(state=compiled.state_dict())


def smaller() -> None:
    """Rank 1 has a smaller last batch, and has to trace, while rank 0 executes."""
    train(X, Y)
    attempt(lambda: train(X[: 4 - mine], Y[: 4 - mine]))
    attempt(lambda: train(X, Y))
    meet()


def cleared() -> None:
    """Rank 1 alone forgets what it has compiled."""
    train(X, Y)
    if mine:
        train.clear_cache()
    attempt(lambda: train(X, Y))
    meet()


def branched() -> None:
    """The step makes other calls on rank 1."""

    @cg.trace
    def step(x: Tensor) -> Tensor:
        return first.forward(x) if cg.rank() == 0 else first.loss(x, x)

    attempt(lambda: step(X))


def uneven() -> None:
    """Rank 1 cuts the batch into more microbatches."""

    @cg.trace
    def step(x: Tensor) -> Tensor:
        parts = [last.forward(first.forward(part)) for part in cg.microbatches(x, 2 + 2 * mine)]
        return torch.cat(parts)

    attempt(lambda: step(X))


def caught() -> None:
    """Rank 1 alone catches an error of its own, and gathers values while rank 0 compiles."""
    lowered = train.lower(X, Y)
    for _ in range(2):
        if mine:
            attempt(lambda: lowered.compile(passes=None))
            attempt(lambda: cg.allgather("mine"))
        else:
            attempt(lowered.compile)
    say(values=cg.allgather(mine))


def apart() -> None:
    """Rank 1 waits for the others somewhere else."""
    train(X, Y)
    attempt(cg.barrier if mine else lambda: train(X, Y))
    meet()


def resumed() -> None:
    """Losses of a run with dropout, of one that is resumed, and of a driven one."""

    @cg.trace(inputs=cg.on(0))
    def draw(x: Tensor) -> Tensor:
        return last.loss(first.forward(x), x)

    small = X[:2]
    lowered = train.lower_many([(X, Y), (small, small)])
    calls = [(X, Y), (X, Y), (small, small), (X, Y), (small, small), (X, Y)]
    whole, head, tail = (lowered.compile(seed=5) for _ in range(3))
    losses = [float(whole(*call)) for call in calls]
    begun = [float(head(*call)) for call in calls[:3]]
    tail.load_state_dict(json.loads(json.dumps(head.state_dict())))
    say(equal=losses == begun + [float(tail(*call)) for call in calls[3:]], losses=losses)
    with draw.lower(X).compile(seed=5) as graph:
        driven = [float(graph.execute(X).result()) for _ in range(4)] if mine == 0 else []
    state = graph.state_dict()
    with draw.lower(X).compile(seed=5) as graph:
        graph.load_state_dict({"seed": 5, "calls": 0, "executions": 2})
        again = [float(graph.execute(X).result()) for _ in range(2)] if mine == 0 else []
    say(equal=driven[2:] == again, losses=driven, state=state)


if __name__ == "__main__":
    for scenario in sys.argv[1].split(","):
        globals()[scenario]()
