"""The training that both sides share: options of an arm, batches, the loss, and the optimizer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from .shapes import SHAPES, Shape

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from texts import Texts, documents  # noqa: E402 (an example, and found by the line above)

RATE, BETAS, DECAY, CLIP = 2e-5, (0.9, 0.95), 0.0, 1.0
IGNORED = -100
"""The label of a token behind which nothing is known."""


def options(description: str | None) -> argparse.ArgumentParser:
    """Those of a program that runs an arm."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a folder with weights and a tokenizer")
    add("--shape", choices=sorted(SHAPES), required=True)
    add("--microbatches", type=int, required=True)
    add("--steps", type=int, required=True, help="that are timed")
    add("--warm", type=int, required=True, help="of them, that do not count")
    add("--profiled", type=int, required=True, help="steps behind those, in torch's profiler")
    add("--began", type=float, required=True, help="when the arm was started, Unix time")
    add("--result", type=Path, required=True, help="the file that rank 0 writes")
    return parser


def windows(shape: Shape, steps: int) -> int:
    """Sequences to read, so that none comes twice."""
    return (steps * shape.batch * 20 + 18) // 19 + 1  # a twentieth is held out


def batches(args: argparse.Namespace) -> list[Tensor]:
    """Of each step, int64 [batch, length]: those that examples/finetune.py trains on."""
    shape: Shape = SHAPES[args.shape]
    steps = args.steps + args.profiled
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    texts = Texts.of(documents([]), tokenizer, shape.length, windows(shape, steps))
    return [texts.batch(step, shape.batch, seed=0) for step in range(steps)]


def trainers(parameters: Iterable[Any], rate: float, decay: float, steps: int) -> tuple[Any, Any]:
    """AdamW as one kernel, and a learning rate that stays; of the form of the example's."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=BETAS, weight_decay=decay, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean negative log likelihood of each token behind those before it, nats."""
    labels = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
