"""Test that a tensor of a file that nothing takes is an error of `cg.load`, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import cg

from ..worlds import virtual_world


@cg.actor
class Net(nn.Module):
    """Makes a tensor late, and trains some of its layers."""

    def __init__(self, *trained: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)
        self.velocity: torch.Tensor | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if trained:
            chosen = [p for name in trained for p in self.get_submodule(name).parameters()]
            self.optimizer = torch.optim.Adam(chosen)

    def update(self) -> None:
        self(torch.ones(3, 4)).sum().backward()
        assert self.optimizer is not None
        self.optimizer.step()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


_world = virtual_world(2)


def updated(rank: int) -> cg.ActorHandle:
    actor = Net.on(rank)("up", "down")
    actor.instances[rank].update()
    return actor


def test_a_tensor_that_is_made_late(tmp_path: Path) -> None:
    file = tmp_path / "net.safetensors"
    first = Net.on(1)()
    first.instances[1].velocity = torch.ones(6, 4)
    cg.save(file, {"m.": first})
    again = Net.on(0)()
    before = again.instances[0].up.weight.clone()
    message = r"has 'm\.velocity', and net\d+ has no such tensor yet, .* in the constructor"
    with pytest.raises(ValueError, match=message):
        cg.load(file, {"m.": again})
    assert torch.equal(again.instances[0].up.weight, before)
    again.instances[0].velocity = torch.zeros(6, 4)
    cg.load(file, {"m.": again})
    assert torch.equal(again.instances[0].velocity, torch.ones(6, 4))


def test_other_actors_of_the_file_stay(tmp_path: Path) -> None:
    """Also those whose prefix begins with another's."""
    file = tmp_path / "nets.safetensors"
    saved = {"": updated(0), "b.": updated(1), "b.c.": updated(1)}
    cg.save(file, saved)
    for prefix, source in saved.items():
        again = updated(0)
        cg.load(file, {prefix: again})
        mine, theirs = (next(iter(each.instances.values())) for each in (again, source))
        assert torch.equal(mine.up.weight, theirs.up.weight)


def test_a_file_of_others_has_all_that_begins_with_the_prefix(tmp_path: Path) -> None:
    file = tmp_path / "net.safetensors"
    cg.save(file, {"m.": Net.on(1)()})
    save_file(load_file(file) | {"n.up": torch.ones(1)}, file)
    cg.load(file, {"m.": Net.on(0)()})
    save_file(load_file(file) | {"m.over": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"has 'm\.over'"):
        cg.load(file, {"m.": Net.on(0)()})


def test_an_actor_without_optimizers_takes_its_own_tensors(tmp_path: Path) -> None:
    file = tmp_path / "net.safetensors"
    first = updated(1)
    cg.save(file, {"m.": first})
    again = Net.on(0)()
    cg.load(file, {"m.": again})
    assert torch.equal(again.instances[0].up.weight, first.instances[1].up.weight)


def test_an_optimizer_that_trains_less(tmp_path: Path) -> None:
    file = tmp_path / "net.safetensors"
    cg.save(file, {"m.": updated(1)})
    message = (
        r"'optimizer\.m\.down\.bias\.exp_avg', and no optimizer of net\d+ trains 'm\.down\.bias'"
    )
    with pytest.raises(ValueError, match=message):
        cg.load(file, {"m.": Net.on(0)("up")})
