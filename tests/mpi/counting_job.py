"""Calls that are refused, or fail, and whether they count as executions; in any world of two ranks.

CG_RANKS=2 python -m tests.mpi.counting_job FOLDER
mpiexec -n 2 python -m tests.mpi.counting_job FOLDER
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cg
from cg.launch.world.world import world

X = torch.ones(32)


@cg.actor
class CheckedStage(nn.Module):
    """Dropout, and a check of its inputs that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def check(self, x: Tensor) -> Tensor:
        if x[0].item() == 13:
            raise ValueError("thirteen")
        return x.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x)


class Counted:
    """A step, and the same one that is called only for executions that count."""

    def __init__(self, check_inputs: bool) -> None:
        self.stages = stages = [CheckedStage.on(rank)() for rank in range(2)]

        @cg.trace
        def step(x: Tensor) -> Tensor:
            return stages[1].forward(stages[0].forward(stages[0].check(x)))

        lowered = step.lower(X)
        self.step = lowered.compile(check_inputs=check_inputs)
        self.straight = lowered.compile(check_inputs=check_inputs)

    def check(self, name: str, error: type[Exception], count: int, call: Callable[[], Any]) -> None:
        """The call raises, and counts so often, on every rank alike; the masks after it follow."""
        before = self.step.state_dict()["calls"]
        fails(error, call)
        counts = cg.allgather(self.step.state_dict()["calls"] - before)
        assert set(counts) == {count}, (name, counts)
        self.follow(name, count)

    def follow(self, name: str, count: int) -> None:
        """The step draws what it draws after so many executions more."""
        for _ in range(count):
            self.straight(X)
        assert torch.equal(self.step(X), self.straight(X)), name
        assert self.step.state_dict() == self.straight.state_dict(), name

    def evaluate(self, ranks: Sequence[int]) -> None:
        """Call the step while the actors of these ranks are as `eval` leaves them."""
        modules = [module for rank in ranks for module in self.stages[rank].instances.values()]
        for module in modules:
            module.eval()
        try:
            self.step(X)
        finally:
            for module in modules:
                module.train()

    def call_under_autocast(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.step(X)


def everywhere(counted: Counted) -> None:
    """What can happen in every world."""
    step = counted.step
    for ranks in ((0, 1), (0,), (1,)):
        call = partial(counted.evaluate, ranks)
        counted.check(f"evaluating {ranks}", RuntimeError, 0, call)
    counted.check("shape", cg.InputError, 0, lambda: step(torch.ones(3)))
    counted.check("missing", cg.InputError, 0, lambda: step())
    counted.check("autocast", cg.InputError, 0, counted.call_under_autocast)
    counted.check("method", cg.RemoteError, 1, lambda: step(13 * X))


def apart(counted: Counted, folder: Path, compares: bool) -> None:
    """What takes processes that differ."""
    for refusing in range(2):
        mine = cg.rank() == refusing
        given = torch.ones(3) if mine else X
        call = partial(counted.step, given)
        counted.check(f"shape on {refusing}", cg.InputError, 0, call)
        said = folder / f"{compares} {refusing}"
        after = partial(in_turn, mine, said, call)
        counted.check(f"the other comes after {refusing}", cg.InputError, 0, after)
    if compares:
        call = partial(counted.step, X + cg.rank())
        counted.check("arguments that differ", cg.InputError, 0, call)
        return  # no rank begins before all have come
    # Rank 0 has raised before rank 1 comes to the same call, and refuses it.
    given = 13 * X if cg.rank() == 0 else torch.ones(3)
    call = partial(in_turn, cg.rank() == 0, folder / "late", partial(counted.step, given))
    fails(cg.RemoteError, call)  # that of the lowest rank
    counted.follow("a late refusal", 1)


def driven() -> None:
    """What the driver refuses does not count; what another rank refuses has begun, and does."""
    stages = [CheckedStage.on(rank)() for rank in range(2)]

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x: Tensor) -> Tensor:
        return stages[1].forward(stages[0].forward(x))

    compiled = step.lower(X).compile()
    for module in stages[1].instances.values():
        module.eval()
    with compiled:
        if cg.rank() == 0:
            fails(cg.RemoteError, lambda: compiled.execute(X).result())
            fails(cg.InputError, lambda: compiled.execute(torch.ones(3)))
            for module in stages[0].instances.values():
                module.eval()
            fails(RuntimeError, lambda: compiled.execute(X))
    if cg.rank() == 0:
        assert compiled.state_dict()["executions"] == 1


def fails(error: type[Exception], call: Callable[[], Any]) -> None:
    """The call raises that."""
    try:
        call()
    except error:
        return
    raise AssertionError("nothing was raised")


def in_turn(first: bool, said: Path, call: Callable[[], Any]) -> None:
    """Make a call on one rank after it has raised on the other."""
    until = time.monotonic() + 60
    while not first and not said.exists():
        assert time.monotonic() < until, "the other rank does not raise"
        time.sleep(0.001)
    try:
        call()
    finally:
        if first:
            said.touch()


def main() -> None:
    played = [rank for rank in range(2) if world().plays(rank)]
    for compares in (False, True):
        counted = Counted(compares)
        everywhere(counted)
        if len(played) == 1:
            apart(counted, Path(sys.argv[1]), compares)
    driven()
    print(f"ranks {played} count alike")


if __name__ == "__main__":
    main()
