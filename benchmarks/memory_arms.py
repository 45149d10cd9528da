"""Run one arm of benchmarks/memory_gpu.py: its times, peaks and losses go to a JSON file.

    python benchmarks/memory_arms.py ARM RESULT [--shape layers] [--device cuda] [--steps 10]

Arms that begin with `layers` compute the forward and the backward of some layers in bfloat16. Those
that begin with `train` train a whole model: AdamW in float32, products by autocast in bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from llama_model import LLAMA, Layer, Part, Shape, batch, cross_entropy, rotated
from memory_gpu import PHASE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

RESTING = {"layers": 2, "train": 3}
"""The tensors of a parameter's size that are on the device between steps, and in no plan.

They are the weight, of `layers` the gradient, and of `train` two of AdamW, whose plan has
gradients.
"""

Facts = dict[str, Any]
Step = Callable[[], float]


@dataclass(frozen=True)
class Workload:
    """What arms of a kind compute.

    Attributes:
        shape: of the model; of `layers`, the ones around those that run are not made.
        sequences: of a step.
        warm: the steps ahead of those that are timed.
        limit: the bytes that `compile(memory=)` allows; None: a share of the planned peak.
    """

    shape: Shape
    sequences: int
    warm: int
    limit: int | None = None


LAYERS = 4
TINY = Shape(layers=LAYERS + 2, width=64, heads=2, hidden=160, vocabulary=256, sequence=32)
WORKLOADS = {
    ("layers", "large"): Workload(replace(LLAMA, layers=LAYERS + 2), 8, 6),
    ("layers", "tiny"): Workload(TINY, 2, 6),
    # 3.4e9 parameters, 50 GiB with gradients and AdamW's state; activations take 123 GiB more.
    ("train", "large"): Workload(Shape(28, 3072, 24, 8192, 32000, 24576), 1, 2, 64 << 30),
    ("train", "tiny"): Workload(replace(TINY, layers=28), 1, 2),
}


class OffloadedLayer(Layer):
    """A layer whose largest saved tensors rest on the host."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        import cg

        batch, sequence, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (
            linear(normed).view(batch, sequence, self.heads, -1).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        gate, up = cg.offload(self.gate(normed)), cg.offload(self.up(normed))
        return x + self.down(F.silu(gate) * up)


class OneLayer(Part):
    """One of the layers, with or without marks."""

    def __init__(self, shape: Shape, number: int, device: str, marks: bool = False) -> None:
        super().__init__(shape, range(number + 1, number + 2), device)
        if marks:
            for layer in self.layers.values():
                layer.__class__ = OffloadedLayer


class TrainedPart(Part):
    """A layer of a model, with the embedding or the head if it is at an end, and its optimizer."""

    def __init__(self, shape: Shape, number: int, device: str) -> None:
        super().__init__(shape, range(number, number + 1), device, torch.float32)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.forward(x), targets)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


def inputs_of(work: Workload, device: str) -> Tensor:
    """Activations of the layer before, [sequences, tokens, width]."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(work.sequences, work.shape.sequence, work.shape.width, generator=generator)
    return x.to(device, torch.bfloat16)


# -- steps of cg ----------------------------------------------------------------------------------


def compiled_step(
    lowered: Any, work: Workload, args: argparse.Namespace, values: Sequence[Tensor]
) -> tuple[Step, Facts]:
    """The step of an arm, and what is planned."""
    kind, _, way = args.arm.partition("-")
    fuse = None if args.fuse == "none" or kind == "train" else args.fuse
    off = ["-offload"] if args.device == "cpu" or way == "recompute" else []
    off += ["-capture"] if kind == "train" else []  # its graph would hold the memory once more
    options: dict[str, Any] = {"passes": ",".join(off)}
    facts: Facts = {}
    if way in ("memory", "recompute", "host"):
        limit = work.limit
        if limit is None:
            plain = lowered.compile(fuse=fuse, passes="-offload")
            facts["planned_without"] = plain.memory_analysis()[0].peak
            plain.close()
            limit = int(args.share * facts["planned_without"])
        options["memory"] = facts["limit"] = limit
    begin("choose what is saved and compile" if "memory" in options else "compile")
    step = lowered.compile(fuse=fuse, **options)
    plan = step.memory_analysis()[0]
    facts |= {"planned": plan.peak, "host": plan.host, "moved": plan.moved}
    facts |= {"report": step.memory_report, "uncaptured": [str(s) for s in step.uncaptured()]}
    return lambda: float(step(*values)), facts


def cg_layers(work: Workload, args: argparse.Namespace) -> tuple[Step, list[nn.Module], Facts]:
    import cg

    actor = cg.actor(OneLayer).on(0)
    marks = args.arm == "layers-offload"
    layers = [actor(work.shape, i, args.device, marks) for i in range(LAYERS)]

    @cg.trace
    def train(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer.forward(x)
        loss = loss_of(x)
        cg.backward(loss)
        return loss

    x = inputs_of(work, args.device)
    begin("trace")
    step, facts = compiled_step(train.lower(x), work, args, [x])
    return step, [layer.local for layer in layers], facts


def cg_training(work: Workload, args: argparse.Namespace) -> tuple[Step, list[nn.Module], Facts]:
    import cg

    store = "host" if args.arm == "train-host" else cg.whole
    actor = cg.actor(TrainedPart).on(0, store=store)
    parts = [actor(work.shape, i, args.device) for i in range(work.shape.layers)]

    @cg.trace
    def train(x: Tensor, targets: Tensor) -> Tensor:
        for part in parts[:-1]:
            x = part.forward(x)
        loss = parts[-1].loss(x, targets)
        cg.backward(loss)
        for part in parts:
            part.update()
        return loss

    values = batch(work.shape, work.sequences, args.device)
    begin("trace")
    step, facts = compiled_step(train.lower(*values), work, args, values)
    return step, [part.local for part in parts], facts


# -- steps of torch -------------------------------------------------------------------------------


def torch_layers(work: Workload, args: argparse.Namespace) -> tuple[Step, list[nn.Module], Facts]:
    import torch._functorch.config

    layers = nn.Sequential(*(OneLayer(work.shape, i, args.device) for i in range(LAYERS)))
    x = inputs_of(work, args.device)
    _, _, budget = args.arm.partition("budget-")
    if budget:
        torch._functorch.config.activation_memory_budget = float(budget)
    compiled = torch.compile(layers)

    def step() -> float:
        loss = loss_of(compiled(x))
        loss.backward()
        return float(loss.detach())

    return step, [layers], {}


def torch_training(work: Workload, args: argparse.Namespace) -> tuple[Step, list[nn.Module], Facts]:
    parts = [TrainedPart(work.shape, i, args.device) for i in range(work.shape.layers)]
    x, targets = batch(work.shape, work.sequences, args.device)

    def step() -> float:
        y = x
        for part in parts[:-1]:
            y = checkpoint(part, y, use_reentrant=False)
        loss = parts[-1].loss(y, targets)
        loss.backward()
        for part in parts:
            part.update()
        return float(loss.detach())

    return step, list(parts), {}


# -- measuring ------------------------------------------------------------------------------------


def begin(phase: str) -> None:
    """Say which phase begins: the output of an arm that is ended says where it was."""
    print(f"{PHASE}{phase}, at {time.strftime('%X')}", flush=True)


@contextlib.contextmanager
def peak_of_step(args: argparse.Namespace, peaks: list[int]) -> Iterator[None]:
    """Note what the allocator holds at most."""
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield
    if args.device == "cuda":
        peaks.append(torch.cuda.max_memory_allocated())


def resting_bytes(modules: Sequence[nn.Module], copies: int) -> int:
    """The bytes of parameters, `copies` times, and of buffers."""
    tensors = [(copies, p) for module in modules for p in module.parameters()]
    tensors += [(1, b) for module in modules for b in module.buffers()]
    return sum(count * tensor.nbytes for count, tensor in tensors)


def measure(args: argparse.Namespace) -> Facts:
    """Run an arm."""
    kind, _, way = args.arm.partition("-")
    work = WORKLOADS[kind, args.shape]
    is_torch = way.startswith(("torch", "budget"))
    makers = {
        ("layers", False): cg_layers,
        ("layers", True): torch_layers,
        ("train", False): cg_training,
        ("train", True): torch_training,
    }
    began = time.perf_counter()
    begin("make the model")
    if is_torch and args.device == "fake":
        args.device = "cpu"  # only cg knows that device
    step, modules, facts = makers[kind, is_torch](work, args)
    facts["compile_s"] = round(time.perf_counter() - began, 1)
    times, losses, peaks = [], [], list[int]()
    timed = args.steps if kind == "layers" else max(2, args.steps // 3)
    for number in range(work.warm + timed):
        if number in (0, work.warm):
            begin("time" if number else "warm up and compile kernels")
        with peak_of_step(args, peaks):
            began = time.perf_counter()
            losses.append(step())
            times.append(round((time.perf_counter() - began) * 1e3, 3))
    resting = resting_bytes(modules, RESTING[kind] if way != "host" else 0)
    facts |= {"resting": resting, "losses": losses, "first_ms": times[: work.warm]}
    facts |= {"ms": times[work.warm :]}
    if args.device == "cuda":
        # A graph that is replayed takes nothing: its memory was taken when it was captured.
        facts |= {"peak": max(peaks[1:]) - resting, "reserved": torch.cuda.max_memory_reserved()}
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("arm")
    add("result", type=Path)
    add("--steps", type=int, default=10)
    add("--shape", choices=["large", "tiny"], default="large")
    add("--device", choices=["cuda", "fake", "cpu"], default="cuda")
    add("--share", type=float, default=0.6)
    add("--fuse", choices=["inductor", "none"], default="inductor")
    args = parser.parse_args()
    faulthandler.register(signal.SIGTERM, chain=True)  # where an arm is that takes too long
    torch.set_num_threads(1)
    if args.device == "fake":
        import cg  # noqa: F401 (names the device)
    args.result.write_text(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
