"""Test that tensors of actors are saved whole, and loaded by other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

D = 6
X = torch.randn(8, D, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self, seed: int, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam):
        super().__init__()
        torch.manual_seed(seed)
        self.qkv = nn.Linear(D, 3 * D, dtype=torch.float32)
        self.down = nn.Linear(3 * D, D)
        self.register_buffer("table", torch.arange(5).to(torch.bfloat16))
        self.opt = optimizer(self.parameters(), lr=0.01)  # type: ignore[call-arg]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.qkv(x))).square().mean()

    def update(self) -> None:
        self.opt.step()
        self.opt.zero_grad()


cg.actor(Layer)
PLAN = {
    "loss(x)": cg.cut(0, "dp"),
    "qkv.*": cg.cut(0, "tp"),
    "down.weight": cg.cut(1, "tp"),
}
BLOCKS = PLAN | {"qkv.*": cg.cut(0, "tp", blocks=3), "down.weight": cg.cut(1, "tp", blocks=3)}


def trained(actor: cg.ActorHandle, steps: int) -> list[float]:
    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = actor.loss(x)
        cg.backward(loss)
        actor.update()
        return loss

    return [float(step(X)) for _ in range(steps)]


def eager(steps: int, *how: Any) -> list[float]:
    layer, losses = Layer(1, *how), []
    for _ in range(steps):
        loss = layer.loss(X)
        loss.backward()
        layer.update()
        losses.append(float(loss.detach()))
    return losses


def test_what_an_optimizer_has_made_in_its_constructor_goes_on(tmp_path: Path) -> None:
    """As Adagrad has: a mesh writes whole tensors of it, and another one reads its pieces."""
    file, adagrad = tmp_path / "model.safetensors", torch.optim.Adagrad
    losses = eager(4, adagrad)
    with use_world(VirtualWorld(4)):
        first = Layer.on(cg.mesh(dp=2, tp=2), plan=PLAN, store=cg.cut(0, "dp"))(1, adagrad)
        assert trained(first, 2) == pytest.approx(losses[:2], rel=1e-5)
        cg.save(file, {"layer.": first})
    assert load_file(file)["optimizer.layer.qkv.weight.sum"].shape == (3 * D, D)
    with use_world(VirtualWorld(3)):
        other = Layer.on(cg.mesh(dp=1, tp=3), plan=PLAN)(7, adagrad)
        cg.load(file, {"layer.": other})
        assert trained(other, 2) == pytest.approx(losses[2:], rel=1e-5)


@pytest.mark.grid(1)
@pytest.mark.parametrize("plan", [PLAN, BLOCKS], ids=["plain", "blocks"])
@pytest.mark.parametrize("store", [cg.whole, cg.cut(0, "dp")], ids=["whole", "stored"])
def test_another_mesh_goes_on(tmp_path: Path, plan: dict[str, object], store: object) -> None:
    file = tmp_path / "model.safetensors"
    losses = eager(4)
    with use_world(VirtualWorld(4)):
        first = Layer.on(cg.mesh(dp=2, tp=2), plan=plan, store=store)(1)
        assert trained(first, 2) == pytest.approx(losses[:2], rel=1e-5)
        cg.save(file, {"layer.": first})
    for mesh in (cg.mesh(dp=3, tp=1), cg.mesh(dp=1, tp=3)):
        with use_world(VirtualWorld(3)):
            other = Layer.on(mesh, plan=plan, store=store)(7)
            cg.load(file, {"layer.": other})
            assert trained(other, 2) == pytest.approx(losses[2:], rel=1e-5)
    with use_world(VirtualWorld(1)):
        single = Layer.on(0)(8)
        cg.load(file, {"layer.": single})
        assert trained(single, 2) == pytest.approx(losses[2:], rel=1e-5)


def test_the_file_is_that_of_the_whole_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with use_world(VirtualWorld(4)):
        cg.save(file, {"": Layer.on(cg.mesh(dp=2, tp=2), plan=BLOCKS)(1)})
    found = load_file(file)
    right = Layer(1).state_dict()
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(found[name], tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_what_does_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with use_world(VirtualWorld(2)):
        actor = Layer.on(cg.mesh(dp=2), plan={"loss(x)": cg.cut(0, "dp")})(1)
        cg.save(file, {"a.": actor})
        with pytest.raises(KeyError, match=r"no tensor .b\.table."):
            cg.load(file, {"b.": actor})
        other = cg.actor(nn.Linear).on(0)(D, D)
        with pytest.raises(ValueError, match=r"'a\.down\.weight' is \[6, 18\] in the file"):
            cg.load(file, {"a.down.": other})
