"""Train a byte-level GPT, cut into pipeline stages, on English text that ships with Python.

    python -m cg.launch -n 2 examples/train_gpt.py
    mpirun -n 8 python examples/train_gpt.py
    mpirun -n 8 python examples/train_gpt.py --tp 2 --dp 2
    mpirun -n 8 python examples/train_gpt.py --tp 2 --dp 2 --fsdp
    mpirun -n 8 python examples/train_gpt.py --tp 2 --dp 2 --fsdp --float8
    python -m cg.launch -n 2 examples/train_gpt.py --schedule zb-h1
    python -m cg.launch -n 2 examples/train_gpt.py --resume --steps 320
    python -m cg.launch -n 2 --restarts 3 examples/train_gpt.py
    python examples/train_gpt.py                      # one rank, without MPI

Each rank holds one stage, or two where --schedule wants that. With --tp and --dp a group of ranks
holds a stage: tp ranks share its weights, and dp such sets share the batch. With --fsdp each set
keeps a piece of the weights, and gathers the other pieces to use them. The step below is plain
Python over the stages; cg derives the backward, inserts the sends and receives, and runs one static
schedule on each rank. At the end the same stages generate text, and rank 0 has written a
checkpoint, a loss curve and the figures to --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pydoc_data.topics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
import curves
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

import cg


@dataclass(frozen=True)
class Config:
    """The shape of the model; bytes are the vocabulary."""

    layers: int = 8
    width: int = 192
    heads: int = 6
    context: int = 128
    vocabulary: int = 256


class Block(nn.Module):
    """A pre-norm transformer block: [batch, time, width] to the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time_, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time_, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time_, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@cg.actor
class Stage(nn.Module):
    """The blocks `layers` of the model; the first stage has the embedding, the last the head.

    Parameters are named by their place in the whole model, so that a checkpoint does not depend on
    how the model was cut.
    """

    def __init__(self, config: Config, layers: range, seed: int, rate: float, steps: int) -> None:
        super().__init__()
        if layers.start == 0:
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(config.vocabulary, config.width)
            self.positions = nn.Embedding(config.context, config.width)
            nn.init.normal_(self.tokens.weight, std=0.02)
            nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleDict()
        for layer in layers:
            torch.manual_seed(seed + 1 + layer)  # the same weights however the model is cut
            self.blocks[str(layer)] = Block(config)
        if layers.stop == config.layers:
            torch.manual_seed(seed + 1 + config.layers)
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.layers
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=rate, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate(step, steps)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [batch, time] or activations [batch, time, width] to activations or logits."""
        if self.is_first:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, in nats a byte."""
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def update(self) -> None:
        """Ordinary PyTorch: it runs on the rank that holds the stage."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over a twentieth of the run, then a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def homes(schedule: str, ranks: int) -> list[int]:
    """The rank of each stage; some schedules go round the ranks twice, or down and up again."""
    line = list(range(ranks))
    if schedule in ("interleaved", "looped-bfs"):
        return line + line
    return line + line[::-1] if schedule in ("zb-v", "dualpipe-v") else line


PLAN = cg.plan(
    {
        "forward(x)|loss(logits)|loss(targets)": cg.cut(0, "dp"),
        "*.qkv.weight|*.qkv.bias": cg.cut(0, "tp", blocks=3),  # heads of queries, keys, values
        "*.out.weight|*.down.weight": cg.cut(1, "tp"),
        "*.up.weight|*.up.bias": cg.cut(0, "tp"),
    }
)
"""The plan of a stage's group: rows of the batch along dp, heads and hidden units along tp."""


def place(
    home: int,
    data: int,
    tensor: int,
    stored: bool = False,
    float8: str | None = None,
    rests: str | None = None,
) -> Any:
    """A function that makes stages at a home: on one rank, or on a group of data x tensor ranks.

    With `stored`, each set of ranks along dp keeps a piece of each weight. With `float8`, a recipe,
    the layers of the blocks compute in float8. With `rests`, "host" or "host-state",
    weights and what AdamW keeps, or the latter alone, are in the memory of hosts between uses.
    """
    layers = None if float8 is None else cg.float8("blocks.*", recipe=float8)
    size = data * tensor
    store = cg.cut(0, "dp") if stored else cg.whole
    store = (store, rests) if rests else store
    if size == 1:
        return Stage.on(home, plan=layers, store=store)
    mesh = cg.mesh(range(home * size, (home + 1) * size), dp=data, tp=tensor)
    plan = PLAN if layers is None else PLAN | layers
    return Stage.on(mesh, plan=plan, store=store)


def cut(layers: int, stages: int) -> list[range]:
    """Contiguous, nearly equal parts of the layers."""
    bounds = [round(layers * i / stages) for i in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Text:
    """Bytes to learn from and bytes to be judged on: uint8 tensors of one dimension."""

    train: Tensor
    validation: Tensor

    @staticmethod
    def load() -> Text:
        """The help texts of Python itself, about 460 KB; the last tenth is held out."""
        topics = pydoc_data.topics.topics
        data = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        split = len(tokens) * 9 // 10
        return Text(tokens[:split], tokens[split:])

    def batch(self, part: Tensor, config: Config, size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Random windows and the bytes that follow each, int64 [size, context]."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(part) - config.context - 1, (size,), generator=generator)
        windows = torch.stack([part[s : s + config.context + 1] for s in starts.tolist()]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def unigram_loss(self) -> float:
        """Validation loss, nats a byte, of the best model that ignores context (add-one counts)."""
        counts = torch.bincount(self.train.long(), minlength=256).double() + 1
        return float(-(counts / counts.sum()).log()[self.validation.long()].mean())


@dataclass
class Record:
    """The results of the run so far."""

    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    tokens_per_second: float = 0.0
    bubble: float | None = None  # not measured yet

    def speed(self) -> str:
        """Tokens a second, and the bubble once it is known."""
        known = "" if self.bubble is None else f", bubble {self.bubble:.0%}"
        return f"{self.tokens_per_second:.0f} tokens/s{known}"


def make_steps(stages, microbatches: int, backend: str = "auto"):
    """The training step, the validation step and the forward used for sampling.

    The results of a stage travel to the next one, and their gradients back, by `backend`.
    """

    @cg.trace
    def train(x, y):
        losses = []
        for mx, my in cg.microbatches((x, y), microbatches):
            h = mx
            for stage in stages:
                h = cg.via(stage.forward(h), backend)
            losses.append(stages[-1].loss(h, my))
        loss = cg.mean(losses)
        cg.backward(loss)
        for stage in stages:
            stage.update()
        return loss

    @cg.trace
    def evaluate(x, y):
        losses = []
        for mx, my in cg.microbatches((x, y), microbatches):
            h = mx
            for stage in stages:
                h = cg.via(stage.forward(h), backend)
            losses.append(stages[-1].loss(h, my))
        return cg.mean(losses)

    @cg.trace
    def predict(x):
        for stage in stages:
            x = cg.via(stage.forward(x), backend)
        return x[:, -1]

    return train, evaluate, predict


def validate(evaluate, text: Text, config: Config, size: int, batches: int = 4) -> float:
    """Mean loss over fixed windows of the held-out text, nats a byte."""
    data = (text.batch(text.validation, config, size, seed=-1 - i) for i in range(batches))
    return sum(float(evaluate(x, y)) for x, y in data) / batches


def sample(predict, text: Text, config: Config, length: int, rows: int) -> str:
    """Continue the start of the held-out text by `length` bytes, temperature 0.8.

    Every rank draws the same bytes: all get the same logits, and draw on the host, by the same
    generator. The window has `rows` equal rows, one for each set of ranks.
    """
    generator = torch.Generator().manual_seed(0)
    window = text.validation[: config.context].long()[None]
    out: list[int] = []
    for _ in range(length):
        logits = predict(window.repeat(rows, 1))[0].cpu()  # a step's results are on the device
        probabilities = torch.softmax(logits / 0.8, dim=-1)
        byte = torch.multinomial(probabilities, 1, generator=generator)
        out.append(int(byte))
        window = torch.cat([window[:, 1:], byte[None]], dim=1)
    return bytes(out).decode(errors="replace")


def bubble(compiled: cg.Compiled) -> float:
    """Share of the step that the ranks, on average, spent waiting for one another."""
    shares = cg.allgather(compiled.statistics().bubble)
    return sum(shares) / len(shares)


def progress(steps: range, shown: bool) -> Iterator:
    """A progress bar on rank 0, a bare loop elsewhere."""
    from tqdm import tqdm

    return tqdm(steps, initial=steps.start, total=steps.stop, disable=not shown, unit="step")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=160, help="steps in all, resumed ones included"
    )
    parser.add_argument("--batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b", choices=cg.schedules.names())
    parser.add_argument(
        "--backend",
        default="auto",
        choices=("auto", "cpu", "nccl", "hccl"),
        help="what activations and their gradients travel by",
    )
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a stage's weights")
    parser.add_argument("--dp", type=int, default=1, help="such sets of ranks, for each stage")
    parser.add_argument(
        "--fsdp",
        nargs="?",
        const="auto",
        choices=("auto", "step", "task"),
        help="keep weights in pieces along --dp; gathered ones stay for a step, or for a task",
    )
    parser.add_argument(
        "--float8",
        nargs="?",
        const="tensorwise",
        choices=("tensorwise", "rowwise"),
        help="compute the blocks' linear layers in float8, with a scale for a tensor, or for a row",
    )
    parser.add_argument(
        "--store", choices=("host", "host-state"), help="let weights and AdamW's state rest there"
    )
    parser.add_argument("--memory", help="bytes that a rank's program may hold, as 40GiB")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--layers", type=int, default=Config.layers)
    parser.add_argument("--width", type=int, default=Config.width)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate-every", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=80)
    parser.add_argument("--sample", type=int, default=200, help="bytes of text to generate")
    parser.add_argument("--dump", type=Path, help="write the IR after every pass to this folder")
    parser.add_argument("--out", type=Path, default=Path("runs/train_gpt"))
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    args = parser.parse_args()
    for name in ("steps", "batch", "microbatches", "tp", "dp", "validate_every", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.width % Config.heads:
        parser.error(f"--width {args.width} does not divide into {Config.heads} heads")
    if Config.heads % args.tp:
        parser.error(f"--tp {args.tp} does not divide the {Config.heads} heads")
    group = args.tp * args.dp
    if cg.world_size() % group:
        parser.error(
            f"--tp {args.tp} and --dp {args.dp} make groups of {group} ranks, of which "
            f"{cg.world_size()} ranks are no whole number"
        )
    if args.fsdp and args.dp == 1:
        parser.error("--fsdp keeps weights in pieces on the ranks of --dp, which must be above 1")
    if args.resume and group > 1:
        parser.error("--resume needs checkpoints, and groups of ranks (--tp, --dp) write none")
    groups, unit = cg.world_size() // group, "ranks" if group == 1 else "groups of ranks"
    count = len(homes(args.schedule, groups))
    if args.layers < count:
        parser.error(
            f"'{args.schedule}' on {groups} {unit} has {count} stages and needs at least "
            f"as many --layers, not {args.layers}"
        )
    if args.batch % args.microbatches:
        parser.error(f"--batch {args.batch} does not divide into {args.microbatches} microbatches")
    return args


def main() -> None:
    args = parse()
    folder = args.out / "checkpoints"
    if not (args.resume or cg.restarts()):
        checkpoints.forget(folder)
    config = Config(layers=args.layers, width=args.width)
    text = Text.load()
    group = args.dp * args.tp
    places = homes(args.schedule, cg.world_size() // group)
    stages = [
        place(home, args.dp, args.tp, args.fsdp is not None, args.float8, args.store)(
            config, part, args.seed, args.rate, args.steps
        )
        for home, part in zip(places, cut(config.layers, len(places)), strict=True)
    ]
    train, evaluate, predict = make_steps(stages, args.microbatches, args.backend)
    batch = text.batch(text.train, config, args.batch, seed=0)
    schedule = cg.schedules.by_name(args.schedule)
    fsdp = None if args.fsdp is None else cg.fsdp(keep=args.fsdp, bucket="blocks.*")
    lowered = train.lower(*batch)
    try:
        compiled = lowered.compile(schedule=schedule, fsdp=fsdp, dump=args.dump, memory=args.memory)
    except (ValueError, cg.TraceError) as error:  # such as a memory that does not suffice
        raise SystemExit(str(error)) from error
    if cg.rank() == 0 and args.memory is not None:
        print(compiled.memory_report)
    record, start = Record(), 0
    if args.resume or checkpoints.is_there(folder):
        start, saved = checkpoints.load(folder, stages, compiled)
        record = Record(**saved)

    talks, seconds = cg.rank() == 0, 0.0
    bar = progress(range(start, args.steps), talks)
    for step in bar:
        x, y = text.batch(text.train, config, args.batch, seed=step)
        began = time.perf_counter()
        record.losses.append(float(compiled(x, y)))
        seconds += time.perf_counter() - began
        done = step + 1
        record.tokens_per_second = (done - start) * x.numel() / seconds
        if done % 10 == 0 or done == args.steps:
            record.bubble = bubble(compiled)
        if talks:
            bar.set_postfix_str(f"loss {record.losses[-1]:.3f}, {record.speed()}")
        if done % args.validate_every == 0 or done == args.steps:
            record.validation.append((done, validate(evaluate, text, config, args.batch)))
        if group == 1 and (done % args.save_every == 0 or done == args.steps):
            checkpoints.save(folder, stages, compiled, done, asdict(record))

    unigram = text.unigram_loss()
    generated = sample(predict, text, config, args.sample, args.dp)
    if talks:
        report(args, record, unigram, generated)


def report(args: argparse.Namespace, record: Record, unigram: float, generated: str) -> None:
    """Print the outcome and write it beside the checkpoints."""
    args.out.mkdir(parents=True, exist_ok=True)
    figures = asdict(record) | {"unigram_validation": unigram, "ranks": cg.world_size()}
    (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
    if record.validation:
        curves.plot(record.losses, record.validation, unigram, args.out / "loss.png")
        print(
            f"validation loss {record.validation[-1][1]:.3f} nats a byte; "
            f"a unigram model of the same bytes: {unigram:.3f}"
        )
    print(record.speed())
    saved = "checkpoints, " if args.tp * args.dp == 1 else ""
    print(f"{saved}loss.png and figures.json are in {args.out}")
    if generated:
        print(f"--- sample ---\n{generated}\n--------------")


if __name__ == "__main__":
    main()
