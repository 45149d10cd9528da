"""Trains a few steps by a plan, or says why not: `python planned.py FILE CHANGED-FILE`."""

import sys

import torch

import cg
from cg.ir.ops.module import Program
from cg.ir.text import stored_programs


@cg.actor
class Stage(torch.nn.Module):
    """A layer with dropout, so that random numbers count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout = torch.nn.Linear(4, 4), torch.nn.Dropout(0.1)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.relu(self.linear(x)))

    def loss(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(h, y)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Training:
    """A stage on each rank, and a step that trains them."""

    def __init__(self) -> None:
        self.stages = [Stage.on(rank)() for rank in range(cg.world_size())]
        self.batch = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))

    def lower(self, microbatches: int = 2) -> cg.Lowered:
        """Trace the step."""
        stages = self.stages

        @cg.trace
        def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            losses = []
            for mx, my in cg.microbatches((x, y), microbatches):
                h = mx
                for stage in stages:
                    h = stage.forward(h)
                losses.append(stages[-1].loss(h, my))
            loss = cg.mean(losses)
            cg.backward(loss)
            for stage in stages:
                stage.update()
            return loss

        return train.lower(*self.batch)

    def losses(self, compiled: cg.Compiled) -> list[float]:
        """The losses of three steps, from the weights with which the stages were made."""
        for stage in self.stages:
            if stage.is_local:
                stage.local.load_state_dict(Stage().state_dict())
        return [float(compiled(*self.batch)) for _ in range(3)]


def count_programs() -> list[int | None]:
    """The ranks whose programs are read from now on."""
    parse, ranks = stored_programs.parse_program, []

    def counted(*args: object) -> Program:
        program = parse(*args)
        ranks.append(program.rank)
        return program

    stored_programs.parse_program = counted
    return ranks


if __name__ == "__main__":
    training, read = Training(), count_programs()
    loaded = cg.load_plan(training.lower(), sys.argv[1])
    losses = training.losses(loaded)
    print(f"{loaded!r} read {read} losses={losses}\n", end="")
    try:
        cg.load_plan(training.lower(), sys.argv[2])
    except cg.PlanFileError as error:
        print(f"refused on rank {cg.rank()}: {error}\n", end="")
