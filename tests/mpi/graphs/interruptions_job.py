"""A signal's handler raises anywhere in the driver's calls, COUNT times.

    mpiexec -n 3 python tests/mpi/graphs/interruptions_job.py COUNT

What it hits is either as if nothing had been, or it fails and says so; whatever is asked for after
that works.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from typing import Any

import torch

import cg

torch.set_num_threads(1)
SECONDS = 60
"""How long a result may take."""


class Alarm(Exception):
    """The exception of the handler; an `Exception`, which might be taken for a method's own."""


class Stop(BaseException):
    """The exception of every other time; as Ctrl-C is, no `Exception`."""


@cg.actor
class Worker:
    """Gives back what it gets, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def nap(self, x: Any) -> Any:
        time.sleep(x)
        return x

    def echo(self, x: Any) -> Any:
        return x

    @cg.opaque
    def number(self, x: Any) -> Any:
        self.calls += 1
        return (x, self.calls)

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def graphs() -> list[Any]:
    """Of small objects, of large ones, of tensors and collectives; on all ranks."""
    last = cg.world_size() - 1
    here, near, far = Worker.on(0)(), Worker.on(1)(), Worker.on(last)()
    driven = cg.trace(inputs=cg.on(0), outputs=cg.on(0))

    def away(x):
        return here.echo(far.nap(x))

    def at_home(x):
        return far.echo(here.nap(x))

    def counted(x):
        return near.number(far.echo(x))

    def tensors(x):
        return cg.all_reduce([here.double(x), near.double(x), far.double(x)])[0]

    makes = [
        driven(function).lower(cg.object).compile(max_inflight=3)
        for function in (away, at_home, counted)
    ]
    return [*makes, driven(tensors).lower(torch.zeros(6)).compile(max_inflight=2)]


class Alarms:
    """Raises by an alarm, of two kinds in turn."""

    def __init__(self) -> None:
        self.raised = 0
        self._armed = False
        signal.signal(signal.SIGALRM, self._ring)

    def arm(self, seconds: float) -> None:
        """Raise after so many seconds, unless it is disarmed before."""
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def disarm(self) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, number: int, frame: object) -> None:
        if self._armed:
            self.raised += 1
            raise Alarm("alarm") if self.raised % 2 else Stop("alarm")


def drive(count: int) -> None:
    made = graphs()
    away, at_home, _, tensors = made
    alarms = Alarms()
    lost = turn = 0
    while alarms.raised < count:
        turn += 1
        asked: list[tuple[Any, Any]] = []
        with contextlib.suppress(Alarm, Stop, cg.ExecutionLost):
            try:
                alarms.arm(20e-6 * (1 + turn % 41))
                for graph, nap in ((away, turn % 5), (at_home, turn % 3), (away, 0)):
                    asked.append((graph.execute(nap * 1e-5), nap * 1e-5))
                for future, value in asked:
                    assert future.result(SECONDS) == value
                tensors.execute(torch.full((6,), float(turn))).result(SECONDS)
            finally:
                alarms.disarm()
        lost += sum(not is_right(future, value) for future, value in asked)
        check_all(made, turn)
    for graph in made:
        graph.close()
    print(f"{turn} turns, {alarms.raised} interruptions, {lost} lost")


def is_right(future: Any, value: Any) -> bool:
    """True if a future has the value; if not, it prints why."""
    try:
        assert future.result(SECONDS) == value
    except cg.RemoteError as error:
        assert error.type_name.endswith(("ExecutionLost", "Alarm", "Stop")), error
        return False
    return True


def check_all(made: list[Any], turn: int) -> None:
    """Every graph works; calls that nothing has interrupted were not lost, nor made twice."""
    away, at_home, counted, tensors = made
    assert away.execute(0.0).result(SECONDS) == 0.0
    assert at_home.execute(0.0).result(SECONDS) == 0.0
    assert counted.execute(turn).result(SECONDS) == (turn, turn)
    total = tensors.execute(torch.full((6,), float(turn))).result(SECONDS)
    assert torch.equal(total, torch.full((6,), 6.0 * turn)), total


def main() -> None:
    if cg.rank() == 0:
        drive(int(sys.argv[1]))
    else:
        for graph in graphs():
            graph.serve()
    cg.barrier()
    print(f"rank {cg.rank()} has ended")


if __name__ == "__main__":
    main()
