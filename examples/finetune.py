"""Fine-tune a causal language model of transformers, unchanged, from its own weights.

    python -m cg.launch -n 2 examples/finetune.py --model DIR --pp 2
    mpirun -n 8 python examples/finetune.py --model DIR --pp 2 --dp 2 --tp 2 --schedule zb-h1
    mpirun -n 4 python examples/finetune.py --model DIR --pp 2 --dp 2 --lora 8 --data notes.jsonl
    mpirun -n 4 python examples/finetune.py --model DIR --pp 2 --cp 2 --length 8192 --pack
    mpirun -n 4 python examples/finetune.py --model DIR --pp 2 --tp 2 --sequence-parallel
    mpirun -n 2 python examples/finetune.py --model DIR --dp 2 --pp 1 --fsdp step --float8 --bf16
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import borders
import curves
import finetune_options
import mixtures
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

    def __init__(
        self, cuts: Any, index: int, args: argparse.Namespace, balance: mixtures.Balance
    ) -> None:
        super().__init__()
        self.part = cuts.part(index)
        self.bf16 = args.bf16
        self.balance, self.weight = balance, 1 / args.microbatches
        trained = [p for p in self.part.parameters() if p.requires_grad]
        self.optimizer, self.scheduler = trainers(trained, args.rate, args.decay, args.steps)

    def lend(self, rows: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The weights that later parts use as well, such as those of tied embeddings."""
        return self.part.lend(rows)

    def forward(
        self,
        moving,
        ids: Tensor,
        positions: Tensor | None,
        lent: dict[str, Tensor],
        figures: mixtures.Figures | None,
    ):
        """Compute the next part's input from this part's input and tokens [batch, time].

        Args:
            positions: of tokens in their documents, int64 [batch, time]; None: in the window.
            figures: of experts in earlier stages; None outside of training, without limits.

        Returns:
            That input, and the figures with those of this stage.
        """
        capacity = None if figures is None else self.balance.capacity
        places = {} if positions is None else {"position_ids": positions}
        with (
            torch.autocast(ids.device.type, torch.bfloat16, self.bf16),
            cg.expert_choices(self.part, capacity) as choices,
        ):
            moving = self.part(moving, input_ids=ids, use_cache=False, lent=lent, **places)
        return moving, None if figures is None else self.balance.figures(choices, figures)

    def logits(self, moving, ids: Tensor, at: Tensor, lent: dict[str, Tensor]) -> Tensor:
        """The logits of the token behind each row's position `at`, float32 [batch, vocabulary]."""
        output, _ = self.forward(moving, ids, None, lent, None)
        rows = torch.arange(len(ids), device=ids.device)
        return output.logits[rows, at].float()

    def loss(
        self,
        moving,
        ids: Tensor,
        labels: Tensor,
        positions: Tensor | None,
        count: Tensor,
        lent: dict[str, Tensor],
        figures: mixtures.Figures | None,
    ):
        """The part of a microbatch in the mean negative log likelihood of a step's labels, nats.

        In training, losses of balance are added. They are means over microbatches.

        Args:
            labels: the token behind each of `ids`, int64 [batch, time]; `IGNORED` does not count.
            count: of the labels of all microbatches, so that each weighs the same.
            positions, figures: as `forward` takes them.

        Returns:
            The loss, and the figures with those of this stage.
        """
        output, figures = self.forward(moving, ids, positions, lent, figures)
        logits = output.logits.float().flatten(0, 1)
        total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = total / count
        if figures is not None and self.balance.has_losses:
            loss = loss + self.balance.loss(figures) * self.weight
        return loss, figures

    def update(self, figures: mixtures.Figures) -> None:
        """One step of the optimizer; ordinary PyTorch, which runs on the ranks that hold it.

        Args:
            figures: of the stage's experts in the whole step.
        """
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.balance.correct(self.part, figures.get("counts"))


TOKENS = "forward(ids)|logits(ids)|loss(ids)|loss(labels)"
"""Arguments that are cut along the batch, and along the tokens of a window."""

MOVING = "forward(moving)|logits(moving)|loss(moving)"
"""What a stage takes of the one before, cut so, and with --sequence-parallel along --tp, too."""

ROWS = "logits(at)|forward(positions)|loss(positions)"
"""Arguments that are cut along the batch alone. Masks need the positions of all tokens."""


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


def float8_layers(model: nn.Module, recipe: str | None) -> Any:
    """The plan by which all linear layers but the head compute in float8; None without a recipe."""
    if recipe is None:
        return None
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    return cg.float8("*", recipe=recipe, skip=[f"*{name}" for name in names])


def make_stages(model: Model, args: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The cuts of a model, and an actor for each stage, with its weights.

    Raises:
        SystemExit: the model has too few layers, or cannot be cut.
    """
    places = homes(args.schedule, args.pp)
    size = args.dp * args.ep * args.cp * args.tp
    balance = mixtures.balance(model.whole, args)
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
    rows, copies = cg.cut(0, "dp", "ep"), cg.cut(0, "dp", "ep", "cp")
    tokens = rows & cg.cut(1, "cp", order=args.cp_order) if args.cp > 1 else rows
    order = args.cp_order if args.cp > 1 else "rows"
    moving = tokens & cg.cut(1, "tp", order=order) if args.sequence_parallel else tokens
    shardings = {TOKENS: tokens, MOVING: moving, ROWS: rows, "lend(rows)": copies, lent: cg.whole}
    plan = cg.plan(shardings, attention=args.cp_form)
    if args.tp > 1 or args.ep > 1:
        experts = "ep" if args.ep > 1 else None
        sequence = "tp" if args.sequence_parallel else None
        plan = plan | cg.plans.hf(model.whole, batch=None, experts=experts, sequence=sequence)
    store = copies if args.fsdp else cg.whole
    store = (store, args.store) if args.store else store
    layers = float8_layers(model.whole, args.float8)
    plan = plan if layers is None else plan | layers
    stages = []
    for index, home in enumerate(places):
        if size == 1:
            make = Stage.on(home, plan=layers, init=model.weights, store=store)
        else:
            ranks = range(home * size, (home + 1) * size)
            grid = cg.mesh(ranks, dp=args.dp, ep=args.ep, cp=args.cp, tp=args.tp)
            make = Stage.on(grid, plan=plan, init=model.weights, store=store)
        stages.append(make(cuts, index, args, balance))
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
                weights |= stage.lend(rows if args.dp * args.ep * args.cp > 1 else None)
        return weights

    def run(ids, positions, lent, figures=None):
        """Run all parts but the last: its input, what is lent to it, and figures of each part."""
        moving, seen = None, []
        for stage, part in zip(stages[:-1], cuts, strict=False):
            own = {name: lent[name] for name in part.borrowed}
            moving, figures = stage.forward(moving, ids, positions, own, figures)
            seen.append(figures)
        return moving, {name: lent[name] for name in cuts[-1].borrowed}, seen

    def mean_loss(ids, labels, positions, figures=None):
        """The loss, and of each microbatch the figures of each part; `figures` are {} or None."""
        lent = lend()  # once a step: a tied weight goes to its users, and its gradient comes back
        count = (labels != IGNORED).sum()
        losses, seen = [], []
        batch = (ids, labels, positions)
        for some, known, places in cg.microbatches(batch, args.microbatches):
            moving, own, parts = run(some, places, lent, figures)
            before = parts[-1] if parts else figures
            loss, last = stages[-1].loss(moving, some, known, places, count, own, before)
            losses.append(loss)
            seen.append([*parts, last])
        return sum(losses), seen

    @cg.trace
    def train(ids, labels, positions=None):
        loss, seen = mean_loss(ids, labels, positions, {})
        cg.backward(loss)
        norm = cg.clip_grad_norm(stages, args.clip)
        figures = [mixtures.add_up(of_stage) for of_stage in zip(*seen, strict=True)]
        for stage, of_stage in zip(stages, figures, strict=True):
            stage.update(of_stage)
        return loss, norm, figures

    @cg.trace
    def evaluate(ids, labels, positions=None):
        return mean_loss(ids, labels, positions)[0]

    @cg.trace
    def predict(ids, at):
        moving, own, _ = run(ids, None, lend())
        return stages[-1].logits(moving, ids, at, own)

    return train, evaluate, predict


def drawing_alike(step: Any) -> Callable[..., Any]:
    """A step whose calls all draw the same random numbers, such as masks of dropout."""

    def run(*batch: Any) -> Any:
        result = step(*batch)
        state = step.state_dict()
        step.load_state_dict({**state, "calls": state["calls"] - 1})
        return result

    return run


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
    norms: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    experts: mixtures.Summary = field(default_factory=mixtures.Summary.empty)

    @staticmethod
    def of(state: dict[str, Any]) -> Record:
        """The record that `asdict` has taken apart."""
        experts = state.get("experts")  # which older checkpoints lack
        summary = mixtures.Summary(**experts) if experts else mixtures.Summary.empty()
        return Record(**state | {"experts": summary})


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
            drawn = draw(self.texts, step, args)
            began = time.perf_counter()
            loss, norm, figures = self.train(*drawn)
            self.record.losses.append(float(loss))
            self.record.norms.append(float(norm))
            self.record.experts.add(figures)
            seconds += time.perf_counter() - began
            self.record.done = done = step + 1
            self.tokens_per_second = (done - began_at) * drawn[0].numel() / seconds
            if self.talks:
                words = f"loss {self.record.losses[-1]:.3f}, {self.tokens_per_second:.0f} tokens/s"
                bar.set_postfix_str(words + self.record.experts.words())
            if args.evaluate_every and (done % args.evaluate_every == 0 or done == args.steps):
                self.record.validation.append((done, self.validate()))
            if done % args.save_every == 0 or done == args.steps:
                self.save()

    def validate(self) -> float:
        """The mean loss of the labels of all batches that are judged, nats."""
        total, count = 0.0, 0
        args = self.args
        batches = self.texts.validation_batches(args.batch, args.evaluate_batches, args.pack)
        for ids, labels, positions in batches:
            labelled = int((labels != IGNORED).sum())
            total += float(self.evaluate(ids, labels, positions)) * labelled
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
        self.record = Record.of(state["record"])
        if self.talks:
            print(f"goes on from {newest}, step {self.record.done}")


def draw(texts: Texts, step: int, args: argparse.Namespace) -> tuple[Tensor, ...]:
    """What a training step takes: windows, labels, and with --pack positions."""
    if args.pack:
        ids, positions = texts.packed(step, args.batch, args.seed)
        return ids, successors(ids, positions), positions
    ids = texts.batch(step, args.batch, args.seed)
    return ids, successors(ids)


def progress(steps: range, shown: bool) -> Iterator[int]:
    """A progress bar on rank 0, a bare loop elsewhere."""
    from tqdm import tqdm

    return tqdm(steps, initial=steps.start, total=steps.stop, disable=not shown, unit="step")


def main() -> None:
    args = finetune_options.parse(__doc__.splitlines()[0])
    goes_on = args.resume or cg.restarts() > 0
    if not goes_on and cg.newest_checkpoint(args.out / "checkpoints") is not None:
        raise SystemExit(f"{args.out} has checkpoints: go on with --resume, or give another --out")
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
    lowered = train.lower(*draw(texts, 0, args))
    fsdp = None if args.fsdp is None else cg.fsdp(keep=args.fsdp)
    try:
        compiled = lowered.compile(
            schedule=schedule,
            fuse=args.fuse,
            fsdp=fsdp,
            dispatch=args.dispatch,
            memory=args.memory,
            tasks_in_flight=args.tasks_in_flight,
        )
    except (ValueError, cg.TraceError) as error:  # such as a memory that does not suffice
        raise SystemExit(str(error)) from error
    if cg.rank() == 0 and args.memory is not None:
        print(compiled.memory_report)
    run = Run(args, model, stages, texts, compiled, evaluate, Record())
    if goes_on:
        run.resume()
    if args.pack:
        words = model.whole.get_input_embeddings().num_embeddings
        try:
            borders.check(drawing_alike(evaluate), args.batch, args.length, words)
        except ValueError as error:
            raise SystemExit(str(error)) from error
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
