"""A layer of Llama on long sequences, by cg and by torch: milliseconds and gigabytes, in turns.

    python benchmarks/long_contexts_gpu.py [--ranks 2] [--turns 3] [--steps 10]
        [--length 32768] [--arms one cg] [--seconds 1800] [--json FILE]
    python benchmarks/long_contexts_gpu.py --device cpu --shape tiny          # a trial, over gloo

The layer is one of Llama 3 8B: width 4,096, inner width 14,336, 32 heads of 128 and 8 of keys, in
bfloat16, with causal attention. A step is the forward and the backward with the gradients of all
weights, of one sequence of 32,768 tokens and of one of 131,072.

- `one`: cg on one GPU.
- `cg`: ranks that cut the sequence in zigzag order, in the form of attention that cg chooses.
- `gather`, `ring`: the same, in these forms.
- `torch`: `context_parallel` of `torch.distributed.tensor.experimental`, which deals tokens out in
  the same order, and whose rotation is its default. It has kernels of GPUs alone, so a trial on
  hosts leaves it out.

Each arm is a job with a GPU for each rank. A figure is the median of the steps of a turn behind
others that warm up, on rank 0: host clocks around steps that end with a wait for the device. The
memory is the most that torch has allocated on rank 0. The losses of the arms are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from arm_jobs import Job, Record
from torch import Tensor, nn
from torch.nn import functional

ARMS, WARM = ("one", "cg", "gather", "ring", "torch"), 4


@dataclass(frozen=True)
class Shape:
    """Of the layer, and the lengths of sequences."""

    width: int
    inner: int
    heads: int
    groups: int
    lengths: tuple[int, ...]
    dtype: torch.dtype

    @property
    def entries(self) -> int:
        """Of a head."""
        return self.width // self.heads


SHAPES = {
    "llama-3-8b": Shape(4096, 14336, 32, 8, (32768, 131072), torch.bfloat16),
    "tiny": Shape(32, 64, 4, 2, (64, 192), torch.float32),
}


class Layer(nn.Module):
    """A layer of Llama; all ranks make the same one."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, own = shape.width, shape.groups * shape.entries
        sizes = {"q": (width, width), "k": (own, width), "v": (own, width), "o": (width, width)}
        sizes |= {"gate": (shape.inner, width), "up": (shape.inner, width)}
        sizes |= {"down": (width, shape.inner)}
        self.weights = nn.ParameterDict(
            {
                name: nn.Parameter(0.02 * torch.randn(size, device=device, dtype=shape.dtype))
                for name, size in sizes.items()
            }
        )
        self.norms = nn.ParameterList(
            nn.Parameter(torch.ones(width, device=device, dtype=shape.dtype)) for _ in range(2)
        )
        self.entries = shape.entries

    def loss(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        w, width = self.weights, x.shape[-1]
        y = functional.rms_norm(x, (width,), self.norms[0])
        q, k, v = (
            functional.linear(y, w[name]).unflatten(-1, (-1, self.entries)).transpose(1, 2)
            for name in "qkv"
        )
        q, k = rotated(q, cosines, sines), rotated(k, cosines, sines)
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + functional.linear(h.transpose(1, 2).flatten(2), w["o"])
        y = functional.rms_norm(x, (width,), self.norms[1])
        gate = functional.silu(functional.linear(y, w["gate"]))
        x = x + functional.linear(gate * functional.linear(y, w["up"]), w["down"])
        return x.float().square().mean()

    def clear(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embeddings of [batch, heads, tokens, entries]."""
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat([-second, first], -1) * sines


def inputs_of(shape: Shape, length: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A sequence [1, tokens, width], and the cosines and sines of its positions."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(1, length, shape.width, generator=generator, device=device, dtype=shape.dtype)
    half = torch.arange(0, shape.entries, 2) / shape.entries
    angles = torch.arange(length)[:, None] / 500_000**half
    angles = torch.cat([angles, angles], -1)
    return x, angles.cos().to(x), angles.sin().to(x)


Step = Callable[[], float]


@contextlib.contextmanager
def by_cg(shape: Shape, length: int, arm: str, args: argparse.Namespace) -> Iterator[Step]:
    """A compiled step of cg."""
    import cg

    ranks = 1 if arm == "one" else args.ranks
    form = arm if arm in ("gather", "ring") else None
    cut = cg.cut(1, "cp", order="zigzag")
    plan = cg.plan({"loss(x)": cut}, attention=form)
    layer = cg.actor(Layer).on(cg.mesh(cp=ranks), plan=plan)(shape, args.device)

    @cg.trace
    def train(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        loss = layer.loss(x, cosines, sines)
        cg.backward(loss)
        layer.clear()
        return loss

    given = inputs_of(shape, length, args.device)
    step = train.lower(*given).compile(fuse=args.fuse)
    yield lambda: float(step(*given))


@contextlib.contextmanager
def by_torch(shape: Shape, length: int, args: argparse.Namespace) -> Iterator[Step]:
    """A step of torch, whose inputs are cut for all steps at once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(args.device, (args.ranks,))
    layer = Layer(shape, args.device)
    run = torch.compile(layer.loss) if args.fuse else layer.loss
    given = inputs_of(shape, length, args.device)

    def step() -> float:
        loss = run(*given)
        loss.backward()
        for parameter in layer.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        layer.clear()
        total = loss.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        return float(total)

    with context_parallel(mesh, buffers=[*given], buffer_seq_dims=[1, 0, 0]):
        yield step
    dist.destroy_process_group()


def run_arm(arm: str, length: int, args: argparse.Namespace) -> None:
    """One job's rank; rank 0 prints its times, its memory and the loss."""
    torch.set_num_threads(1)
    shape = SHAPES[args.shape]
    made = by_torch(shape, length, args) if arm == "torch" else by_cg(shape, length, arm, args)
    with made as step:
        times, loss = [], 0.0
        for _ in range(WARM + args.steps):
            began = time.perf_counter()
            loss = step()
            times.append((time.perf_counter() - began) * 1e3)
        peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
        if is_first(arm):
            figures = {"ms": [round(t, 4) for t in times[WARM:]], "bytes": peak, "loss": loss}
            print(json.dumps(figures), flush=True)


def is_first(arm: str) -> bool:
    """True on rank 0."""
    if arm == "torch":
        return dist.get_rank() == 0
    import cg

    return cg.rank() == 0


def job(arm: str, length: int, args: argparse.Namespace) -> Job:
    ranks = 1 if arm == "one" else args.ranks
    start = ["-m", "cg.launch", "-n", ranks]
    if arm == "torch":
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    options = ["--steps", args.steps, "--ranks", args.ranks, "--shape", args.shape]
    options += ["--device", args.device, "--arm", arm, "--length", length]
    options += ["--fuse", args.fuse] if args.fuse else []
    return Job({"arm": arm, "length": length}, [*start, __file__, *options])


def line_of(length: int, record: Record) -> str:
    """The medians and the peaks of the arms."""
    rows, medians = record.rows, record.medians(length=length)
    one = medians.get("one", math.nan)
    figures = []
    for arm, ms in medians.items():
        here = [r["bytes"] for r in rows if (r["arm"], r["length"]) == (arm, length) if "ms" in r]
        figures.append(f"{arm} {ms:.2f} ms ({one / ms:.2f} of one), {max(here) / 1e9:.2f} GB")
    return f"{length} tokens: {'; '.join(figures) or 'no figures'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--turns", type=int, default=3)
    add("--steps", type=int, default=10)
    add("--shape", choices=SHAPES, default="llama-3-8b")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--fuse", choices=["inductor"], help="have TorchInductor fuse all arms")
    add("--arms", nargs="+", choices=ARMS, help="only these arms")
    add("--seconds", type=float, default=1800.0, help="for the whole run")
    add("--json", type=Path)
    add("--arm", choices=ARMS, help="run one arm's rank; for the jobs that this starts")
    add("--length", type=int, help="tokens of that arm, or the only ones that are measured")
    args = parser.parse_args()
    if args.arm is not None:
        run_arm(args.arm, args.length, args)
        return
    shape = SHAPES[args.shape]
    lengths = [args.length] if args.length else shape.lengths
    arms = args.arms or (ARMS if args.device == "cuda" else ARMS[:-1])
    values = {**asdict(shape), "dtype": str(shape.dtype)}
    record = Record(args.json, {"ranks": args.ranks, "shape": values})
    for length in lengths:
        jobs = [job(arm, length, args) for _ in range(args.turns) for arm in arms]
        record.measure(jobs, args.seconds / len(lengths))
        print(line_of(length, record), flush=True)
    for length in lengths:
        record.check_losses(0.02, length=length)
    record.check_errors()


if __name__ == "__main__":
    main()
