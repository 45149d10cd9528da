"""Trains on devices with an index beyond a cut vocabulary: what the device has noted is raised.

    mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.ids_job raises -capture
    mpiexec -n 2 python -m tests.mpi.ids_job left     # on GPUs

With `raises` a later step raises it, and others go on. With `left` none follows, and the watchdog
ends the job. Further words are passes: what a fake device replays it does on the host, where the
check raises at once.
"""

from __future__ import annotations

import sys
from time import sleep

import torch
from torch import Tensor, nn
from torch.nn import functional

import cg

SIZE, WIDTH, ROWS, STEPS = 1001, 64, 32, 6


@cg.actor
class Model(nn.Module):
    """A table of SIZE words and a head over them. ids, targets: [ROWS] int64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device("cpu"):
            self.table, self.head = nn.Embedding(SIZE, WIDTH), nn.Linear(WIDTH, SIZE)
        self.opt = torch.optim.SGD(self.parameters(), lr=0.1)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.table(ids)), targets)

    def update(self) -> None:
        self.opt.step()
        self.opt.zero_grad()


def main() -> None:
    kind = sys.argv[1]
    plan = {"table.weight|head.*": cg.cut(0, "tp")}
    model = Model.on(cg.mesh(tp=cg.world_size()), plan=plan)()

    @cg.trace
    def step(ids: Tensor, targets: Tensor) -> Tensor:
        loss = model.loss(ids, targets)
        cg.backward(loss)
        model.update()
        return loss

    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(SIZE, (2, ROWS), generator=generator)
    compiled = step.lower(ids, targets).compile(passes=",".join(sys.argv[2:]))
    losses = [float(compiled(ids, targets)) for _ in range(STEPS)]
    assert losses[-1] < losses[0], losses
    wrong = ids.clone()
    wrong[7] = SIZE
    compiled(wrong, targets)
    if kind == "left":
        sleep(60)
        return
    try:
        for _ in range(100):  # the device may not have come so far when the next one begins
            compiled(ids, targets)
            sleep(0.01)
    except (IndexError, cg.RemoteError) as error:
        text = str(error)
    else:
        text = "nothing"
    print(f"rank {cg.rank()} raised {text}", flush=True)
    again = float(compiled(ids, targets))
    print(f"rank {cg.rank()} goes on with {again:.4f}", flush=True)


if __name__ == "__main__":
    main()
