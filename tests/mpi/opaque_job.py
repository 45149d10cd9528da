"""Opaque methods of an actor on two ranks that begin late to clip, and that draw; and hooks.

    mpiexec -n 2 python -m tests.mpi.opaque_job, or by CG_RANKS=2 with one process for both ranks

A rank says how each of its cases has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import cg

Work = Callable[["Net"], Any]


@cg.actor
class Net(nn.Module):
    """Two layers, and work on them ahead of the update."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.noise = torch.Generator().manual_seed(0)
        self.work = work
        self.calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)

    @cg.opaque
    def update(self) -> None:
        self.calls += 1
        self.work(self)
        self.optimizer.step()
        self.optimizer.zero_grad()


@cg.actor
class HookedNet(Net):
    """The same layers; a hook of each parameter does the work, and updates it."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.optimizers = {p: torch.optim.Adam([p], lr=0.1) for p in self.parameters()}
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.step)

    def step(self, parameter: nn.Parameter) -> None:
        self.calls += 1
        self.work(self)
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()

    @cg.opaque
    def update(self) -> None:
        """Nothing is left to do behind the hooks."""


def nothing(net: Net) -> None:
    pass


def norm_late(net: Net) -> None:
    if net.calls > 4 * 5:  # there are four parameters
        net.up.weight.norm()


def clip_late(net: Net) -> None:
    if net.calls > 5:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def draw_from_process(net: Net) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.grad += 0.1 * torch.randn_like(p.grad)


def draw(net: Net) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.grad += 0.1 * torch.randn(p.grad.shape, generator=net.noise)


COPIES: dict[str, Any] = {"loss(x)|loss(y)": cg.cut(0, "dp")}
CUT: dict[str, Any] = {"up.*": cg.cut(0, "tp"), "down.weight": cg.cut(1, "tp")}
STORED: dict[str, Any] = {"store": cg.cut(0, "dp")}
CASES: dict[str, tuple[Work, Any, dict[str, Any]]] = {
    "clips late": (clip_late, cg.mesh(tp=2), CUT),
    "draws": (draw_from_process, cg.mesh(dp=2), COPIES),
    "draws alike": (draw, cg.mesh(dp=2), COPIES),
    "draws for pieces": (draw, cg.mesh(tp=2), CUT),
}
HOOKED: dict[str, tuple[Work, Any, dict[str, Any]]] = {
    "hooks": (nothing, cg.mesh(dp=2), {"plan": COPIES}),
    "hooks of stored pieces": (nothing, cg.mesh(dp=2), {"plan": COPIES, **STORED}),
    "hooks that look at pieces": (norm_late, cg.mesh(tp=2), {"plan": CUT}),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(cg.rank())
    for case, (work, place, plan) in CASES.items():
        ended = run(Net.on(place, plan=plan)(work), Net(work))  # type: ignore[attr-defined]
        print(f"rank {cg.rank()} {case}: {ended}\n", end="", flush=True)
    for case, (work, place, options) in HOOKED.items():
        ended = run(HookedNet.on(place, **options)(work), HookedNet(work))  # type: ignore[attr-defined]
        print(f"rank {cg.rank()} {case}: {ended}\n", end="", flush=True)


def run(net: Any, plain: Net) -> str:
    """Train for ten steps; how that ends, in one line."""

    @cg.trace
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = net.loss(x, y)
        cg.backward(loss)
        net.update()
        return loss

    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    is_alike = True
    for number in range(10):
        expected = plain.loss(x, y)
        expected.backward()
        plain.update()
        try:
            found = train(x, y)
        except RuntimeError as error:
            return f"call {number + 1}: {' '.join(str(error).split())}"
        is_alike &= torch.allclose(found, expected.detach(), rtol=1e-5, atol=1e-6)
    return "as one process" if is_alike else "other numbers"


if __name__ == "__main__":
    main()
