"""Trains a few steps; prints the losses and what the compile cache says."""

import logging

import torch

import cg


class Lines(logging.Handler):
    """Collects what the cache says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@cg.actor
class Stage(torch.nn.Module):
    """Two equal layers, and an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1)) for _ in "ab"]
        self.layers = torch.nn.ModuleList(layers)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * 0.5
        return x

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


lines = Lines()
logging.getLogger("cg").setLevel(logging.DEBUG)
logging.getLogger("cg").addHandler(lines)
stages = [Stage.on(rank)() for rank in range(cg.world_size())]


@cg.trace
def step(x: torch.Tensor) -> torch.Tensor:
    losses = []
    for part in cg.microbatches(x, 2):
        for stage in stages:
            part = stage.forward(part)
        losses.append(part.square().mean())
    loss = cg.mean(losses)
    cg.backward(loss)
    for stage in stages:
        stage.update()
    return loss


batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
losses = [step(batch).item().hex() for _ in range(3)]
said = cg.allgather([line for line in lines.lines if line.startswith("compile cache")])
if cg.rank() == 0:
    print("losses", *losses)
    for rank, of_rank in enumerate(said):
        for line in of_rank:
            print(f"rank {rank}: {line}")
