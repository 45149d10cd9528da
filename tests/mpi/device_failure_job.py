"""Methods that raise while messages are under way between devices.

    mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.device_failure_job

A step that changes no state can be run again; one that does says whose state is in doubt.
"""

from __future__ import annotations

import time

import torch

import cg


@cg.actor
class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4))
        self.patience = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w

    @cg.opaque(fake=lambda self, x: x)
    def check(self, x: torch.Tensor) -> torch.Tensor:
        if x[0].item() == 13:
            time.sleep(self.patience)
            raise ValueError("thirteen")
        return x + 1

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w).sum()


def main() -> None:
    a, b = Scale.on(0)(), Scale.on(1)()

    @cg.trace
    def infer(x: torch.Tensor) -> torch.Tensor:
        return a.forward(b.forward(a.check(x)))

    compiled = infer.lower(torch.ones(4)).compile()
    for value in (1.0, 2.0, 3.0, 4.0, 13.0, 5.0, 6.0, 7.0, 8.0, 13.0, 9.0):
        x = torch.full((4,), value)
        try:
            out = compiled(x)
        except cg.RemoteError as error:
            assert value == 13.0, error
            assert "thirteen" in str(error), error
            continue
        assert value != 13.0, "the error is lost"
        assert torch.equal(out.cpu(), x + 1), (value, out)

    @cg.trace
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = b.loss(a.forward(a.check(x).detach()))
        cg.backward(loss)
        return loss

    trained = train.lower(torch.ones(4)).compile()
    trained(torch.ones(4))
    # Only a backward that rank 1 had begun leaves anything in doubt, and nothing tells that it has.
    for attempt in range(12):
        if a.is_local:
            a.local.patience = 0.01 * 2**attempt
        try:
            trained(torch.full((4,), 13.0))
        except cg.RemoteError as error:
            assert "thirteen" in str(error), error
        else:
            raise AssertionError("the error is lost")
        try:
            trained(torch.ones(4))
        except cg.TransportError as error:
            assert "what scale1 made" in str(error), error
            assert "compile the step again" in str(error), error
            break
    else:
        raise AssertionError("nothing says that state is in doubt")
    again = train.lower(torch.ones(4)).compile()
    assert again(torch.ones(4)).item() == 8.0
    print(f"rank {cg.rank()}: failures are as they should be")


if __name__ == "__main__":
    main()
