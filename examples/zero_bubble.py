"""A pipeline without a bubble, from a plain loop: `mpirun -n 4 python examples/zero_bubble.py`."""

import torch
from torch import nn

import cg

MICROBATCHES, WIDTH, STEPS = 8, 128, 20


@cg.actor
class Stage(nn.Module):
    """A part of the model, on one rank: [batch, WIDTH] to the same."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

    def loss(self, h, y):
        return nn.functional.mse_loss(h, y)

    def update(self):  # ordinary PyTorch, on the rank that holds the stage
        self.optimizer.step()
        self.optimizer.zero_grad()


stages = [Stage.on(rank)(rank) for rank in range(cg.world_size())]


@cg.trace
def step(x, y):
    losses = []
    for mx, my in cg.microbatches((x, y), MICROBATCHES):
        h = mx
        for stage in stages:
            h = stage.forward(h)
        losses.append(stages[-1].loss(h, my))
    loss = cg.mean(losses)
    cg.backward(loss)  # derived, and split into B and W where the schedule wants that
    cg.clip_grad_norm(stages, max_norm=1.0)
    for stage in stages:
        stage.update()
    return loss


x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))  # the same on all ranks
y = x.roll(1, dims=1)

lowered = step.lower(x, y)
before = lowered.compile(schedule=cg.schedules.one_f_one_b())  # to compare with
compiled = lowered.compile(schedule=cg.schedules.zb_h2())
losses = [float(compiled(x, y)) for _ in range(STEPS)]
bubbles = cg.allgather(compiled.statistics().bubble)

if cg.rank() == 0:
    print(f"loss {losses[0]:.3f}, after {STEPS} steps {losses[-1]:.3f}")
    old, new = (c.simulate().bubble_ratio for c in (before, compiled))
    print(f"bubble on paper: 1F1B {old:.1%}, ZB-H2 {new:.1%}")
    print(f"share of the time in which ranks waited: {sum(bubbles) / len(bubbles):.1%}")
