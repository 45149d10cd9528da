"""A mixture of experts of Qwen3-30B-A3B on GPUs, by cg and by torch: milliseconds, in turns.

    python benchmarks/experts_gpu.py [--ranks 2] [--turns 3] [--seconds 150] [--json FILE]
    python benchmarks/experts_gpu.py --ranks 2 --device cpu --shape tiny      # a trial, over gloo
    python benchmarks/experts_gpu.py --ranks 2 --device fake --shape tiny     # cg on fake devices

The layer has a router, 8 of 128 experts a token, width 2,048 and inner width 768, in bfloat16. In
the row `train` a step is the forward and the backward with the gradients of all weights, of 8,192
tokens on each rank; in the row `decode` it is the forward of 64 tokens on each rank. Experts are
spread over the ranks.

cg runs a compiled step, which is captured; in `cg-fused` TorchInductor fuses it. Torch compiles the
layer by `torch.compile`: rows are sorted by expert and multiplied by
`torch.nn.functional.grouped_mm`, and permutations have gathers as their backward. With several
ranks `all_to_all_single` exchanges rows with counts, for which the host waits, and what is before,
between and behind the exchanges is compiled for its number of rows, which is that of every step.

Each arm is a job with a GPU for each rank, and measures one row after the other. An arm that fails
is a row with its error, and the others go on; FILE has all rows so far. With `--seconds` each of
the jobs that are left gets an equal share of the time that is left. A figure is the median of the
steps of all turns behind others that warm up, on rank 0: host clocks around steps that end with a
wait for the device. The losses of the arms are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from experts import Exchange
from finetuning.processes import run
from provenance import provenance
from torch import Tensor, nn
from torch.nn import functional

ARMS, ROWS, WARM = ("cg", "cg-fused", "torch"), ("train", "decode"), 8
TOLERANCE = 0.02
"""Of losses, as a share of the least."""
MARGIN = 8.0
"""Seconds to end a job that hangs."""


@dataclass(frozen=True)
class Shape:
    """Of the layer; tokens are those of each rank."""

    width: int
    inner: int
    experts: int
    choices: int
    tokens: int
    decoded: int
    dtype: torch.dtype


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8, 8192, 64, torch.bfloat16),
    "tiny": Shape(32, 16, 8, 2, 64, 8, torch.bfloat16),
}


class Layer(nn.Module):
    """Weights of a mixture, of which a rank holds `share` of the experts."""

    def __init__(self, shape: Shape, device: str, share: slice = slice(None)) -> None:
        super().__init__()
        torch.manual_seed(0)
        e, d, inner = shape.experts, shape.width, shape.inner
        router, up, down = (
            0.02 * torch.randn(size, device=device, dtype=shape.dtype)
            for size in ((e, d), (e, 2 * inner, d), (e, d, inner))
        )
        self.choices = shape.choices
        self.router = nn.Parameter(router)
        self.up, self.down = nn.Parameter(up[share].clone()), nn.Parameter(down[share].clone())

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For each token the shares of its experts, and these."""
        shares, ids = functional.linear(x, self.router).float().softmax(-1).topk(self.choices)
        return shares.to(x.dtype), ids

    def clear(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None


def tokens_of(shape: Shape, row: str, ranks: int, device: str) -> Tensor:
    """Of all ranks, [tokens, width]."""
    count = ranks * (shape.tokens if row == "train" else shape.decoded)
    x = torch.randn(count, shape.width, generator=torch.Generator().manual_seed(1))
    return x.to(device, shape.dtype)


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


@dataclass(frozen=True)
class Setting:
    """What the ranks of a job have in common; tensors begin on `device`."""

    shape: Shape
    ranks: int
    device: str


Step = Callable[[], float]


def cg_step(setting: Setting, row: str, fuse: str | None) -> Step:
    import cg

    class Mixture(Layer):
        def forward(self, x: Tensor) -> Tensor:
            shares, ids = self.route(x)
            gate, up = cg.expert_linear(x, self.up, ids).chunk(2, -1)
            h = cg.expert_linear(functional.silu(gate) * up, self.down, ids)
            return (h * shares.unsqueeze(-1)).sum(1)

        def loss(self, x: Tensor) -> Tensor:
            return loss_of(self.forward(x))

    cut = cg.cut(0, "ep")
    plan = {"up|down": cut, "loss(x)": cut}
    mesh = cg.mesh(ep=setting.ranks)
    layer = cg.actor(Mixture).on(mesh, plan=plan)(setting.shape, setting.device)

    @cg.trace
    def train(x: Tensor) -> Tensor:
        loss = layer.loss(x)
        cg.backward(loss)
        layer.clear()
        return loss

    @cg.trace
    def decode(x: Tensor) -> Tensor:
        return layer.loss(x)

    x = tokens_of(setting.shape, row, setting.ranks, setting.device)
    step = (train if row == "train" else decode).lower(x).compile(fuse=fuse)
    return lambda: float(step(x))


class Permutation(torch.autograd.Function):
    """Rows in another order; unlike that of an index, the backward is a gather, too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


def sorting(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order of rows by expert, its inverse, and how many rows each expert has."""
    order = ids.argsort(stable=True)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(len(ids), device=ids.device))
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    return order, inverse, counts.scatter_add(0, ids, torch.ones_like(ids))


def multiply(rows: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Rows [n, width], each by the two products of its own expert."""
    order, inverse, counts = sorting(ids, len(up))
    ends = counts.cumsum(0, dtype=torch.int32)
    sorted_rows = Permutation.apply(rows, order, inverse)
    h = functional.grouped_mm(sorted_rows, up.transpose(1, 2), offs=ends)
    gate, h = h.chunk(2, -1)
    h = functional.grouped_mm(functional.silu(gate) * h, down.transpose(1, 2), offs=ends)
    return Permutation.apply(h, inverse, order)


def loss_on_one_rank(layer: Layer, x: Tensor) -> Tensor:
    shares, ids = layer.route(x)
    k = layer.choices
    h = multiply(x.repeat_interleave(k, 0), ids.flatten(), layer.up, layer.down)
    return loss_of((h.view(len(x), k, -1) * shares.unsqueeze(-1)).sum(1))


class Exchanging:
    """The loss of a rank's tokens, whose rows go to the ranks of their experts and come back."""

    def __init__(self, layer: Layer, setting: Setting) -> None:
        self.layer, self.setting = layer, setting
        self.before = torch.compile(self.sorted_rows, dynamic=False)
        self.between = torch.compile(multiply, dynamic=False)
        self.behind = torch.compile(self.combined, dynamic=False)

    def sorted_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        shares, ids = self.layer.route(x)
        order, inverse, counts = sorting(ids.flatten(), self.setting.shape.experts)
        rows = x.repeat_interleave(self.layer.choices, 0)
        return Permutation.apply(rows, order, inverse), shares, order, inverse, counts

    def combined(self, h: Tensor, shares: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        h = Permutation.apply(h, inverse, order).view(*shares.shape, -1)
        return loss_of((h * shares.unsqueeze(-1)).sum(1)) / self.setting.ranks

    def loss(self, x: Tensor) -> Tensor:
        rows, shares, order, inverse, counts = self.before(x)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        by_rank = torch.stack([counts, theirs]).view(2, self.setting.ranks, -1)
        sent, received = by_rank.sum(2).tolist()
        rows = Exchange.apply(rows, sent, received)
        own = len(self.layer.up)
        ids = torch.arange(own, device=x.device).repeat(self.setting.ranks)
        ids = ids.repeat_interleave(theirs, output_size=sum(received))
        h = self.between(rows, ids, self.layer.up, self.layer.down)
        return self.behind(Exchange.apply(h, received, sent), shares, order, inverse)


def join(setting: Setting) -> int:
    """The rank of this process, which has a GPU and peers from now on."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", rank) if setting.device == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
    if setting.ranks > 1:
        dist.init_process_group("gloo" if device is None else "nccl", device_id=device)
    return rank


def torch_step(setting: Setting, row: str, rank: int) -> Step:
    ranks, own = setting.ranks, setting.shape.experts // setting.ranks
    layer = Layer(setting.shape, setting.device, slice(rank * own, (rank + 1) * own))
    x = tokens_of(setting.shape, row, ranks, setting.device).chunk(ranks)[rank]
    if ranks > 1:
        loss_function = Exchanging(layer, setting).loss
    else:
        loss_function = torch.compile(partial(loss_on_one_rank, layer), dynamic=False)

    def step() -> float:
        with torch.set_grad_enabled(row == "train"):
            loss = loss_function(x)
        if row == "train":
            loss.backward()
            if ranks > 1:
                dist.all_reduce(layer.router.grad)
            layer.clear()
        total = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(total)
        return float(total)

    return step


# -- jobs -------------------------------------------------------------------------------------


def measured(step: Step, steps: int) -> dict[str, Any]:
    """Milliseconds of steps behind those that warm up, seconds of the first one, and the loss."""
    times, loss = [], 0.0
    for _ in range(WARM + steps):
        began = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - began)
    milliseconds = [round(t * 1e3, 4) for t in times[WARM:]]
    return {"ms": milliseconds, "first_s": round(times[0], 3), "loss": loss}


def run_arm(args: argparse.Namespace) -> None:
    """One job's rank; rank 0 adds a line to the result for each row that it has measured."""
    torch.set_num_threads(1)
    device = "cpu" if args.device == "fake" else args.device  # cg moves what begins on the host
    setting = Setting(SHAPES[args.shape], args.ranks, device)
    rank = join(setting) if args.arm == "torch" else None
    for row in args.rows:
        if rank is None:
            step = cg_step(setting, row, "inductor" if args.arm == "cg-fused" else None)
        else:
            step = torch_step(setting, row, rank)
        figures = measured(step, args.steps)
        if is_first(rank):
            with args.result.open("a") as file:
                print(json.dumps({"row": row, **figures}), file=file)
    if dist.is_initialized():
        dist.barrier()  # else a rank that ends first breaks the other's connections
        dist.destroy_process_group()


def is_first(rank: int | None) -> bool:
    """True on rank 0; `rank` is torch's, or None in a job of cg."""
    if rank is not None:
        return rank == 0
    import cg

    return cg.rank() == 0


def command_of(arm: str, result: Path, args: argparse.Namespace) -> list[str]:
    start = ["-m", "cg.launch", "-n", str(args.ranks)]
    if arm == "torch":
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    options = ["--steps", args.steps, "--ranks", args.ranks, "--shape", args.shape]
    options += ["--device", args.device, "--rows", *args.rows, "--arm", arm, "--result", result]
    return [sys.executable, *start, __file__, *map(str, options)]


def turn(arm: str, folder: Path, limit: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a job of an arm, which ends after `limit` seconds; the last may be an error."""
    result, log = folder / "rows.jsonl", folder / "output.log"
    result.unlink(missing_ok=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    if arm != "torch":
        variables["CG_DEVICE"] = args.device
    began = time.monotonic()
    error = run(command_of(arm, result, args), variables, log, limit)
    seconds = round(time.monotonic() - began, 1)
    lines = result.read_text().splitlines() if result.exists() else []
    rows = [{"arm": arm, "job_s": seconds, **json.loads(line)} for line in lines]
    if len(rows) < len(args.rows) and not error:
        error = "it has ended without its figures"
    if error:
        output = log.read_text(errors="replace")[-8000:]
        rows.append({"arm": arm, "job_s": seconds, "error": error, "output": output})
    return rows


def write(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """All rows so far: a run that is cut short has left something."""
    if args.json is not None:
        shape = {**asdict(SHAPES[args.shape]), "dtype": str(SHAPES[args.shape].dtype)}
        record = {**provenance(), "ranks": args.ranks, "shape": shape, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def line_of(row: str, rows: list[dict[str, Any]]) -> str:
    """The medians of the arms, by that of torch where there is one."""
    samples = {
        arm: [t for r in rows if (r["arm"], r.get("row")) == (arm, row) for t in r["ms"]]
        for arm in ARMS
    }
    medians = {arm: statistics.median(times) for arm, times in samples.items() if times}
    by = medians.get("torch", math.nan)
    figures = [f"{arm} {ms:.3f} ms ({ms / by:.2f})" for arm, ms in medians.items()]
    return f"{row}: {', '.join(figures) or 'no figures'}"


def wrong_in(rows: list[dict[str, Any]]) -> list[str]:
    """Errors of jobs, and rows whose losses differ by more than `TOLERANCE`."""
    wrong = [f"{r['arm']}: {r['error']}" for r in rows if "error" in r]
    for row in ROWS:
        losses = {r["arm"]: r["loss"] for r in rows if r.get("row") == row}
        if losses and not max(losses.values()) <= (1 + TOLERANCE) * min(losses.values()):
            wrong.append(f"{row}: the arms disagree: {losses}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=1)
    add("--turns", type=int, default=1)
    add("--steps", type=int, default=20)
    add("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    add("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    add("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    add("--device", choices=["cuda", "cpu", "fake"], default="cuda")
    add("--seconds", type=float, default=900.0, help="for the whole run")
    add("--json", type=Path, metavar="FILE")
    add("--arm", choices=ARMS, help="run one arm's rank; for the jobs that this starts")
    add("--result", type=Path, help="where that arm's figures go")
    args = parser.parse_args()
    if args.arm is not None:
        run_arm(args)
        return
    signal.signal(signal.SIGTERM, lambda *caught: sys.exit("ended by SIGTERM"))  # and its job, too
    end = time.monotonic() + args.seconds - MARGIN
    rows: list[dict[str, Any]] = []
    jobs = [arm for _ in range(args.turns) for arm in args.arms]
    with tempfile.TemporaryDirectory() as folder:
        for number, arm in enumerate(jobs):
            limit = (end - time.monotonic()) / (len(jobs) - number)
            rows += (ended := turn(arm, Path(folder), limit, args))
            write(rows, args)
            states = [f"{r['row']} {statistics.median(r['ms']):.3f} ms" for r in ended if "ms" in r]
            states += [r["error"] for r in ended if "error" in r]
            print(f"{arm}: {', '.join(states)}; {ended[0]['job_s']} s", flush=True)
    print("\n".join(line_of(row, rows) for row in args.rows))
    if wrong := wrong_in(rows):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
