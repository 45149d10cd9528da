"""How long decode steps take while variants are compiled behind, and how long requests wait.

    python benchmarks/serving/steps_beside.py                     # a small model on a host
    python benchmarks/serving/steps_beside.py --model DIR --batch 256 --dtype bfloat16 --variants 8

An engine takes decode steps, two in flight, and as soon as it may goes on with a variant, as the
server does in idle moments. Variants take turns in how soon threads give way to each other: with
Python's own interval, and with the server's. Steps are told apart by what is done beside them:
nothing, or kernels by a compiler in a thread. Nothing is decoded in a slice of making a variant.
TorchInductor's cache is an empty folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

BLOCKS = 8
"""Blocks of a row, of 16 tokens each."""


class Steps:
    """Decode steps of all rows, two in flight; each is at the same position."""

    def __init__(self, engine: Any, batch: int) -> None:
        from examples.serve.work import POSITION, SLOT, TABLE, TOKEN

        self._engine = engine
        rows = np.zeros((batch, TABLE + BLOCKS), np.int64)
        rows[:, TOKEN], rows[:, POSITION], rows[:, SLOT] = -1, 32, np.arange(batch)
        rows[:, TABLE:] = 1 + np.arange(batch * BLOCKS).reshape(batch, BLOCKS)
        self._rows = rows
        self._last = self._submit()

    def _submit(self) -> Any:
        from examples.serve.work import Decode

        return self._engine.submit(Decode(0, self._rows))

    def take(self, count: int = 1) -> list[float]:
        """The seconds of some steps, from result to result."""
        seconds = []
        for _ in range(count):
            began = perf_counter()
            following = self._submit()
            self._last.result()
            self._last = following
            seconds.append(perf_counter() - began)
        return seconds


def line(name: str, seconds: Sequence[float]) -> str:
    if not seconds:
        return f"{name:42} none"
    ordered = sorted(1e3 * second for second in seconds)
    p99 = ordered[99 * len(ordered) // 100]
    p50 = statistics.median(ordered)
    return (
        f"{name:42} {len(ordered):6} p50 {p50:8.2f} ms, p99 {p99:8.2f}, longest {ordered[-1]:8.2f}"
    )


def start(args: argparse.Namespace) -> Any:
    import torch
    from transformers import Qwen2Config

    from examples.serve import engine
    from examples.serve.settings import Options

    tiny = Qwen2Config(
        num_hidden_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, vocab_size=1024, max_position_embeddings=256,
        tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    sizes = [args.batch >> shift for shift in range(3, -1, -1) if args.batch >> shift]
    options = Options(
        batches=tuple(sizes), chunks=(32, args.chunk), widths=(BLOCKS,), context=BLOCKS * 16,
        blocks=1 + BLOCKS * args.batch, fuse=None if args.fuse == "none" else args.fuse,
        late=True, dtype=getattr(torch, args.dtype),
    )  # fmt: skip
    return engine.start(args.model or tiny, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder of transformers; else a random model of 4 layers")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--fuse", default="inductor", choices=("inductor", "none"))
    parser.add_argument("--variants", type=int, default=4)
    args = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder.name, "CG_CACHE": ""}

    from examples.serve.ranks import SWITCH

    engine = start(args)
    intervals = {"Python's interval": sys.getswitchinterval(), "the server's interval": SWITCH}
    steps, seconds = Steps(engine, args.batch), defaultdict[str, list[float]](list)
    steps.take(20)
    for number in range(args.variants):
        if not engine.due(idle=True):
            break  # there are no others
        name = list(intervals)[number % 2]
        sys.setswitchinterval(intervals[name])
        seconds[f"a step, {name}"] += steps.take(100)
        is_complete, began = False, perf_counter()
        while not is_complete:
            if engine.due(idle=True):
                before = perf_counter()
                is_complete = engine.improve()
                seconds["a slice, which requests wait for"].append(perf_counter() - before)
                steps.take(2)
            else:
                seconds[f"a step beside kernels, {name}"] += steps.take()
        seconds[f"a variant, {name}"].append(perf_counter() - began)
    for name in sorted(seconds):
        print(line(name, seconds[name]))
    engine.close()


if __name__ == "__main__":
    main()
