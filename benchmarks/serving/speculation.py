"""Tokens a second of one request in two stages, with proposals and without.

    python -m cg.launch -n 2 benchmarks/serving/speculation.py            # 0.6 of 4 proposals right
    python -m cg.launch -n 2 benchmarks/serving/speculation.py --count    # steps and tokens alone

The model is a Qwen2 of random weights, in float32 on one thread a rank. Proposals are constructed:
each is the token that the request draws, with the probability `--right`, and else another one. They
cost nothing, so the ratio is what verification gives at that share: the most that a draft can
reach. Arms take turns in one process, and medians of the rounds are printed, with the ratio in each
round beside them.

A step gives one token more than were right, up to the first that was not: on average
(1 - a ** (k + 1)) / (1 - a) for a share a of k proposals. How many it was is printed beside that.
Tokens are compared; a run in which they differ ends with an error.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.serve.engine import CgEngine, start
from examples.serve.ngram import Propose
from examples.serve.requests import Request
from examples.serve.scheduler import Scheduler
from examples.serve.settings import Options

PROMPT = tuple(range(100, 132))
CONTEXT, SIZE = 512, 16


def config(layers: int, hidden: int) -> Qwen2Config:
    return Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        intermediate_size=3 * hidden,
        vocab_size=8192,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )


def options(tokens: int) -> Options:
    """For one row, with tables of one length: a variant for each kind of work."""
    return Options(
        groups=1, batches=(1,), chunks=(len(PROMPT),), blocks=1 + CONTEXT // SIZE, block_size=SIZE,
        widths=(), late=True, draws=False, draft_tokens=tokens,
    )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One request: its tokens, the steps behind the first token, their seconds, and proposals."""

    tokens: list[int]
    steps: int
    seconds: float
    proposed: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens a second behind the first."""
        return (len(self.tokens) - 1) / self.seconds


def serve(engine: CgEngine, count: int, proposes: Callable[[Request], Propose] | None) -> Run:
    """Serve one request of so many tokens.

    Args:
        proposes: of the scheduler; without, steps are plain, and two are in flight.
    """
    limits = engine.limits
    if proposes is None:
        scheduler = Scheduler(replace(limits, draft_tokens=0))
    else:
        scheduler = Scheduler(limits, None, proposes)
    scheduler.add(Request(0, PROMPT, count, salt=b"own"))
    under_way: deque[Any] = deque()
    tokens: list[int] = []
    began = 0.0
    while not scheduler.is_idle:
        for ticket in scheduler.schedule():
            under_way.append((ticket, engine.submit(ticket.work)))
        ticket, result = under_way.popleft()
        drawn = result.result()
        scheduler.complete(ticket, drawn, counts=result.counts())
        tokens += scheduler.take_events().pairs[1::2]
        began = began or time.perf_counter()
    seconds = time.perf_counter() - began
    for _, result in under_way:  # behind the end
        result.result()
    counts = scheduler.speculation
    return Run(
        tokens, scheduler.stats.decodes, seconds, counts.draft_tokens, counts.accepted_tokens
    )


def constructed(
    right: list[int], share: float, vocabulary: int, seed: int
) -> Callable[[Request], Propose]:
    """Proposals of which a share is right, each by itself."""
    chance = random.Random(seed)

    def propose(known: Any, most: int) -> list[int]:
        first = len(known) - len(PROMPT)
        return [
            token if chance.random() < share else (token + 1) % vocabulary
            for token in right[first : first + most]
        ]

    return lambda request: propose


def measure(engine: CgEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Run the arms in turns; the first round warms them up."""
    plain: list[Run] = []
    proposing: list[Run] = []
    right = serve(engine, args.tokens, None).tokens
    for turn in range(args.rounds + 1):
        proposes = constructed(right, args.right, engine.limits.vocabulary, turn)
        pair = serve(engine, args.tokens, None), serve(engine, args.tokens, proposes)
        if any(run.tokens != right for run in pair):
            raise SystemExit("tokens differ between the arms")
        if turn:
            plain.append(pair[0])
            proposing.append(pair[1])
    a, k = args.right, args.draft_tokens
    steps = sum(run.steps for run in proposing)
    report = {
        "proposals": k,
        "right": a,
        "tokens_per_step": sum(len(run.tokens) - 1 for run in proposing) / steps,
        "expected_tokens_per_step": (1 - a ** (k + 1)) / (1 - a) if a < 1 else k + 1,
        "steps": steps / args.rounds,
        "plain_steps": plain[0].steps,
        "accepted": sum(run.accepted for run in proposing) / sum(run.proposed for run in proposing),
    }
    print(
        f"{args.tokens} tokens: {report['steps']:.1f} steps for {report['plain_steps']}; "
        f"{report['tokens_per_step']:.2f} tokens a step, expected are "
        f"{report['expected_tokens_per_step']:.2f}; {report['accepted']:.2f} of proposals accepted",
        flush=True,
    )
    if not args.count:
        ratios = sorted(b.rate / a.rate for a, b in zip(plain, proposing, strict=True))
        report |= {
            "plain": statistics.median(run.rate for run in plain),
            "proposing": statistics.median(run.rate for run in proposing),
            "ratio": statistics.median(ratios),
            "least": ratios[0],
            "most": ratios[-1],
            "rounds": args.rounds,
        }
        print(
            f"tokens/s: {report['proposing']:.1f} with proposals, {report['plain']:.1f} without; "
            f"ratio {report['ratio']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f} in {args.rounds} "
            "rounds)",
            flush=True,
        )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--right", type=float, default=0.6, help="share of proposals")
    parser.add_argument("--draft-tokens", type=int, default=4, help="proposed at a time")
    parser.add_argument("--tokens", type=int, default=256, help="of the request")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--count", action="store_true", help="print no times")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = start(config(args.layers, args.hidden), options(args.draft_tokens))
    if engine is None:
        return
    report = measure(engine, args)
    engine.close()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
