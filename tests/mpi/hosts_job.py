"""A step and driven graphs on two hosts that share no memory; see test_hosts.py.

python -m cg.launch -n 4 --hosts A:2,B:2 tests/mpi/hosts_job.py
"""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.runtime.runtime import transport_of
from cg.launch.world.world import use_world, world

PAYLOADS = (1, 5000, 1 << 16, 3 << 20)
torch.set_num_threads(1)


@cg.actor
class TanhStage(torch.nn.Module):
    """A part of a model, alike wherever it is made.

    It is `LinearStage` of tests/stages.py, which a program that is started by its path has not.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(x, y)


@cg.actor
class Echo:
    """Says what it hears, unless that is the name of its host."""

    def say(self, x: Any) -> Any:
        if isinstance(x, str) and x == socket.gethostname():
            raise ValueError(x)
        return x


def train() -> list[float]:
    """Some steps of a pipeline, whose last stage comes back to the first rank; their losses."""
    ranks = [*range(cg.world_size()), 0]
    stages = [TanhStage.on(rank)(number) for number, rank in enumerate(ranks)]

    @cg.trace
    def step(x, y):
        losses = []
        for mx, my in cg.microbatches((x, y), 4):
            h = mx
            for stage in stages:
                h = stage.forward(h)
            losses.append(stages[-1].loss(h, my))
        loss = cg.mean(losses)
        cg.backward(loss)
        return loss

    torch.manual_seed(0)
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    compiled = step.lower(x, y).compile()
    return [float(compiled(x + i, y)) for i in range(3)]


def drive(last: str) -> None:
    """Objects through all ranks, in a row and side by side; then an error on the last host."""
    workers = [Echo.on(rank)() for rank in range(1, cg.world_size())]

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def chain(x):
        for worker in workers:
            x = worker.say(x)
        return x

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def scatter(x):
        return tuple(worker.say(x) for worker in workers)

    along = chain.lower(cg.object).compile(max_inflight=4)
    aside = scatter.lower(cg.object).compile(max_inflight=4)
    with along, aside:
        if cg.rank() != 0:
            return
        for nbytes in PAYLOADS:
            content = np.arange(nbytes, dtype=np.uint8)
            assert (along.execute(content).result(timeout=30) == content).all()
            assert all((x == content).all() for x in aside.execute(content).result(timeout=30))
        futures = [along.execute(i) for i in range(50)]
        assert [future.result(timeout=30) for future in futures] == list(range(50))
        try:
            along.execute(last).result(timeout=30)
        except ValueError as error:
            print(f"refused on rank {error.rank}", flush=True)  # type: ignore[attr-defined]


def main() -> None:
    """Run all of it; the test compares the lines that rank 0 prints."""
    node = transport_of(world()).node
    names = cg.allgather(socket.gethostname())
    places = [(names[rank], names[rank] == names[cg.rank()]) for rank in range(cg.world_size())]
    assert [near for _, near in places] == [node.is_local(rank) for rank in range(node.size)]
    losses = train()
    with use_world(VirtualWorld(cg.world_size())):
        assert losses == train()
    drive(names[-1])
    if cg.rank() == 0:
        print(f"alike on {' '.join(names)}, led by {node.leaders}", flush=True)


if __name__ == "__main__":
    main()
