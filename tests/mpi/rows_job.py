"""Experts over ranks, with exchanged rows, in processes of their own: integers, exactly.

mpiexec -n 4 python -m tests.mpi.rows_job 0101
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import cg
from cg.ir.ops import AllGatherRows, ReduceScatterRows
from cg.launch.world.world import use_world, world

from .cpu_world import TestWorld

TOKENS, WIDTH, EXPERTS, CHOICES = 16, 4, 8, 2


class Mixture(nn.Module):
    """Weights and tokens are small integers, so sums are exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def numbers(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randint(-3, 4, shape, generator=generator).double())

        self.up, self.down = numbers(EXPERTS, 6, WIDTH), numbers(EXPERTS, WIDTH, 6)
        self.shares, self.shared = numbers(EXPERTS, WIDTH), numbers(WIDTH, WIDTH)

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        shares = nn.functional.linear(x, self.shares).gather(1, ids)
        h = cg.expert_linear(x, self.up, ids).relu()
        h = (cg.expert_linear(h, self.down, ids) * shares.unsqueeze(-1)).sum(1)
        return (x + h + x @ self.shared).square().sum()

    def update(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.copy_(parameter.grad.remainder(7) - 3)
                parameter.grad = None


def routings() -> list[Tensor]:
    """Random ones, one whose tokens all choose the same, and one of which an expert gets all."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.rand(TOKENS, EXPERTS, generator=generator).topk(CHOICES).indices for _ in "abcd"]
    spread = torch.tensor([[0, index % 7 + 1] for index in range(TOKENS)])
    return [*rows, torch.tensor([[6, 7]] * TOKENS), spread]


def main() -> None:
    cuts = {"up|down": cg.cut(0, "ep"), "loss(x)|loss(ids)": cg.cut(0, "dp", "ep")}
    mixture = cg.actor(Mixture).on(cg.mesh(dp=2, ep=2), plan=cuts)()

    @cg.trace
    def step(x: Tensor, ids: Tensor) -> Tensor:
        losses = [mixture.loss(*parts) for parts in cg.microbatches((x, ids), 2)]
        loss = losses[0] + losses[1]
        cg.backward(loss)
        mixture.update()
        return loss

    x = torch.randint(-3, 4, (TOKENS, WIDTH), generator=torch.Generator().manual_seed(3)).double()
    plain = Mixture()
    lowered = step.lower(x, routings()[0])
    programs = [lowered.compile(dispatch="exchange", tasks_in_flight=tasks) for tasks in (1, 2)]
    for compiled in programs:
        used = {type(op) for program in compiled.module.programs for op in program.ops}
        assert used >= {AllGatherRows, ReduceScatterRows}, used
    for ids in routings():
        for compiled in programs:
            loss = plain.loss(x, ids)
            loss.backward()
            plain.update()
            assert torch.equal(compiled(x, ids), loss.detach()), "another loss"
    print(f"rank {cg.rank()}: exactly as in one process", flush=True)


if __name__ == "__main__":
    with use_world(TestWorld(world().comm, [int(node) for node in sys.argv[1]])):
        main()
