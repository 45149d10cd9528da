"""One side of `finetune.py`, in processes of its own: it trains, and says how fast that was.

python benchmarks/finetune_arms.py plain --model DIR ...
python -m cg.launch -n 2 benchmarks/finetune_arms.py cg --model DIR ...
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import finetune  # noqa: E402 (an example, and found by the line above)
import llama_peer  # noqa: E402

import cg  # noqa: E402
from cg.ir.layout import whole  # noqa: E402
from cg.tracer.function.groups.meta import fill_from  # noqa: E402

RATE, CLIP, STEPS = 2e-5, 1.0, 100
SMOL: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""SmolLM2-135M."""
SMALL = {**SMOL, "vocab_size": 512, "num_hidden_layers": 4, "hidden_size": 144}

Step = Callable[[Tensor], float]
"""Takes tokens [batch, length], trains on them once, and returns the loss, where it is known."""


def write_random(folder: Path, small: bool) -> None:
    """A folder of a model with random weights, of SmolLM2's shape or a small one."""
    import transformers

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**(SMALL if small else SMOL))
        transformers.LlamaForCausalLM(config).save_pretrained(folder)


def tokens(step: int, args: argparse.Namespace, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(vocabulary, (args.batch, args.length), generator=generator)


def plain(args: argparse.Namespace) -> tuple[Step, int]:
    """transformers in one process, by so many microbatches whose gradients add up."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.train()
    optimizer, schedule = finetune.trainers(model.parameters(), RATE, 0.0, STEPS)
    parts = args.microbatches

    def step(ids: Tensor) -> float:
        total = 0.0
        for mine in ids.chunk(parts):
            loss = model(input_ids=mine, labels=mine, use_cache=False).loss / parts
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return total

    return step, model.config.vocab_size


def ours(args: argparse.Namespace) -> tuple[Step, int]:
    """The step of examples/finetune.py."""
    words = ["--model", str(args.model), "--pp", str(cg.world_size()), "--batch", str(args.batch)]
    words += ["--microbatches", str(args.microbatches), "--length", str(args.length)]
    words += [
        "--schedule",
        args.schedule,
        "--rate",
        str(RATE),
        "--clip",
        str(CLIP),
        "--steps",
        str(STEPS),
    ]
    words += ["--stages", *map(str, args.stages)] if args.stages else []
    sys.argv = ["finetune.py", *words]
    given = finetune.parse()
    model = finetune.read_model(given)
    vocabulary = model.whole.config.vocab_size
    cuts, stages = finetune.make_stages(model, given)
    if cg.rank() == 0:
        print(cuts, file=sys.stderr)
    train, _, _ = finetune.make_steps(cuts, stages, given)
    schedule = cg.schedules.by_name(args.schedule)
    ids = tokens(0, args, vocabulary)
    lowered = train.lower(ids, finetune.successors(ids))
    compiled = lowered.compile(schedule=schedule, fuse=args.fuse)
    return lambda ids: float(compiled(ids, finetune.successors(ids))[0]), vocabulary


class Wrapped(nn.Module):
    """A part of a cut model as torch's pipelining takes it, with a copy of what it borrows."""

    def __init__(self, cuts: Any, index: int, weights: Any) -> None:
        super().__init__()
        self.part = cuts.part(index)
        fill_from(weights, self.part, {}, None, f"part {index}")
        copies = {}
        for name in cuts[index].borrowed:
            shape = cuts.model.get_parameter(name).shape
            value = weights.read(name, whole(shape), torch.float32)
            copies[name.replace(".", "/")] = nn.Parameter(value)
        self.copies = nn.ParameterDict(copies)
        self.is_first = index == 0
        self.is_last = index == len(cuts) - 1

    def forward(self, x: Tensor) -> Tensor:
        lent = {name.replace("/", "."): value for name, value in self.copies.items()}
        ids = x if self.is_first else torch.zeros(x.shape[:2], dtype=torch.int64)
        moving = None if self.is_first else x
        found = self.part(moving, input_ids=ids, use_cache=False, lent=lent)
        return found.logits if self.is_last else found

    def tied(self) -> list[nn.Parameter]:
        """Parameters of which two parts have copies, in one order on both."""
        lent = self.part.lend()
        return [*self.copies.values(), *lent.values()]  # type: ignore[list-item]


def pipelining(args: argparse.Namespace) -> tuple[Step, int]:
    """torch.distributed.pipelining over Gloo, on the same parts.

    The two copies of tied embeddings add up their gradients, as Megatron's do.
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    llama_peer.join(torch.device("cpu"), 1, 600.0)
    rank, size, parts = cg.rank(), cg.world_size(), args.microbatches
    given = argparse.Namespace(
        model=args.model,
        attention="sdpa",
        trust_remote_code=False,
        dropout=False,
        lora=0,
        length=args.length,
    )
    model = finetune.read_model(given)
    example = {"input_ids": torch.zeros(1, args.length, dtype=torch.int64), "use_cache": False}
    cuts = cg.cut_layers(model.whole, args.stages or size, example=example)
    module = Wrapped(cuts, rank, model.weights)
    optimizer, rates = finetune.trainers(module.parameters(), RATE, 0.0, STEPS)
    rows, config = args.batch // parts, model.whole.config
    hidden = torch.empty(rows, args.length, config.hidden_size, device="meta")
    ids = torch.empty(rows, args.length, dtype=torch.int64, device="meta")
    logits = torch.empty(rows, args.length, config.vocab_size, device="meta")
    stage = PipelineStage(
        module,
        rank,
        size,
        torch.device("cpu"),
        input_args=(ids if rank == 0 else hidden.requires_grad_(),),
        output_args=((logits if rank == size - 1 else hidden).requires_grad_(),),
    )

    def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
        labels = finetune.successors(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss / parts

    kind = Schedule1F1B if args.schedule != "gpipe" else ScheduleGPipe
    schedule = kind(stage, parts, loss_fn=loss_of, scale_grads=False)

    def step(ids: Tensor) -> float:
        losses: list[Tensor] = []
        arguments = (ids,) if rank == 0 else ()
        more = {"target": ids, "losses": losses} if rank == size - 1 else {}
        schedule.step(*arguments, **more, return_outputs=False)
        for parameter in module.tied():
            dist.all_reduce(parameter.grad)
        copies = {id(copy) for copy in module.copies.values()}
        own = [p for p in module.parameters() if id(p) not in copies]
        square = torch.stack([p.grad.square().sum() for p in own]).sum()
        dist.all_reduce(square)
        scale = min(1.0, CLIP / (float(square.sqrt()) + 1e-6))
        for parameter in module.parameters():
            parameter.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        return float(torch.stack(losses).sum().detach()) if losses else float("nan")

    return step, config.vocab_size


ARMS = {"plain": plain, "cg": ours, "pipelining": pipelining}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", choices=sorted(ARMS))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="zb-h1")
    parser.add_argument("--stages", type=int, nargs="*", default=[])
    parser.add_argument("--fuse", choices=("inductor",), help="of cg: what compiles the stages")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    step, vocabulary = ARMS[args.arm](args)
    losses, seconds = [], []
    for number in range(args.steps + 2):
        ids = tokens(number, args, vocabulary)
        cg.barrier()
        began = time.perf_counter()
        losses.append(step(ids))
        cg.barrier()
        seconds.append(time.perf_counter() - began)
    found = next(each for each in cg.allgather(losses) if each[0] == each[0])  # no NaN
    if cg.rank() == 0:
        speed = args.batch * args.length / statistics.median(seconds[2:])
        print(json.dumps({"tokens_per_second": speed, "losses": found}))
    llama_peer.leave()


if __name__ == "__main__":
    main()
