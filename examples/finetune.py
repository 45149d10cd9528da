"""Fine-tune a causal language model of transformers, unchanged, from its own weights.

    python -m cg.launch -n 2 examples/finetune.py --model DIR --pp 2
    mpirun -n 8 python examples/finetune.py --model DIR --pp 2 --dp 2 --tp 2 --schedule zb-h1
    mpirun -n 4 python examples/finetune.py --model DIR --pp 2 --dp 2 --lora 8 --data notes.jsonl
    python -m cg.launch -n 2 examples/finetune.py --model DIR --resume --steps 200
    CG_RANKS=2 python examples/finetune.py --model DIR --pp 2     # one process plays the ranks

DIR is a folder as `save_pretrained` writes it. Each checkpoint under --out is one as well, or with
--lora a folder of adapters that peft opens. Beside the weights it has the state from which training
goes on, on any shape of ranks. --ep spreads the experts of a mixture, and the batch, over ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import curves
import tables
import torch
from folders import Model, read_model, read_tokenizer
from texts import IGNORED, Texts, documents, successors
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

import cg


@cg.actor
class Stage(nn.Module):
    """A part of the model, with its optimizer. Weights are float32, whatever it computes in."""

    def __init__(self, cuts: Any, index: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.part = cuts.part(index)
        self.bf16 = args.bf16
        trained = [p for p in self.part.parameters() if p.requires_grad]
        self.optimizer, self.scheduler = trainers(trained, args.rate, args.decay, args.steps)

    def lend(self, rows: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The weights that later parts use as well, such as those of tied embeddings."""
        return self.part.lend(rows)

    def forward(self, moving, ids: Tensor, lent: dict[str, Tensor]):
        """Compute the next part's input from this part's input and tokens [batch, time]."""
        with torch.autocast(ids.device.type, torch.bfloat16, self.bf16):
            return self.part(moving, input_ids=ids, use_cache=False, lent=lent)

    def logits(self, moving, ids: Tensor, at: Tensor, lent: dict[str, Tensor]) -> Tensor:
        """The logits of the token behind each row's position `at`, float32 [batch, vocabulary]."""
        logits = self.forward(moving, ids, lent).logits
        rows = torch.arange(len(ids), device=ids.device)
        return logits[rows, at].float()

    def loss(
        self, moving, ids: Tensor, labels: Tensor, count: Tensor, lent: dict[str, Tensor]
    ) -> Tensor:
        """The part of a microbatch in the mean negative log likelihood of a step's labels, nats.

        Args:
            labels: the token behind each of `ids`, int64 [batch, time]; `IGNORED` does not count.
            count: of the labels of all microbatches, so that each weighs the same.
        """
        logits = self.forward(moving, ids, lent).logits.float()
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / count

    def update(self) -> None:
        """One step of the optimizer; ordinary PyTorch, which runs on the ranks that hold it."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


ROWS = (
    "forward(moving)|forward(ids)|logits(moving)|logits(ids)|logits(at)|loss(moving)|loss(ids)"
    "|loss(labels)|lend(rows)"
)
"""Arguments that are cut along the batch."""


def trainers(parameters, rate: float, decay: float, steps: int):
    """The optimizer, and the scheduler of its learning rate."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: learning_rate(s, steps))
    return optimizer, schedule


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over a twentieth of the run, then a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def homes(schedule: str, groups: int) -> list[int]:
    """The group of each stage; some schedules go round the groups twice, or down and up again."""
    line = list(range(groups))
    if schedule in ("interleaved", "looped-bfs"):
        return line + line
    return line + line[::-1] if schedule in ("zb-v", "dualpipe-v") else line


def make_stages(model: Model, args: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The cuts of a model, and an actor for each stage, with its weights.

    Raises:
        SystemExit: the model has too few layers, or cannot be cut.
    """
    places = homes(args.schedule, args.pp)
    size = args.dp * args.ep * args.tp
    example = {"input_ids": torch.zeros(1, args.length, dtype=torch.int64), "use_cache": False}
    try:
        cuts = cg.cut_layers(
            model.whole, args.stages or len(places), example=example, experts=args.experts
        )
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if len(cuts) != len(places):
        raise SystemExit(f"--stages names {len(cuts)} stages, and there are {len(places)}")
    lent = "forward(lent)|logits(lent)|loss(lent)"
    plan = cg.plan({ROWS: cg.cut(0, "dp", "ep"), lent: cg.whole})
    if args.tp > 1 or args.ep > 1:
        plan = plan | cg.plans.hf(model.whole, batch=None, experts="ep" if args.ep > 1 else None)
    stages = []
    for index, home in enumerate(places):
        if size == 1:
            make = Stage.on(home, init=model.weights)
        else:
            ranks = range(home * size, (home + 1) * size)
            grid = cg.mesh(ranks, dp=args.dp, ep=args.ep, tp=args.tp)
            store = cg.cut(0, "dp") if args.fsdp else cg.whole
            make = Stage.on(grid, plan=plan, init=model.weights, store=store)
        stages.append(make(cuts, index, args))
    return cuts, stages


# -- steps --------------------------------------------------------------------------------------


def make_steps(cuts: Any, stages: list[Any], args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The training step, the evaluation step, and the forward used for sampling."""

    def lend() -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for stage, part in zip(stages, cuts, strict=True):
            if part.lent:
                sizes = {name: len(cuts.model.get_parameter(name)) for name in part.lent}
                rows = {name: torch.arange(size) for name, size in sizes.items()}
                weights |= stage.lend(rows if args.dp * args.ep > 1 else None)
        return weights

    def run(ids, lent, last):
        """Run the parts in order; `last` has the method of the last one and its other arguments."""
        moving = None
        for stage, part in zip(stages, cuts, strict=True):
            own = {name: lent[name] for name in part.borrowed}
            if stage is not stages[-1]:
                moving = stage.forward(moving, ids, own)
        name, *more = last
        return getattr(stages[-1], name)(moving, ids, *more, own)

    def mean_loss(ids, labels):
        lent = lend()  # once a step: a tied weight goes to its users, and its gradient comes back
        count = (labels != IGNORED).sum()
        return sum(
            run(some, lent, ("loss", known, count))
            for some, known in cg.microbatches((ids, labels), args.microbatches)
        )

    @cg.trace
    def train(ids, labels):
        loss = mean_loss(ids, labels)
        cg.backward(loss)
        norm = cg.clip_grad_norm(stages, args.clip)
        for stage in stages:
            stage.update()
        return loss, norm

    @cg.trace
    def evaluate(ids, labels):
        return mean_loss(ids, labels)

    @cg.trace
    def predict(ids, at):
        return run(ids, lend(), ("logits", at))

    return train, evaluate, predict


def sample(predict: Any, tokenizer: Any, args: argparse.Namespace) -> str:
    """Continue --prompt greedily by --sample tokens, alike on all ranks: they get equal logits."""
    ids = tokenizer(args.prompt)["input_ids"]
    start = len(ids)
    room = min(args.length, start + args.sample)
    copies = args.dp * args.ep
    window = torch.zeros(copies, args.length, dtype=torch.int64)  # later tokens have no effect
    for at in range(start, room):
        window[:, :at] = torch.tensor(ids)
        positions = torch.full((copies,), at - 1)
        ids.append(int(predict(window, positions)[0].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids, skip_special_tokens=True)


# -- the run ------------------------------------------------------------------------------------


@dataclass
class Record:
    """The results of the run so far; they go into checkpoints."""

    done: int = 0
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class Run:
    """A run of fine-tuning that is ready to start."""

    args: argparse.Namespace
    model: Model
    stages: list[Any]
    texts: Texts
    train: Any
    evaluate: Any
    record: Record
    tokens_per_second: float = 0.0

    @property
    def talks(self) -> bool:
        return cg.rank() == 0

    def go(self) -> None:
        """Train to the last step, evaluate and save as often as is wanted."""
        args, seconds, began_at = self.args, 0.0, self.record.done
        if began_at < args.steps:
            self.save(dry_run=True)  # if it cannot be saved, this fails before the first step
        bar = progress(range(began_at, args.steps), self.talks)
        for step in bar:
            ids = self.texts.batch(step, args.batch, args.seed)
            began = time.perf_counter()
            loss, _ = self.train(ids, successors(ids))
            self.record.losses.append(float(loss))
            seconds += time.perf_counter() - began
            self.record.done = done = step + 1
            self.tokens_per_second = (done - began_at) * ids.numel() / seconds
            if self.talks:
                words = f"loss {self.record.losses[-1]:.3f}, {self.tokens_per_second:.0f} tokens/s"
                bar.set_postfix_str(words)
            if args.evaluate_every and (done % args.evaluate_every == 0 or done == args.steps):
                self.record.validation.append((done, self.validate()))
            if done % args.save_every == 0 or done == args.steps:
                self.save()

    def validate(self) -> float:
        """The mean loss of the labels of all batches that are judged, nats."""
        total, count = 0.0, 0
        batches = self.texts.validation_batches(self.args.batch, self.args.evaluate_batches)
        for ids, labels in batches:
            labelled = int((labels != IGNORED).sum())
            total += float(self.evaluate(ids, labels)) * labelled
            count += labelled
        return total / count

    def save(self, dry_run: bool = False) -> None:
        """Write a checkpoint, then remove those that are older than the newest --keep."""
        folder = self.args.out / "checkpoints"
        cg.save_checkpoint(
            folder / ("dry-run" if dry_run else f"step-{self.record.done:06d}"),
            self.stages,
            compiled=self.train,
            state={"record": asdict(self.record), "model": str(self.args.model)},
            like=self.model.like,
            files=self.model.files,
            rename=self.model.saved,
            stem=self.model.stem,
            dry_run=dry_run,
        )
        if self.talks and not dry_run:
            for old in sorted(folder.glob("step-*"))[: -self.args.keep]:
                shutil.rmtree(old)

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        newest = cg.newest_checkpoint(self.args.out / "checkpoints")
        if newest is None:
            return
        state = cg.load_checkpoint(
            newest, self.stages, compiled=self.train, rename=self.model.saved, stem=self.model.stem
        )
        self.record = Record(**state["record"])
        if self.talks:
            print(f"goes on from {newest}, step {self.record.done}")


def progress(steps: range, shown: bool) -> Iterator[int]:
    """A progress bar on rank 0, a bare loop elsewhere."""
    from tqdm import tqdm

    return tqdm(steps, initial=steps.start, total=steps.stop, disable=not shown, unit="step")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the model, its weights and tokenizer")
    add("--data", type=Path, nargs="*", default=[], help="text files, or JSON lines (.jsonl)")
    add("--out", type=Path, default=Path("runs/finetune"))
    add("--resume", action="store_true", help="go on from the newest checkpoint under --out")
    add("--pp", type=int, default=cg.world_size(), help="groups of ranks in the pipeline")
    add("--dp", type=int, default=1, help="ranks of a group that share the batch")
    add("--ep", type=int, default=1, help="ranks of a group that share experts, and the batch too")
    add("--tp", type=int, default=1, help="ranks of a group that share weights")
    add(
        "--fsdp",
        choices=("auto", "step", "task"),
        help="keep weights in pieces along --dp; gathered ones stay for a step, or for a task",
    )
    add("--stages", type=int, nargs="*", help="layers of each stage, to cut by hand")
    add("--schedule", default="1f1b", choices=cg.schedules.names())
    add("--fuse", choices=("inductor",), help="have TorchInductor compile the stages")
    add("--bf16", action="store_true", help="compute in bfloat16; weights stay float32")
    add("--lora", type=int, default=0, help="train adapters of this rank alone")
    add("--attention", default="sdpa", choices=("sdpa", "eager"), help="what can be traced")
    add(
        "--dispatch",
        choices=("auto", "gather", "exchange"),
        default="auto",
        help="with --ep: all tokens go to all ranks of experts, or rows to those that need them",
    )
    add("--experts", help="how a mixture computes its experts, such as batched_mm; cg if left out")
    add("--trust-remote-code", action="store_true", help="run Python that the folder brings")
    add("--dropout", action="store_true", help="drop out as the model says, in evaluations too")
    add("--steps", type=int, default=100, help="steps in all, resumed ones included")
    add("--batch", type=int, default=8, help="windows of text a step")
    add("--microbatches", type=int, default=4, help="parts of it, whose gradients are added up")
    add("--length", type=int, default=256, help="tokens of a window")
    add("--windows", type=int, default=20_000, help="windows to be read at most")
    add("--rate", type=float, default=2e-5, help="peak learning rate")
    add("--decay", type=float, default=0.0, help="weight decay")
    add("--clip", type=float, default=1.0, help="largest norm of all gradients")
    add("--seed", type=int, default=0)
    add("--evaluate-every", type=int, default=25, help="0: never")
    add("--evaluate-batches", type=int, default=2)
    add("--save-every", type=int, default=50)
    add("--keep", type=int, default=2, help="checkpoints to keep")
    add("--prompt", default="The capital of France is", help="to be continued at the end")
    add("--sample", type=int, default=24, help="tokens to continue it by; 0: none")
    add("--trace", type=Path, help="write a profile of all ranks, for Perfetto, to this file")
    args = parser.parse_args()
    sizes = ("pp", "dp", "ep", "tp")
    for name in (*sizes, "steps", "batch", "microbatches", "length", "save_every", "keep"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    ranks = math.prod(vars(args)[name] for name in sizes)
    if ranks != cg.world_size():
        product = " x ".join(f"--{name} {vars(args)[name]}" for name in sizes)
        parser.error(f"{product} are {ranks} ranks, and there are {cg.world_size()}")
    copies = args.dp * args.ep
    if args.batch % args.microbatches or args.batch // args.microbatches < copies:
        parser.error(
            f"--batch {args.batch} does not divide into {args.microbatches} microbatches of a "
            f"window or more for each of {copies} ranks"
        )
    if args.fsdp and args.dp == 1:
        parser.error("--fsdp keeps weights in pieces on the ranks of --dp, which must be above 1")
    if args.lora and args.tp > 1:
        parser.error(
            "--lora with --tp: the plans of models do not say how adapters are cut; use --dp, --ep "
            "or --pp"
        )
    if missing := [str(file) for file in args.data if not file.is_file()]:
        parser.error(f"--data: there is no file {', '.join(missing)}")
    return args


def main() -> None:
    args = parse()
    model, tokenizer = read_model(args), read_tokenizer(args.model, args.trust_remote_code)
    try:
        note = tables.check_length(args.length, model.whole, args.model)
        texts = Texts.of(documents(args.data), tokenizer, args.length, args.windows)
        used = {"the text": texts.ids}
        if args.sample:
            used["--prompt"] = tokenizer(args.prompt)["input_ids"]
        tables.check_ids(used, tokenizer, model.whole, args.model)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    if note is not None and cg.rank() == 0:
        print(note)
    cuts, stages = make_stages(model, args)
    if cg.rank() == 0:
        print(cuts)
    train, evaluate, predict = make_steps(cuts, stages, args)
    schedule = cg.schedules.by_name(args.schedule)
    ids = texts.batch(0, args.batch, args.seed)
    lowered = train.lower(ids, successors(ids))
    fsdp = None if args.fsdp is None else cg.fsdp(keep=args.fsdp)
    compiled = lowered.compile(schedule=schedule, fuse=args.fuse, fsdp=fsdp, dispatch=args.dispatch)
    run = Run(args, model, stages, texts, compiled, evaluate, Record())
    if args.resume:
        run.resume()
    elif cg.newest_checkpoint(args.out / "checkpoints") is not None:
        raise SystemExit(f"{args.out} has checkpoints: go on with --resume, or give another --out")
    before = sample(predict, tokenizer, args) if args.sample else ""
    with cg.profile(args.trace) if args.trace else contextlib.nullcontext():
        run.go()
    after = sample(predict, tokenizer, args) if args.sample else ""
    if cg.rank() == 0:
        report(run, before, after)


def report(run: Run, before: str, after: str) -> None:
    """Print the outcome and write it beside the checkpoints."""
    args, record = run.args, run.record
    args.out.mkdir(parents=True, exist_ok=True)
    figures = asdict(record) | {"tokens_per_second": run.tokens_per_second}
    (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
    if record.losses and record.validation:
        curves.plot(record.losses, record.validation, None, args.out / "loss.png", "token")
    if record.losses:
        print(
            f"loss {record.losses[0]:.3f} at first, {record.losses[-1]:.3f} at last, nats a token"
        )
    for done, loss in record.validation[-1:]:
        print(f"validation loss {loss:.3f} after {done} steps")
    print(f"{run.tokens_per_second:.0f} tokens/s; checkpoints and figures are in {args.out}")
    if args.sample:
        print(f"--- before ---\n{before}\n--- after ---\n{after}\n--------------")


if __name__ == "__main__":
    main()
