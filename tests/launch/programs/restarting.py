"""A job that fails in its first start, or in each, as its arguments say."""

import os
import signal
import sys
import time

from cg.launch.environment.config import config

MODE = sys.argv[1]


def say(text: str) -> None:
    """Write a line in one piece, which that of another rank cannot part."""
    os.write(1, f"{text}\n".encode())


def die_early() -> None:
    """Die in the first start, of which the second argument tells."""
    if config().restarts == 0 and not os.path.exists(sys.argv[2]):
        open(sys.argv[2], "w").close()
        say("dies early")
        os.kill(os.getpid(), signal.SIGKILL)


if MODE == "early":
    die_early()

import torch  # noqa: E402  (a rank may die before that)

import cg  # noqa: E402

FAULTY = 2
"""The execution in which something happens."""


@cg.actor
class Worker:
    """Counts, and fails on its third call."""

    def __init__(self) -> None:
        self.calls = 0

    @cg.opaque(fake=lambda self, x: x)
    def work(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls == FAULTY:
            happen()
        self.calls += 1
        return x + 1


def happen() -> None:
    is_first = cg.restarts() == 0
    if MODE == "raise":
        raise ValueError(f"this batch is bad, says start {cg.restarts()}")
    if MODE in ("die", "die_driven") and is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "die_always":
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "vanish" and is_first:
        os._exit(0)
    if MODE == "interrupt":
        raise KeyboardInterrupt
    if MODE == "wait":
        say("waits")
        time.sleep(600)


worker = Worker.on(cg.world_size() - 1)()


@cg.trace
def train(x: torch.Tensor) -> torch.Tensor:
    return worker.work(x)


@cg.trace(inputs=cg.on(0), outputs=cg.on(0))
def answer(x: torch.Tensor) -> torch.Tensor:
    return worker.work(x)


say(f"begins restarts={cg.restarts()} ranks={cg.world_size()}.")
if MODE == "met":
    die_early()
if MODE == "die_driven":
    with answer.lower(torch.zeros(2)).compile(max_inflight=1) as graph:
        if cg.rank() == 0:
            for _ in range(4):
                graph.execute(torch.zeros(2)).result()
    say("ends well")
    sys.exit()
for step in range(4):
    if MODE == "exit" and step == FAULTY and cg.restarts() < 2:
        sys.exit(cg.restarts() + 5)
    train(torch.zeros(2))
say("ends well")
