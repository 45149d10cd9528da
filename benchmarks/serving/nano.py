"""The load of nano-vllm's benchmark, and the options of engines and servers that it is given to."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Nano:
    """The sizes of the load, and of an engine for it.

    Attributes:
        requests: how many, all at once.
        shortest, longest: tokens of a prompt, and of an output.
        ids: prompts are of ids up to this one.
        batches: sizes of decode batches.
        fused_batches: the same where TorchInductor compiles them: fewer, for a variant takes it
            half a minute.
        chunk: tokens of a prefill chunk.
        prompt_tokens: of the prompts of one prefill.
        block_size: tokens of a block.
        context: tokens of a sequence, at most.
    """

    requests: int = 256
    shortest: int = 100
    longest: int = 1024
    ids: int = 10_000
    batches: tuple[int, ...] = (16, 64, 128, 192, 256)
    fused_batches: tuple[int, ...] = (64, 256)
    chunk: int = 1024
    prompt_tokens: int = 16 * 1024
    block_size: int = 64
    context: int = 2048

    @property
    def blocks(self) -> int:
        """As many as all requests need at their longest, and the trash."""
        return 1 + self.requests * self.context // self.block_size

    def draw(self) -> list[tuple[tuple[int, ...], int]]:
        """Prompts, and tokens to draw, as nano-vllm's bench.py draws them with seed 0."""
        return self._draw(self.requests, self.shortest, self.longest)

    def warm_up(self) -> list[tuple[tuple[int, ...], int]]:
        """A few short requests, so that what is not warm yet is met before a clock runs."""
        return self._draw(4, 4, 20)

    def _draw(self, count: int, shortest: int, longest: int) -> list[tuple[tuple[int, ...], int]]:
        """Ids first, then lengths of outputs."""
        draw = random.Random(0)
        prompts = [
            tuple(draw.randint(0, self.ids) for _ in range(draw.randint(shortest, longest)))
            for _ in range(count)
        ]
        return [(prompt, draw.randint(shortest, longest)) for prompt in prompts]


REAL = Nano()
SMALL = Nano(5, 4, 20, 200, (2, 4), (2, 4), 32, 4 * 32, 16, 64)
"""For trials on hosts."""


def server(model: Path, nano: Nano, dtype: str, fuse: str | None = None) -> list[str]:
    """The command of a server on one rank that is like the engine of the offline section.

    Args:
        model: a folder.
        fuse: as `--fuse` takes it.
    """
    batches = nano.fused_batches if fuse else nano.batches
    given: dict[str, int | str | Sequence[int]] = {
        "-n": 1,
        "--port": 0,
        "--model": str(model),
        "--dtype": dtype,
        "--groups": 1,
        "--batch": batches[-1],
        "--batches": batches[:-1],
        "--chunk": nano.chunk,
        "--chunks": (),
        "--prompt-tokens": nano.prompt_tokens,
        "--blocks": nano.blocks,
        "--block-size": nano.block_size,
        "--context": nano.context,
    }
    given["--fuse"] = fuse or "none"
    line = [sys.executable, "-m", "examples.serve", "--ahead"]
    for name, value in given.items():
        line.append(name)
        line += [str(value)] if isinstance(value, int | str) else map(str, value)
    return line
