"""An actor can be made again what it was."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from cg.tracer.record.actors.undo import Undo


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(3)
        self.tied = self.linear.weight
        self.rows = [self.linear.weight.detach()[0], torch.zeros(2)]
        self.wide = torch.ones(1).expand(4)
        self.sparse = torch.eye(3).to_sparse()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.seen: list[Any] = [{"n": 0}]
        self.names = {"a"}

    def work(self) -> None:
        self.linear(self.norm(torch.randn(4, 3))).sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.seen[0]["n"] += 1
        self.seen.append("more")
        self.names.add("b")
        self.rows[1].add_(1)
        self.rows.append(torch.ones(1))
        self.sparse.mul_(2)
        self.calls = 1


def everything(actor: Actor) -> Any:
    """Its contents, in values that can be compared."""
    return copy.deepcopy(
        (
            {name: value.tolist() for name, value in actor.state_dict().items()},
            [None if p.grad is None else p.grad.tolist() for p in actor.parameters()],
            str(actor.optimizer.state_dict()),
            str(actor.scheduler.state_dict()),
            (actor.seen, actor.names, hasattr(actor, "calls"), torch.get_rng_state().tolist()),
            ([row.tolist() for row in actor.rows], actor.sparse.to_dense().tolist()),
        )
    )


def test_state_is_put_back_again_and_again() -> None:
    actor = Actor()
    tensors = [id(t) for t in (*actor.parameters(), *actor.buffers())]
    undo = Undo([actor])
    for _ in range(3):  # before there is any gradient or state of the optimizer, and after
        undo.remember()
        before = everything(actor)
        for _ in range(2):
            actor.work()
            assert everything(actor) != before
            undo.restore()
            assert everything(actor) == before
        actor.work()
    assert [id(t) for t in (*actor.parameters(), *actor.buffers())] == tensors
    assert actor.rows[0].data_ptr() == actor.linear.weight.data_ptr()


def test_gradients_stay_the_same_tensors() -> None:
    actor = Actor()
    actor.work()
    kept = actor.linear.weight.grad
    undo = Undo([actor])
    undo.remember()
    values = kept.clone()
    actor.optimizer.zero_grad()
    actor.work()
    kept.zero_()
    undo.restore()
    assert actor.linear.weight.grad is kept
    assert torch.equal(kept, values)
