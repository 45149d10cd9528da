"""The engine of examples/serve against transformers: a decode step, groups in flight, batching.

    python benchmarks/serving/engine.py                        # one rank: `step` and `batching`
    python benchmarks/serving/engine.py --fuse                 # the same with TorchInductor
    python -m cg.launch -n 2 benchmarks/serving/engine.py      # two ranks: `groups`
    python -m cg.launch -n 2 benchmarks/serving/engine.py --model DIR --layers 15 15

The model is a tiny Qwen2 of random weights (4 layers of 256, 3.95 million parameters), in float32
on one thread. Arms take turns in one process, and medians of the rounds are printed, with the ratio
in each round beside them: a machine that is slow for a while is slow for both.

- `step`: CPU time of a decode step of B rows, against `generate` with its own cache. The time of a
  prompt is taken off: that of 2 tokens from that of `steps` + 2.
- `batching`: tokens a second of many requests, against `generate_batch` with a persistent manager.
- `groups`: tokens a second of two groups of B rows in flight, against one group; of another model
  if it is given, with as many layers in each stage as is said. CPU of each rank for an execution
  goes with it: where other processes have the cores, ranks sleep instead of polling, and the sum of
  these times over the largest is what two groups would gain on free cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.generation import ContinuousBatchingConfig

import cg

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.serve.engine import CgEngine, start
from examples.serve.requests import GREEDY
from examples.serve.settings import Options
from examples.serve.weights import Drawn
from examples.serve.work import POSITION, SLOT, TABLE, TOKEN, Chunk, Decode, Prefill, Rows

PROMPT = 32


def config() -> Qwen2Config:
    return Qwen2Config(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=688,
        vocab_size=4096,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )


def rival() -> Any:
    """The same model, as transformers runs it."""
    model = Qwen2ForCausalLM(config()).eval()
    weights = Drawn(0, model.config.initializer_range)
    model.load_state_dict(weights.load(dict(model.named_parameters()), torch.float32))
    return model


def options(batch: int, fuse: str | None) -> Options:
    """Tables of half and of all of 128 tokens, and one batch size, so that warming is short."""
    return Options(
        batches=(batch,), chunks=(PROMPT,), blocks=1 + 8 * 2 * batch, widths=(4, 8), context=128,
        fuse=fuse,
    )  # fmt: skip


def blocks_of(row: int) -> tuple[int, ...]:
    return tuple(range(1 + 8 * row, 9 + 8 * row))


def prefill_of(prompt: list[int], row: int, start: int = 0, last: bool = True) -> Prefill:
    return Prefill((Chunk(prompt, start, blocks_of(row), last, GREEDY),))


def rows_of(batch: int, first: int = 0) -> Rows:
    """Rows of a decode batch behind prompts, which have the blocks of the rows from `first` on."""
    rows = np.zeros((batch, TABLE + 8), np.int64)
    rows[:, TOKEN], rows[:, POSITION], rows[:, SLOT] = -1, PROMPT, np.arange(batch)
    rows[:, TABLE:] = [blocks_of(first + row) for row in range(batch)]
    return rows


# -- one rank -----------------------------------------------------------------------------------


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(4096, (count, PROMPT), generator=generator).tolist()


def our_step(engine: CgEngine, batch: int, steps: int) -> tuple[float, list[list[int]]]:
    """CPU seconds of a decode step, two executions in flight, and the tokens of each prompt."""
    firsts = [
        engine.submit(prefill_of(prompt, i)).result()[0] for i, prompt in enumerate(prompts(batch))
    ]
    began = time.process_time()
    results = []
    rows = rows_of(batch)
    rows[:, TOKEN] = firsts
    for _ in range(steps):
        results.append(engine.submit(Decode(0, rows)))
        rows[:, TOKEN] = -1
        rows[:, POSITION] += 1
    out = [result.result() for result in results]
    seconds = (time.process_time() - began) / steps
    return seconds, [
        [first, *row] for first, row in zip(firsts, zip(*out, strict=True), strict=True)
    ]


def their_step(model: Any, batch: int, steps: int) -> tuple[float, list[list[int]]]:
    """The same of `generate`."""
    ids = torch.tensor(prompts(batch))

    def run(count: int) -> tuple[float, Any]:
        began = time.process_time()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return time.process_time() - began, out[:, PROMPT:]

    short, _ = run(2)
    long, out = run(steps + 2)
    return (long - short) / steps, out[:, : steps + 1].tolist()


def step_section(engine: CgEngine, model: Any, batch: int, rounds: int) -> dict[str, Any]:
    steps = 64
    ours, theirs = [], []
    for turn in range(rounds + 1):
        mine, my_tokens = our_step(engine, batch, steps)
        other, their_tokens = their_step(model, batch, steps)
        if not turn:  # libraries and caches warm up
            continue
        ours.append(mine * 1e3)
        theirs.append(other * 1e3)
    return report(
        f"decode step, B = {batch}, CPU ms", "engine", ours, "generate", theirs,
        same_tokens=agreement(my_tokens, their_tokens),
    )  # fmt: skip


def serve_all(engine: CgEngine, batch: int, new: int, work: list[list[int]]) -> list[list[int]]:
    """A scheduler as small as can be: a slot takes the next prompt as soon as it is free."""
    waiting = list(enumerate(work))
    out: list[list[int]] = [[] for _ in work]
    slots: dict[int, int] = {}
    table = rows_of(batch)
    while waiting or slots:
        for slot in range(batch):
            if slot not in slots and waiting:
                index, prompt = waiting.pop(0)
                out[index] += engine.submit(prefill_of(prompt, slot)).result()
                slots[slot] = index
        rows = table[list(slots)]
        rows[:, TOKEN] = [out[index][-1] for index in slots.values()]
        rows[:, POSITION] += [len(out[index]) - 1 for index in slots.values()]
        for (slot, index), token in zip(
            tuple(slots.items()), engine.submit(Decode(0, rows)).result(), strict=True
        ):
            out[index].append(token)
            if len(out[index]) == new:
                del slots[slot]
    return out


def batching_section(engine: CgEngine, model: Any, batch: int, rounds: int) -> dict[str, Any]:
    new, work = 48, prompts(4 * batch)
    generation = GenerationConfig(
        max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        page_size=16, num_blocks=8 * 2 * batch, max_batch_tokens=PROMPT * batch,
        max_requests_per_batch=batch, use_cuda_graph=False,
    )  # fmt: skip

    def theirs() -> list[list[int]]:
        got = model.generate_batch(
            work,
            generation_config=generation,
            continuous_batching_config=batching,
            persistent_manager=True,
        )
        return [each.generated_tokens for _, each in sorted(got.items(), key=_number)]

    def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
        began = time.perf_counter()
        result = run()
        return time.perf_counter() - began, result

    mine, other, same = [], [], 0.0
    for turn in range(rounds + 1):
        ours, tokens = seconds(lambda: serve_all(engine, batch, new, work))
        their, their_tokens = seconds(theirs)
        if not turn:
            continue
        pairs = [
            p for a, b in zip(tokens, their_tokens, strict=True) for p in zip(a, b, strict=False)
        ]
        same = sum(a == b for a, b in pairs) / (new * len(work))
        mine.append(new * len(work) / ours)
        other.append(new * len(work) / their)
    return report(
        f"{len(work)} requests of {PROMPT} + {new}, {batch} at a time, tokens/s",
        "engine", mine, "generate_batch", other, same_tokens=same,
    )  # fmt: skip


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of tokens that are equal; 1 unless two logits are nearly so."""
    return float((torch.tensor(ours) == torch.tensor(theirs)).float().mean())


def _number(item: tuple[str, Any]) -> int:
    return int(item[0].rpartition("_")[2])


# -- two ranks ----------------------------------------------------------------------------------


def groups_section(engine: CgEngine, batch: int, rounds: int, pids: list[int]) -> dict[str, Any]:
    steps = 60

    def tokens_per_second(groups: int) -> float:
        for group in range(groups):
            for i, prompt in enumerate(prompts(batch)):
                engine.submit(prefill_of(prompt, group * batch + i)).result()
        began = time.perf_counter()
        results = []
        tables = [rows_of(batch, group * batch) for group in range(groups)]
        for _ in range(steps):
            for group, rows in enumerate(tables):
                results.append(engine.submit(Decode(group, rows)))
                rows[:, POSITION] += 1
        for result in results:
            result.result()
        return groups * batch * steps / (time.perf_counter() - began)

    one, two = [], []
    spent = [0.0] * len(pids)
    for turn in range(rounds + 1):
        single = tokens_per_second(1)
        before = [cpu(pid) for pid in pids]
        double = tokens_per_second(2)
        if turn:
            one.append(single)
            two.append(double)
            spent = [s + cpu(p) - b for s, p, b in zip(spent, pids, before, strict=True)]
    each = {f"rank_{r}_cpu_ms": s / (2 * steps * rounds) * 1e3 for r, s in enumerate(spent)}
    return report(f"B = {batch} a group, tokens/s", "two groups", two, "one group", one, **each)


def _processes() -> list[int]:
    """The process of each rank; collective."""
    from mpi4py import MPI  # a single rank is to be measured without it

    return MPI.COMM_WORLD.allgather(os.getpid())


def cpu(pid: int) -> float:
    """Seconds of a process, in user mode and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(
    what: str, mine: str, ours: list[float], other: str, theirs: list[float], **more: float
) -> dict[str, Any]:
    """Print and return medians, and the median and the range of the ratios of the rounds."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    found = {
        "what": what,
        mine: statistics.median(ours),
        other: statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "rounds": len(ratios),
        **more,
    }
    rest = "".join(f", {name} {value:.3f}" for name, value in more.items())
    print(
        f"{what}: {mine} {found[mine]:.2f}, {other} {found[other]:.2f}; ratio "
        f"{found['ratio']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} rounds){rest}",
        flush=True,
    )
    return found


def sections(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    fuse = "inductor" if args.fuse else None
    pids = _processes() if cg.world_size() > 1 else []
    for batch in args.batch:
        cut = tuple(args.layers) if args.layers else None
        engine = start(args.model or config(), replace(options(batch, fuse), layers=cut))
        if engine is None:
            continue
        if cg.world_size() == 1:
            model = rival()
            yield step_section(engine, model, batch, args.rounds)
            if "batching" in args.sections:
                yield batching_section(engine, model, batch, args.rounds)
        else:
            yield groups_section(engine, batch, args.rounds, pids)
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sections", default="step,batching", help="of one rank")
    parser.add_argument("--fuse", action="store_true", help="compile with fuse='inductor'")
    parser.add_argument("--model", type=Path, help="a folder, of two ranks")
    parser.add_argument("--layers", type=int, nargs="+", help="of each stage, of two ranks")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = list(sections(args))
    if args.json and cg.rank() == 0:
        args.json.write_text(json.dumps({"fuse": args.fuse, "figures": found}, indent=1))


if __name__ == "__main__":
    main()
