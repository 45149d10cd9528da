"""Four layers of Llama-7B on one GPU, in bfloat16 and in float8, by cg and by torch, in turns.

    python benchmarks/float8_gpu.py [--recipe tensorwise] [--turns 3] [--steps 20]
        [--seconds 1800] [--json FILE]
    python benchmarks/float8_gpu.py --shape tiny --device cpu --turns 1 --steps 2        # a trial

A step is the forward and the backward of four layers, with the gradients of all weights and of the
input, of four sequences of 2,048 tokens; weights and activations are in bfloat16. The arms:

- `cg-bf16`: a compiled step of cg, fused by TorchInductor and captured.
- `cg-float8`: the same, with `cg.float8("*", recipe=...)` in the plan.
- `torch-float8`: the same formula in plain torch, with `torch._scaled_mm`, by `torch.compile`.
- `torch-bf16`: the layers as they are, by `torch.compile`.
- `torchao`: `torchao.float8.convert_to_float8_training` and `torch.compile`; left out where torchao
  cannot be imported, and said so.

Each arm is a job of its own, in turns. A figure is the median over the steps of all turns behind
others that warm up: host clocks around steps that end with a wait for the device. All samples go
to the JSON file. The losses of the arms are compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from arm_jobs import Job, Record
from llama_model import Layer, Shape
from torch import Tensor, nn
from torch.nn import functional

ARMS = ("cg-bf16", "cg-float8", "torch-bf16", "torch-float8", "torchao")
SHAPES = {
    "llama-7b": Shape(layers=4),
    "tiny": Shape(layers=4, width=64, heads=2, hidden=160, sequence=32),
}
WARM, SEQUENCES = 8, 4
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = 0.05
"""Of losses, as a share of the largest."""


class Layers(nn.Module):
    """The layers, with angles of positions as buffers."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        size = shape.width // shape.heads
        rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(shape.sequence), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())
        with torch.device(device):
            self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.to(device, torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        """Of activations [batch, sequence, width] and what they should become."""
        return functional.mse_loss(self.forward(x).float(), target.float())

    def clear(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None


class Entry(nn.Module):
    """A gain in front of the layers, so that these give the gradient of their input."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones((), device=device, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain

    def clear(self) -> None:
        self.gain.grad = None


def data(shape: Shape, device: str) -> tuple[Tensor, Tensor]:
    """Activations, and what they should become."""
    generator = torch.Generator().manual_seed(1)
    size = SEQUENCES, shape.sequence, shape.width
    x, y = (torch.randn(size, generator=generator).bfloat16() for _ in range(2))
    return x.to(device), y.to(device)


def cg_step(arm: str, shape: Shape, recipe: str, device: str) -> Callable[[], float]:
    import cg

    plan = cg.float8("layers.*", recipe=recipe) if arm == "cg-float8" else None
    entry = cg.actor(Entry).on(0)(device)
    layers = cg.actor(Layers).on(0, plan=plan)(shape, device)

    @cg.trace
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = layers.loss(entry.forward(x), y)
        cg.backward(loss)
        layers.clear()
        entry.clear()
        return loss

    x, y = data(shape, device)
    compiled = step.lower(x, y).compile(fuse="inductor")
    return lambda: float(compiled(x, y))


# -- the formula in plain torch ---------------------------------------------------------------


def cast(x: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """A matrix in float8, and the inverse of its scales."""
    amax = x.abs().amax(1, keepdim=True) if by_row else x.abs().amax()
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=1e-12)).float()
    if by_row:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    largest = torch.finfo(dtype).max
    scaled = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return scaled.contiguous(), scale.reciprocal()


def product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], fast: bool) -> Tensor:
    """`left @ right.T` in bfloat16."""
    (a, s), (b, t) = left, right
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), s, t.t(), out_dtype=torch.bfloat16, use_fast_accum=fast)
    return ((a.float() @ b.float().t()) * (s * t.t())).bfloat16()


class Tensorwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        left, right = cast(x, E4M3, False), cast(w, E4M3, False)
        ctx.save_for_backward(*left, *right)
        return product(left, right, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, s, w, t = ctx.saved_tensors
        g, u = cast(gradient, E5M2, False)
        to_x = product((g, u), (w.t().contiguous(), t), fast=False)
        return to_x, product((g.t().contiguous(), u), (x.t().contiguous(), s), fast=False)


class Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return product(cast(x, E4M3, True), cast(w, E4M3, True), fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        to_x = product(cast(gradient, E4M3, True), cast(w.t(), E4M3, True), fast=True)
        return to_x, product(cast(gradient.t(), E4M3, True), cast(x.t(), E4M3, True), fast=True)


class Float8(nn.Module):
    """A linear layer by the formula."""

    def __init__(self, linear: nn.Linear, recipe: str) -> None:
        super().__init__()
        self.weight = linear.weight
        self.products = Rowwise if recipe == "rowwise" else Tensorwise

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.products.apply(x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


def torch_step(arm: str, shape: Shape, recipe: str, device: str) -> Callable[[], float]:
    entry, layers = Entry(device), Layers(shape, device)
    if arm == "torch-float8":
        for layer in layers.layers:
            for name, module in [*layer.named_children()]:
                if isinstance(module, nn.Linear):
                    setattr(layer, name, Float8(module, recipe))
    elif arm == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(layers, config=Float8LinearConfig.from_recipe_name(recipe))
    compiled = torch.compile(lambda x, y: layers.loss(entry(x), y))
    x, y = data(shape, device)

    def step() -> float:
        loss = compiled(x, y)
        loss.backward()
        layers.clear()
        entry.clear()
        return float(loss.detach())

    return step


# -- jobs -------------------------------------------------------------------------------------


def run_arm(arm: str, args: argparse.Namespace) -> None:
    """Run one arm in this process, and print its times and its loss."""
    make = cg_step if arm.startswith("cg") else torch_step
    step = make(arm, SHAPES[args.shape], args.recipe, args.device)
    times, loss = [], 0.0
    for _ in range(WARM + args.steps):
        began = time.perf_counter()
        loss = step()
        times.append((time.perf_counter() - began) * 1e3)
    print(json.dumps({"ms": [round(t, 4) for t in times[WARM:]], "loss": loss}), flush=True)


def job(arm: str, args: argparse.Namespace) -> Job:
    start = ["-m", "cg.launch", "-n", "1"] if arm.startswith("cg") else []
    options = ["--steps", args.steps, "--shape", args.shape, "--device", args.device]
    options += ["--recipe", args.recipe, "--arm", arm]
    return Job({"arm": arm}, [*start, __file__, *options])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--recipe", choices=["tensorwise", "rowwise"], default="tensorwise")
    add("--turns", type=int, default=3)
    add("--steps", type=int, default=20)
    add("--shape", choices=SHAPES, default="llama-7b")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--seconds", type=float, default=1800.0, help="for the whole run")
    add("--json", type=Path)
    add("--arm", choices=ARMS, help="run one arm; for the jobs that this starts")
    args = parser.parse_args()
    if args.arm is not None:
        run_arm(args.arm, args)
        return
    has_torchao = importlib.util.find_spec("torchao") is not None and args.device == "cuda"
    arms = ARMS if has_torchao else ARMS[:-1]
    if not has_torchao:
        print("torchao is left out: it is not installed, or there is no GPU")
    shape = {**asdict(SHAPES[args.shape]), "sequences": SEQUENCES, "recipe": args.recipe}
    record = Record(args.json, {"shape": shape})
    record.measure([job(arm, args) for _ in range(args.turns) for arm in arms], args.seconds)
    medians = record.medians()
    for arm, ms in medians.items():
        print(f"{arm}: {ms:.3f} ms, {ms / medians.get('cg-bf16', math.nan):.3f} of cg-bf16")
    record.check_losses(TOLERANCE)
    record.check_errors()


if __name__ == "__main__":
    main()
