"""Train within a limit of memory on ranks of a host: bits, peaks and times, case by case.

    python -m cg.launch -n 2 benchmarks/memory_cpu.py [--layers 8 32] [--width 128] [--json FILE]

GPT-2 and Qwen2 in two stages, or in four where the order takes two chunks a rank, compute the
gradients of eight microbatches, first without a limit. Then a rank may hold what 1F1B holds, but of
its saved tensors a share, `--shares 0.5 0.25`. A line for each case says

- equal: whether the loss and all gradients have the bits of the same order without a limit
- peak: the peak that is measured over the one that is planned, of the rank where they differ most;
  counted is what operators make, as `benchmarks/held_memory.py` does
- more: the time of a step by that without a limit, medians in turns, of the slowest rank
- paper: the same by the simulator, with times of calls that are measured in both (`measure`);
  medians of three
- step: the time without a limit by the simulator's

A limit that cannot be kept to is a line with what is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from held_memory import HeldMemory
from provenance import provenance

import cg

VOCABULARY, TOKENS, ROWS, MICROBATCHES = 512, 64, 2, 8
SCHEDULES = ("1f1b", "zb-h1", "zb-v", "interleaved", "auto")


class Stage(nn.Module):
    """A part of a language model."""

    def __init__(self, cuts: Any, index: int) -> None:
        super().__init__()
        self.part = cuts.part(index)

    def forward(self, moving: Any, ids: Tensor) -> Any:
        return self.part(moving, input_ids=ids, use_cache=False)

    def loss(self, moving: Any, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.part(moving, input_ids=ids, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model_of(family: str, layers: int, width: int) -> Any:
    """A small model whose embedding and head are apart."""
    torch.manual_seed(0)
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=TOKENS,
                n_embd=width,
                n_layer=layers,
                n_head=4,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                tie_word_embeddings=False,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )


def places_of(schedule: str) -> list[int]:
    """The rank of each stage."""
    return {"zb-v": [0, 1, 1, 0], "interleaved": [0, 1, 0, 1]}.get(schedule, [0, 1])


class Pipeline:
    """A model over two ranks, and the step that computes its gradients."""

    def __init__(self, family: str, layers: int, width: int, schedule: str) -> None:
        places = places_of(schedule)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(VOCABULARY, (ROWS * MICROBATCHES, TOKENS), generator=generator)
        self.batch = ids, ids.roll(-1, 1)
        example = {"input_ids": ids[:ROWS]}
        cuts = cg.cut_layers(model_of(family, layers, width), stages=len(places), example=example)
        actor = cg.actor(Stage)
        stages = [actor.on(rank)(cuts, index) for index, rank in enumerate(places)]
        own = [s for s, rank in zip(stages, places, strict=True) if rank == cg.rank()]
        self.modules = [stage.local for stage in own]
        self.schedule = cg.schedules.by_name(schedule)

        @cg.trace
        def step(ids: Tensor, labels: Tensor) -> Tensor:
            losses = []
            for mine, theirs in cg.microbatches((ids, labels), MICROBATCHES):
                moving = None
                for stage in stages[:-1]:
                    moving = stage.forward(moving, mine)
                losses.append(stages[-1].loss(moving, mine, theirs))
            loss = cg.mean(losses)
            cg.backward(loss)
            return loss

        self.lowered = step.lower(*self.batch)

    def compile(self, memory: int | None = None) -> cg.Compiled:
        return self.lowered.compile(schedule=self.schedule, memory=memory)

    def values(self, compiled: cg.Compiled) -> list[Tensor]:
        """The loss and this rank's gradients."""
        for module in self.modules:
            module.zero_grad()
        loss = compiled(*self.batch)
        parameters = [p for module in self.modules for p in module.parameters()]
        return [loss.clone(), *(p.grad.clone() for p in parameters if p.grad is not None)]

    def milliseconds(self, compiled: cg.Compiled) -> float:
        """The time of an execution on the slowest rank."""
        cg.barrier()
        began = time.perf_counter()
        compiled(*self.batch)
        return max(cg.allgather((time.perf_counter() - began) * 1e3))

    def peak_error(self, compiled: cg.Compiled) -> float:
        """The measured peak over the planned one, of the rank where they differ most."""
        plan = compiled.memory_analysis()[cg.rank()]
        with HeldMemory() as held:
            compiled(*self.batch)
        ratios = cg.allgather(held.peak / plan.working)
        return max(ratios, key=lambda ratio: abs(ratio - 1))


def limit_of(family: str, layers: int, width: int, share: float) -> int:
    """What a rank holds under 1F1B, with a share of its saved tensors."""
    plans = Pipeline(family, layers, width, "1f1b").compile().memory_analysis()
    return max(plan.peak - int((1 - share) * plan.saved) for plan in plans)


def simulated(steps: Sequence[cg.Compiled], batch: Sequence[Tensor]) -> list[float]:
    """The makespans of steps by the simulator, with times of calls that are measured in turns."""
    turns = [[step.simulate(step.measure(*batch)).makespan for step in steps] for _ in range(3)]
    return [statistics.median(makespans) for makespans in zip(*turns, strict=True)]


def compared(pipeline: Pipeline, limit: int, rounds: int) -> dict[str, Any]:
    """The figures of a case; `missing` says why there are none."""
    plain = pipeline.compile()
    try:
        fitted = pipeline.compile(limit)
    except cg.TraceError as error:
        return {"missing": str(error).splitlines()[0]}
    expected, values = pipeline.values(plain), pipeline.values(fitted)
    is_equal = len(values) == len(expected) and all(map(torch.equal, values, expected))
    turns = [(pipeline.milliseconds(plain), pipeline.milliseconds(fitted)) for _ in range(rounds)]
    before, after = (statistics.median(times) for times in zip(*turns, strict=True))
    peaks = [plan.peak for plan in fitted.memory_analysis()]
    on_paper, fitted_on_paper = simulated((plain, fitted), pipeline.batch)
    return {
        "equal": all(cg.allgather(is_equal)),
        "kept": max(peaks) <= limit,
        "peak": pipeline.peak_error(fitted),
        "more": after / before,
        "paper": fitted_on_paper / on_paper,
        "step": before / on_paper,
        "turns": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--families", nargs="+", default=["gpt2", "qwen2"])
    add("--layers", nargs="+", type=int, default=[8, 32])
    add("--width", type=int, default=128, help="of the models")
    add("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    add("--shares", nargs="+", type=float, default=[0.5, 0.25], help="of what 1F1B saves")
    add("--rounds", type=int, default=7, help="timed executions of each step")
    add("--json", type=Path, metavar="FILE", help="with a row for each case")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for family in args.families:
        for layers in args.layers:
            limits = {share: limit_of(family, layers, args.width, share) for share in args.shares}
            for schedule in args.schedules:
                for share, limit in limits.items():
                    case = {
                        "family": family,
                        "layers": layers,
                        "schedule": schedule,
                        "share": share,
                    }
                    pipeline = Pipeline(family, layers, args.width, schedule)
                    row = case | compared(pipeline, limit, args.rounds)
                    rows.append(row)
                    if cg.rank() == 0:
                        shown = {k: v for k, v in row.items() if k != "turns"}
                        print(*(f"{k} {_short(v)}" for k, v in shown.items()), flush=True)
    if cg.rank() == 0 and args.json:
        record = provenance() | {"rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def _short(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
