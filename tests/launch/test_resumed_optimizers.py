"""Test that what optimizers keep comes back by `cg.save` and `cg.load` with equal bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn, optim

import cg
from cg.ir.layout import whole
from cg.launch.checkpoints.tensor_files import TensorFile

from ..worlds import virtual_world

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

Maker: TypeAlias = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


@cg.actor
class Net(nn.Module):
    """Two matrices that are not square, and their optimizer."""

    def __init__(self, make: Maker) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)
        self.optimizer = make(self.parameters())

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@cg.actor
class Scheduled(nn.Module):
    """Keeps its optimizer in its scheduler alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)
        optimizer = optim.AdamW(self.parameters(), lr=0.01)
        self.scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    @property
    def optimizer(self) -> optim.Optimizer:
        return self.scheduler.optimizer

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()

    def update(self) -> None:
        self.scheduler.optimizer.step()
        self.scheduler.optimizer.zero_grad()


ELEMENTWISE: dict[str, Maker] = {
    "adamw": partial(optim.AdamW, lr=0.01),
    "amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "adam": partial(optim.Adam, lr=0.01),
    "sgd": partial(optim.SGD, lr=0.05, momentum=0.9),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": partial(optim.Adagrad, lr=0.05),
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "adamax": partial(optim.Adamax, lr=0.01),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "rprop": partial(optim.Rprop, lr=0.01),
    "asgd": partial(optim.ASGD, lr=0.05, t0=1, lambd=0.01),
}
OTHERS: dict[str, Maker] = {"adafactor": partial(optim.Adafactor, lr=0.05)}
PLAN = {"loss(x)": cg.cut(0, "dp")}

_world = virtual_world(2)


def on_mesh(make: Maker) -> Any:
    return Net.on(cg.mesh(dp=2), plan=PLAN, store=cg.cut(0, "dp"))(make)


def step_of(actor: cg.ActorHandle) -> Any:
    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = actor.loss(x)
        cg.backward(loss)
        actor.update()
        return loss

    return step


def losses(step: Any, steps: int = 3) -> list[float]:
    return [float(step(X)) for _ in range(steps)]


def kept(actor: Any) -> list[dict[int, dict[str, torch.Tensor]]]:
    """What the optimizers of all ranks keep, each parameter by its number."""
    states = [each.optimizer.state_dict()["state"] for each in actor.instances.values()]
    return copy.deepcopy(states)


def resumes(make: Callable[[], Any], file: Path) -> None:
    first = make()
    step = step_of(first)
    losses(step)
    cg.save(file, {"m.": first})
    before, expected = kept(first), losses(step)
    again = make()
    cg.load(file, {"m.": again})
    torch.testing.assert_close(kept(again), before, rtol=0, atol=0)  # shapes and dtypes as well
    assert losses(step_of(again)) == expected


@pytest.mark.parametrize("make", [pytest.param(v, id=k) for k, v in (ELEMENTWISE | OTHERS).items()])
def test_an_optimizer_goes_on(tmp_path: Path, make: Maker) -> None:
    resumes(lambda: Net.on(1)(make), tmp_path / "net.safetensors")


@pytest.mark.parametrize("make", [pytest.param(v, id=k) for k, v in ELEMENTWISE.items()])
def test_an_optimizer_goes_on_where_parameters_are_cut(tmp_path: Path, make: Maker) -> None:
    resumes(lambda: on_mesh(make), tmp_path / "net.safetensors")


def test_what_is_no_piece_is_not_loaded_for_one(tmp_path: Path) -> None:
    """Rows of Adafactor, where ranks hold pieces of the parameter."""
    file = tmp_path / "net.safetensors"
    single = Net.on(0)(OTHERS["adafactor"])
    losses(step_of(single))
    cg.save(file, {"m.": single})
    assert load_file(file)["optimizer.m.up.weight.col_var"].shape == (1, 4)
    cut = on_mesh(ELEMENTWISE["adamw"])
    before = [each.up.bias.clone() for each in cut.instances.values()]
    with pytest.raises(
        ValueError, match=r"'optimizer\.m\.up\.weight\.col_var' is \[1, 4\], and cannot be cut"
    ):
        cg.load(file, {"m.": cut})
    for bias, each in zip(before, cut.instances.values(), strict=True):
        assert torch.equal(bias, each.up.bias)


def test_a_region_outside_of_a_tensor_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    save_file({"row": torch.ones(1, 4)}, file)
    opened = TensorFile(file)
    with pytest.raises(ValueError, match=r"'row' is \[1, 4\] in the file, and ends at \[4, 4\]"):
        opened.read("row", whole((4, 4)))


def test_an_optimizer_that_only_a_scheduler_reaches(tmp_path: Path) -> None:
    resumes(lambda: Scheduled.on(1)(), tmp_path / "net.safetensors")


class Odd(optim.SGD):
    """Keeps something else beside the momentum."""

    def __init__(self, parameters: Iterable[nn.Parameter], key: object, value: object) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.key, self.value = key, value

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.key == "apart":
            self.state["apart"] = self.value  # type: ignore[index]
        else:
            self.state[self.param_groups[0]["params"][0]][self.key] = self.value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n", 3, r"Odd of net\d+ keeps 'n' for 'up\.weight', which is no tensor but .* type int"),
        ("past", [torch.ones(2)], r"'past' for 'up\.weight', .* type list.*in state\.json"),
        ("deep", {"m": torch.ones(2)}, r"'deep' for 'up\.weight', .* type dict"),
        ("apart", {"k": torch.ones(2)}, "state for 'apart', which is none of its parameters"),
        ("a.b", torch.ones(2), r"keeps 'a\.b' for 'up\.weight'; call it by a word without a dot"),
    ],
)
def test_what_has_no_name_in_a_file(
    tmp_path: Path, key: object, value: object, message: str
) -> None:
    actor = Net.on(1)(partial(Odd, key=key, value=value))
    losses(step_of(actor), 1)
    with pytest.raises(ValueError, match=message):
        cg.save(tmp_path / "net.safetensors", {"m.": actor})
    assert not list(tmp_path.iterdir())


def test_numbers_of_lbfgs_have_no_place(tmp_path: Path) -> None:
    actor = Net.on(1)(optim.LBFGS)
    net = actor.instances[1]

    def closure() -> torch.Tensor:
        loss: torch.Tensor = net.loss(X)
        loss.backward()
        return loss

    net.optimizer.step(closure)
    with pytest.raises(ValueError, match=r"LBFGS of .* keeps 'func_evals' for 'up\.weight'"):
        cg.save(tmp_path / "net.safetensors", {"m.": actor})


def test_two_optimizers_of_one_parameter_are_refused(tmp_path: Path) -> None:
    actor = Net.on(1)(ELEMENTWISE["adamw"])
    losses(step_of(actor), 1)
    net = actor.instances[1]
    net.other = optim.SGD([net.up.weight], momentum=0.9)
    net.loss(X).backward()
    net.other.step()
    with pytest.raises(ValueError, match=r"AdamW and SGD of .* both keep state for 'up\.weight'"):
        cg.save(tmp_path / "net.safetensors", {"m.": actor})


@pytest.mark.parametrize("make", [pytest.param(ELEMENTWISE["adam"], id="adam")])
def test_a_key_that_differs_between_parameters_is_refused(tmp_path: Path, make: Maker) -> None:
    """As a bit that has flipped in the file makes it: the next update would miss its tensor."""
    file = tmp_path / "model.safetensors"
    first = on_mesh(make)
    losses(step_of(first))
    cg.save(file, {"m.": first})
    text = file.read_bytes()
    assert text.count(b'm.down.weight.exp_avg"') == 1
    file.write_bytes(text.replace(b'm.down.weight.exp_avg"', b'm.down.weight.exp_avf"'))
    again = on_mesh(make)
    untouched = kept(again)
    with pytest.raises(ValueError, match=r"damaged: an optimizer keeps 'exp_avf', 'exp_avg_sq'"):
        cg.load(file, {"m.": again})
    assert kept(again) == untouched
