"""Tensors that outlive a replay on a device are not written over by other replays.

    mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.lifetimes_job

All graphs of a process share the memory of what lives within a replay. So graphs are captured here
in orders in which what one leaves behind could lie where another one works. What a graph leaves is
overwritten by its next replay: the caller keeps views of it here, made in many ways.
"""

from __future__ import annotations

from typing import Any

import torch

import cg
from cg.launch.world import world as worlds

SIZE = 64
"""Of one tensor, in each case, so that any memory fits any value."""


@cg.actor
class Worker(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w

    def wander(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`y`, by way of several values that are dropped at once."""
        for number in range(6):
            x = (x + number) * 2
        return y + x * 0

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w).sum()

    def long(self, x: torch.Tensor) -> torch.Tensor:
        """Enough for a graph of its own, where messages are announced."""
        for _ in range(10):
            x = x * self.w
        return x

    def folded(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A view of `x`, and enough beside it."""
        return x.view(2, -1), self.long(y)

    def fold(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A view of `x`, and too little beside it for a graph behind a cut."""
        return x.view(2, -1), y * self.w

    def twice(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * self.w
        return y, y

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = torch.cat([x, x]).mul(self.w[0]).chunk(2)
        return a, b

    @cg.opaque(fake=lambda self: None)
    def look(self) -> None:
        """The host has to do this, so a program is cut here."""

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def pass_on(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0


def main() -> None:
    between_segments()
    kept_by_the_caller()
    views_kept_by_the_caller()
    views_kept_by_the_driver()
    inputs_that_are_read_otherwise()
    gradients()
    gradients_that_move()
    pinned_inputs()
    print(f"rank {cg.rank()}: nothing was written over")


def full(value: float) -> torch.Tensor:
    return torch.full((SIZE,), float(value))


def between_segments() -> None:
    """The first segment is captured anew, once its input stays where it is, the second is not."""
    a, b = Worker.on(0)(), Worker.on(1)()

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        y = a.forward(x)
        a.look()
        return b.forward(a.wander(a.wander(y, y), y))

    compiled = step.lower(full(0.0)).compile()
    kept = [full(float(i)) for i in range(4)]
    for x in (*kept, *[kept[0]] * 6, *kept):
        assert torch.equal(compiled(x).cpu(), x), x
    compiled.close()


def kept_by_the_caller() -> None:
    """Any number of results of one program are kept, while another runs between."""
    a, b = Worker.on(0)(), Worker.on(1)()

    @cg.trace
    def one(x: torch.Tensor) -> torch.Tensor:
        return b.forward(a.wander(x, a.forward(x)))

    @cg.trace
    def other(x: torch.Tensor) -> torch.Tensor:
        return a.wander(x, b.wander(x, b.forward(x)))

    between, keeping = (step.lower(full(0.0)).compile() for step in (one, other))
    kept = []
    for number in range(8):
        between(full(-1.0))
        kept.append(keeping(full(number)))
    between(full(-1.0))
    for number, found in enumerate(kept):
        assert torch.equal(found.cpu(), full(number)), (number, found)
    for program in (between, keeping):
        program.close()


def views_kept_by_the_caller() -> None:
    """Of what a graph has left, made by a call behind it, or by itself."""
    a, b = Worker.on(0)(), Worker.on(1)()

    def beside(x: torch.Tensor) -> torch.Tensor:
        return a.pass_on(a.forward(b.forward(x)))

    @cg.trace(outputs=cg.on(0))
    def behind_a_cut(x: torch.Tensor) -> list[torch.Tensor]:
        y = a.forward(x)
        return list(a.fold(y, beside(x)))

    @cg.trace(outputs=cg.on(0))
    def in_the_next_graph(x: torch.Tensor) -> list[torch.Tensor]:
        y = a.forward(x)
        return [*a.folded(y, beside(x)), a.forward(y)]

    @cg.trace(outputs=cg.on(0))
    def the_same_twice(x: torch.Tensor) -> list[torch.Tensor]:
        y, z = a.twice(x)
        return [z, a.forward(y), a.forward(beside(x))]

    @cg.trace(outputs=cg.on(0))
    def parts_of_one(x: torch.Tensor) -> list[torch.Tensor]:
        y, z = a.halves(x)
        return [z, a.forward(y), a.forward(beside(x))]

    for step in (behind_a_cut, in_the_next_graph, the_same_twice, parts_of_one):
        compiled = step.lower(full(0.0)).compile()
        kept = [compiled(full(number)) for number in range(8)]
        for number, found in enumerate(kept if cg.rank() == 0 else ()):
            for value in found:
                assert torch.all(value == number), (step, number, value)
        compiled.close()


def views_kept_by_the_driver() -> None:
    """The same where messages are announced, and only what is long enough is a graph."""
    a, b = Worker.on(0)(), Worker.on(1)()

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        y = a.long(x)
        return [*a.folded(y, b.long(y)), b.pass_on(b.long(y))]

    graph = step.lower(full(0.0)).compile(max_inflight=1)
    if cg.rank():
        graph.serve()
        return
    kept = [graph.execute(full(number)).result() for number in range(8)]
    for number, found in enumerate(kept):
        for value in found:
            assert torch.all(value == number), (number, value)
    graph.close()


def inputs_that_are_read_otherwise() -> None:
    """One memory, as rows and as columns: a graph that reads it in place reads it in one way."""
    a, b = Worker.on(0)(), Worker.on(1)()

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return b.pass_on(b.forward(a.forward(x)))

    x = torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE)
    device = worlds.world().device
    if device is not None:
        x = x.to(device.torch_device)
    compiled = step.lower(x).compile()
    for value in (x, x, x, x, x.t(), x, x.t(), x.t()):
        assert torch.equal(compiled(value).cpu(), value.cpu())
    compiled.close()


def compiled_training(a: Any, b: Any) -> Any:
    @cg.trace
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = b.loss(a.forward(x))
        cg.backward(loss)
        return loss

    return train.lower(full(0.0)).compile()


def gradients() -> None:
    """They stay for the optimizer, whatever runs before it does."""
    a, b = Worker.on(0)(), Worker.on(1)()
    mine = (a, b)[cg.rank()].local

    @cg.trace
    def infer(x: torch.Tensor) -> torch.Tensor:
        return b.wander(x, a.wander(x, a.forward(x)))

    inferring, training = infer.lower(full(0.0)).compile(), compiled_training(a, b)
    for _ in range(4):
        inferring(full(1.0))
    for number in range(1, 6):
        mine.zero_grad()
        training(full(float(number)))
        inferring(full(7.0))
        assert torch.equal(mine.w.grad.cpu(), full(float(number))), (number, mine.w.grad)
    for program in (inferring, training):
        program.close()


def gradients_that_move() -> None:
    """A graph adds to the memory that a gradient has now, and not to what it had."""
    a, b = Worker.on(0)(), Worker.on(1)()
    mine = (a, b)[cg.rank()].local

    training = compiled_training(a, b)
    for _ in range(5):
        training(full(1.0))
    for number in (1, 2):
        mine.w.grad.data = mine.w.grad.data * 0
        before = mine.w.grad.data_ptr()
        training(full(float(number)))
        assert torch.equal(mine.w.grad.cpu(), full(float(number))), (number, mine.w.grad)
        assert mine.w.grad.data_ptr() == before, "the gradient is elsewhere"
    training.close()


def pinned_inputs() -> None:
    """They may be filled again as soon as a step has returned, however busy the device is."""
    device = worlds.world().device
    if device is None or device.kind != "cuda":
        return
    a, b = Worker.on(0)(), Worker.on(1)()

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return b.forward(a.forward(x))

    compiled = step.lower(full(0.0)).compile()
    given = full(0.0).pin_memory()
    found = []
    for number in range(6):
        given.fill_(number)
        torch.cuda._sleep(20_000_000)
        found.append(compiled(given))
    for number, value in enumerate(found):
        assert torch.equal(value.cpu(), full(number)), (number, value)
    compiled.close()


if __name__ == "__main__":
    main()
