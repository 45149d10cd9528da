"""The engine's job with the fake engine: `python fake_rank.py OPTIONS SOCKET`.

Prompts can ask for trouble, by their first token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from examples.serve import features as switches
from examples.serve.loop import EngineLoop
from examples.serve.pooling.pooling_loop import PoolingLoop
from examples.serve.structure.vocabulary import vocabulary
from examples.serve.transports import loop_factory
from examples.serve.work import Decode, Prefill
from tests.examples.serve.fake_engine import ROOMY, FakeEngine
from tests.examples.serve.fake_pooling import FakePoolingEngine

FAILS, EXHAUSTS, DIES, HANGS = 255, 254, 253, 252
"""First tokens of prompts whose prefill raises, lacks memory, ends the process, never ends."""


def first_of(work: Decode | Prefill) -> int:
    """The first token of a prompt that begins, else 0."""
    if isinstance(work, Decode) or work.chunks[0].start:
        return 0
    return int(work.chunks[0].tokens[0])


def trouble(work: Decode | Prefill) -> Exception | None:
    """The exception that the work fails with, as its first token says."""
    first = first_of(work)
    if first == DIES:
        os._exit(9)
    if first == HANGS:
        return NotImplementedError()
    return {FAILS: ValueError("a method has raised"), EXHAUSTS: MemoryError("no memory")}.get(first)


class HangingEngine(FakeEngine):
    """One that runs nothing any more once it has been asked to hang."""

    hangs = False

    def run_one(self) -> None:
        self.hangs |= first_of(self.queue[0].work) == HANGS
        if not self.hangs:
            super().run_one()

    def _tick(self) -> None:
        self.run_one()
        if self.queue and not self.hangs:
            asyncio.get_running_loop().call_later(self.delay or 0.0, self._tick)


def launch(ranks: int) -> None:
    """Return in rank 0 alone; the others wait, and this process does for the end of rank 0.

    It does not look after the others: whoever wants to know of their deaths has to look himself.
    """
    others = []
    for _ in range(1, ranks):
        others.append(os.fork())
        if not others[-1]:
            signal.pause()
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        for each in others:
            os.kill(each, signal.SIGKILL)
            os.waitpid(each, 0)
        os._exit(1)


def main() -> None:
    logging.basicConfig(format="%(message)s")
    options = json.loads(sys.argv[1])
    if options.get("ranks", 1) > 1:
        launch(options["ranks"])
    time.sleep(options.get("slow_start", 0.0))
    limits = replace(ROOMY, **options.get("limits", {}))
    engine = HangingEngine(limits, options.get("delay", 0.0), trouble)
    features = switches.parse(options.get("features", ""))

    async def serve() -> None:
        patience = options.get("patience", 60.0)
        if "recipe" in options:
            pooling = FakePoolingEngine(delay=options.get("delay", 0.0))
            await PoolingLoop(pooling, patience=patience).run(Path(sys.argv[2]))
            return
        loop = EngineLoop(
            engine, features, patience, vocabulary=lambda: vocabulary(None, 256, limits.eos)
        )
        await loop.run(Path(sys.argv[2]))

    with asyncio.Runner(loop_factory=loop_factory(features)) as runner:
        runner.run(serve())


if __name__ == "__main__":
    main()
