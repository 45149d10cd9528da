"""Pairs of actors that look alike: what two instances of one class may differ in."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

import cg

SIZE = 4
SCALE = 1.0
TABLE = {"scale": [1.0]}


class Kind(enum.Enum):
    RELU = 0
    TANH = 1


@dataclasses.dataclass
class Config:
    scale: float = 1.0


class Shared:
    factor = 1.0


class Double(torch.autograd.Function):
    """Doubles; its gradient is scaled by a number that is no argument of a torch function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2 * ctx.scale, None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(SIZE, SIZE)
        self.down = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class OtherMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    """A layer that reads whatever a test changes in it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.mlp = Mlp()
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("mask", torch.ones(SIZE))
        self.scale: Any = 1.0
        self.flag = True
        self.kind = Kind.RELU
        self.config = Config()
        self.steps = [1.0, 2.0]
        self.named = {"a": 1.0, "b": 2.0}
        self.extra: list[nn.Module] = []
        self.function: Callable[[Tensor], Tensor] | None = None
        self.hidden: Tensor | None = None
        self.shape = (-1, SIZE)
        self.dtype: torch.dtype | None = None
        self.grad_scale = 0.0
        self.reads_globals = False
        self.weightless = False
        self.autocast = False
        self.no_grad = False
        self.extra_first = False

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            return self.compute(x)

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.autocast:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            if self.no_grad:
                stack.enter_context(torch.no_grad())
            yield

    def compute(self, x: Tensor) -> Tensor:
        h = self.norm(x) * self.mask
        h = h.view(self.shape) * self.scale
        if self.flag:
            h = h + 1
        h = torch.relu(h) if self.kind is Kind.RELU else torch.tanh(h)
        for step in self.steps:
            h = h + step
        for index, value in enumerate(self.named.values()):
            h = h - value * index
        h = self.mlp(h * self.config.scale)
        for module in self.extra:
            h = module(h)
        if self.function is not None:
            h = self.function(h)
        if self.dtype is not None:
            h = h.to(self.dtype).to(x.dtype)
        if self.hidden is not None:
            h = h * self.hidden
        if self.grad_scale:
            h = Double.apply(h, self.grad_scale)  # type: ignore[no-untyped-call]
        if self.reads_globals:
            h = h * SCALE * TABLE["scale"][0] * Shared.factor
        return x + self.dropout(h)


@cg.actor
class LayeredStage(nn.Module):
    """Some layers."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, x: Tensor) -> Tensor:
        return x.square().mean()


def with_closure(value: float) -> Callable[[Tensor], Tensor]:
    return lambda h: h * value


def patched(layer: Layer) -> None:
    layer.mlp.up.forward = lambda x: x * 3  # type: ignore[method-assign]


def hooked(layer: Layer) -> None:
    layer.mlp.register_forward_hook(lambda module, args, output: output * 2)


def pre_hooked(layer: Layer) -> None:
    layer.mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def backward_hooked(layer: Layer) -> None:
    layer.mlp.register_full_backward_hook(lambda module, gin, gout: (gin[0] * 2,))


def tied(layer: Layer) -> None:
    layer.mlp.down.weight = layer.mlp.up.weight


def unbiased(layer: Layer) -> None:
    layer.mlp.up = nn.Linear(SIZE, SIZE, bias=False)


def frozen(layer: Layer) -> None:
    layer.mlp.up.weight.requires_grad_(False)


def other_class(layer: Layer) -> None:
    new = OtherMlp()
    new.load_state_dict(layer.mlp.state_dict())
    layer.mlp = new


def with_batch_norm(layer: Layer) -> None:
    layer.extra = nn.ModuleList([nn.BatchNorm1d(SIZE)])  # type: ignore[assignment]


def with_module(layer: Layer) -> None:
    layer.extra = nn.ModuleList([nn.Linear(SIZE, SIZE)])  # type: ignore[assignment]


def shared_module(layer: Layer) -> None:
    layer.extra = nn.ModuleList([layer.mlp.up])  # type: ignore[assignment]


def mask_of(value: Tensor) -> Callable[[Layer], None]:
    def change(layer: Layer) -> None:
        layer.mask = value.clone()

    return change


def setting(name: str, value: Any) -> Callable[[Layer], None]:
    return lambda layer: setattr(layer, name, value)


def id_dependent(layer: Layer) -> None:
    known = id(layer)
    layer.function = lambda h: h * (2.0 if id(layer) == known else 3.0)


def other_device_of_constant(layer: Layer) -> None:
    layer.function = lambda h: h * torch.tensor([1.0, 2.0, 3.0, 4.0])


def constant(layer: Layer) -> None:
    layer.function = lambda h: h * torch.tensor([1.0, 2.0, 3.0, 5.0])


def counting(layer: Layer) -> None:
    layer.register_buffer("count", torch.zeros(()))
    layer.function = lambda h: h + layer.count.add_(1)


def replaced(layer: Layer) -> None:
    layer.register_buffer("mean", torch.zeros(SIZE))

    def function(h: Tensor) -> Tensor:
        layer.mean = 0.5 * layer.mean + 0.5 * h.detach().mean(0)
        return h + layer.mean

    layer.function = function


def in_evaluation(layer: Layer) -> None:
    layer.dropout.p = 0.0
    layer.mlp.eval()
    layer.function = lambda h: h if layer.mlp.training else h * 2


def strided(layer: Layer) -> None:
    weight = layer.mlp.up.weight
    layer.mlp.up.weight = nn.Parameter(weight.detach().t().contiguous().t())


def checkpointed(layer: Layer) -> None:
    mlp = layer.mlp
    layer.function = lambda h: torch.utils.checkpoint.checkpoint(mlp, h, use_reentrant=False)


def scripted(layer: Layer) -> None:
    layer.function = torch.jit.script(nn.Linear(SIZE, SIZE))


def tensor_hooked(layer: Layer) -> None:
    def function(h: Tensor) -> Tensor:
        h = h * 1.0
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 3)
        return h

    layer.function = function


SEEN: list[Tensor] = []
"""What layers of another module fill and empty."""

CHANGES: dict[str, Callable[[Layer], None]] = {
    "a float": setting("scale", 2.0),
    "the sign of zero": setting("scale", -0.0),
    "an integer for a float": setting("scale", 1),
    "a bool for a float": setting("scale", True),
    "a scalar of NumPy": setting("scale", np.float32(3.0)),
    "a double of NumPy": setting("scale", np.float64(3.0)),
    "a flag": setting("flag", False),
    "an enumeration": setting("kind", Kind.TANH),
    "a configuration": lambda layer: setattr(layer.config, "scale", 3.0),
    "another configuration": setting("config", Config(0.5)),
    "a longer list": lambda layer: layer.steps.append(3.0),
    "a shorter list": lambda layer: layer.steps.clear(),
    "another order of a list": lambda layer: layer.steps.reverse(),
    "another order of a dict": setting("named", {"b": 2.0, "a": 1.0}),
    "another dict": setting("named", {"a": 1.0}),
    "a shape": setting("shape", (1, -1, SIZE)),
    "a dtype": setting("dtype", torch.bfloat16),
    "the dtype of a buffer": mask_of(torch.ones(SIZE, dtype=torch.float16)),
    "the shape of a buffer": mask_of(torch.ones(1, SIZE)),
    "the values of a buffer": mask_of(torch.arange(SIZE) * 1.0),
    "the strides of a parameter": strided,
    "a parameter that is frozen": frozen,
    "a parameter that is tied": tied,
    "a parameter that is not there": unbiased,
    "a module more": with_module,
    "a module at two places": shared_module,
    "a batch norm": with_batch_norm,
    "a subclass": other_class,
    "a patched method": patched,
    "a hook": hooked,
    "a hook before": pre_hooked,
    "a hook of the backward": backward_hooked,
    "a hook of a tensor": tensor_hooked,
    "a variable of a closure": setting("function", with_closure(2.0)),
    "a constant": constant,
    "another constant": other_device_of_constant,
    "a counter": counting,
    "a buffer that is replaced": replaced,
    "a module in evaluation": in_evaluation,
    "an identity": id_dependent,
    "an autograd function": setting("grad_scale", 2.0),
    "another autograd function": setting("grad_scale", 5.0),
    "autocast": setting("autocast", True),
    "no gradients": setting("no_grad", True),
    "a checkpoint": checkpointed,
    "a tensor beside": setting("hidden", torch.full((SIZE,), 2.0)),
}
"""The differences that two layers can have, and how to make each."""
