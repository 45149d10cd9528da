"""Programs that fail, each in one way, as a user would write them.

    mpiexec -n 4 python tests/mpi/failure_job.py SCENARIO[,SCENARIO...] [FILE]

A rank says what it has seen as a line of JSON, after its number.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cg

torch.set_num_threads(1)


@cg.actor
class FailingStage(nn.Module):
    """Methods that fail, each in a way of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(4, 4)
        self.table = nn.Embedding(3, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def look(self, k: Tensor) -> Tensor:
        return self.table(k)  # out of range: the traced line

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def check(self, x: Tensor) -> Tensor:
        self.calls += 1
        if x[0, 0] < 0:
            raise ValueError("negative input")  # the line that raises
        return x.detach() + 1

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def linger(self, x: Tensor) -> Tensor:
        time.sleep(float(x[0, 0]))
        return x.detach()

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def die(self, x: Tensor) -> Tensor:
        if x[0, 0] > 2:
            Path(sys.argv[2]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x.detach()

    @cg.opaque
    def ask(self, how: str) -> Any:
        if how == "lowers":
            return checked.lower(X)
        return (looked if how == "calls" else asked)(X)

    def loss(self, x: Tensor) -> Tensor:
        return x.square().mean()


def say(**what: Any) -> None:
    """Report to the test, in one piece."""
    sys.stdout.write(f"rank {cg.rank()} in {scenario}: {json.dumps(what)}\n")
    sys.stdout.flush()


def seen(error: BaseException) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": str(error)}


stages = [FailingStage.on(rank)(rank) for rank in range(cg.world_size())]
last = stages[-1]
X = torch.ones(2, 4)


@cg.trace
def checked(x: Tensor) -> Tensor:
    h = stages[0].forward(x)
    h = stages[2].check(x) + h  # the line that calls
    return last.forward(h)


def raises() -> None:
    """A method of rank 2 raises; the step can be called again."""
    compiled = checked.lower(X).compile()
    before = compiled(X)
    for attempt in range(3):
        try:
            compiled(-X)
        except cg.RemoteError as error:
            fields = {"rank": error.rank, "actor": error.actor, "method": error.method}
            cause = type(error.__cause__).__name__
            say(**seen(error), **fields, type=error.type_name, cause=cause)
        assert torch.equal(compiled(X), before), attempt
    say(calls=stages[2].local.calls if stages[2].is_local else None)


@cg.trace
def looked(k: Tensor) -> Tensor:
    losses = []
    for part in cg.microbatches(k, 2):
        h = stages[2].look(part)
        losses.append(last.loss(last.forward(h)))
    loss = cg.mean(losses)
    cg.backward(loss)
    return loss


def raises_in_graph() -> None:
    """A traced line of rank 2 raises in the second of two microbatches."""
    compiled = looked.lower(torch.zeros(4, dtype=torch.long)).compile()
    try:
        compiled(torch.tensor([0, 1, 2, 3]))
    except cg.RemoteError as error:
        say(**seen(error), type=error.type_name, rank=error.rank)
    say(loss=float(compiled(torch.tensor([0, 1, 2, 2]))))


def uncaught() -> None:
    """Nobody catches it."""
    compiled = checked.lower(X).compile()
    compiled(X)
    compiled(-X)


@cg.trace
def dying(x: Tensor) -> Tensor:
    return last.forward(stages[1].die(stages[0].forward(x) * 0 + x))


def killed() -> None:
    """Rank 1 is killed, while the others wait for it."""
    compiled = dying.lower(X).compile()
    for n in range(1, 100):
        compiled(X * n)


def killed_between() -> None:
    """Rank 1 is killed between two steps."""
    compiled = checked.lower(X).compile()
    compiled(X)
    if cg.rank() == 1:
        Path(sys.argv[2]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    compiled(X)


def wrong_shape() -> None:
    """All ranks, then rank 1 alone, give an input of another shape."""
    compiled = checked.lower(X).compile()
    compiled(X)
    for x in (torch.ones(3, 4), torch.ones(3, 4) if cg.rank() == 1 else X):
        try:
            compiled(x)
        except (cg.InputError, cg.RemoteError) as error:
            say(**seen(error))
        compiled(X)
    say(done=True)


def other_shape() -> None:
    """Rank 1 alone calls the step with another signature, which has to be traced first."""
    checked(X)
    checked(torch.ones(3, 4) if cg.rank() == 1 else X)


@cg.trace
def other(x: Tensor) -> Tensor:
    return stages[1].forward(x)


def diverge() -> None:
    """Rank 1 calls another step than the others, although none has to wait for what never comes."""
    one, two = checked.lower(X).compile(), other.lower(X).compile()
    one(X)
    two(X)
    for _ in range(2):
        try:
            (two if cg.rank() == 1 else one)(X)
        except (cg.PlanMismatch, RuntimeError) as error:
            say(**seen(error))


@cg.trace
def asked(how: str) -> Any:
    return stages[1].ask(how)


def nested() -> None:
    """A method of rank 1 comes to a step, and the other ranks do not."""
    for how in ("lowers", "calls", "again"):
        try:
            asked(how)
        except cg.RemoteError as error:
            say(**seen(error), rank=error.rank, method=error.method)


def constants() -> None:
    """Steps whose results are no values of the program."""
    say(all=cg.trace(lambda x: {"k": 7, "n": None})(X))
    say(one=cg.trace(outputs=cg.on(1))(lambda x: 7)(X))


def strays() -> None:
    """Rank 2 traces steps with numbers of its own, of which plans say nothing."""
    mine = int(cg.rank() == 2)
    for step in (lambda x: x * (2 + mine), lambda x: x[mine : mine + 1]):
        try:
            cg.trace(step)(X)
        except cg.PlanMismatch as error:
            say(**seen(error))


def leave() -> None:
    """Rank 1 ends its program a step early."""
    compiled = checked.lower(X).compile()
    compiled(X)
    if cg.rank() != 1:
        compiled(X)


@cg.trace
def slow(x: Tensor) -> Tensor:
    return last.forward(stages[1].linger(stages[0].forward(x) * 0 + x))


def late() -> None:
    """Rank 1 is slower than the deadlines that `compile` and CG_TIMEOUT set."""
    lowered = slow.lower(X)
    compiled = lowered.compile(timeout=3.0)
    os.environ["CG_TIMEOUT"] = "3.5"
    other = lowered.compile()
    for one in (compiled, other):
        one(X * 0)
        try:
            one(X * 6)
        except cg.StepTimeout as error:
            say(**seen(error))
        one(X * 0)


if __name__ == "__main__":
    for scenario in sys.argv[1].split(","):
        globals()[scenario]()
