"""nano-vllm's benchmark through the engine of examples/serve, without a front."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import nano
import torch

from examples.serve.engine import CgEngine, start
from examples.serve.requests import Request
from examples.serve.scheduler import Scheduler
from examples.serve.settings import Options
from examples.serve.tickets import Ticket

from .bench import OneGpu
from .qwen2 import REAL, SMALL


def requests(drawn: Sequence[tuple[tuple[int, ...], int]]) -> list[Request]:
    """Greedy requests with these prompts, for so many tokens."""
    return [
        Request(number, prompt, output, ignore_eos=True)
        for number, (prompt, output) in enumerate(drawn)
    ]


def offline(bench: OneGpu) -> None:
    """Output tokens a second, all requests at once, greedy, in float16.

    `--only fused` compiles the model by TorchInductor, for fewer sizes of batches.
    """
    sizes = SMALL if bench.is_small else REAL
    load = nano.SMALL if bench.is_small else nano.REAL
    work = requests(load.draw())
    fuse = bench.fuse if "fused" in bench.only else None
    options = Options(
        groups=1,
        batches=load.fused_batches if fuse else load.batches,
        chunks=(load.chunk,),
        prompt_tokens=load.prompt_tokens,
        blocks=load.blocks,
        block_size=load.block_size,
        context=load.context,
        widths=(),  # kernels of devices read no further than a row is long
        fuse=fuse,
        dtype=torch.float16 if bench.is_gpu else torch.float32,
        draws=False,
    )
    with bench.timed("the engine, its graphs captured"):
        engine = start(sizes.config(load.context), options)
    assert engine is not None, "there is one rank"
    _serve(engine, requests(load.warm_up()), 60.0)
    for turn in range(max(1, bench.rounds)):
        if turn and bench.left < 30.0:
            break
        _report(bench, work, *_serve(engine, work, max(20.0, bench.left)))
    engine.close()
    del engine
    bench.free()


def _serve(engine: CgEngine, work: list[Request], limit: float) -> tuple[Scheduler, float, float]:
    """Serve requests, for so many seconds at most; the seconds, and those in which it waited."""
    scheduler = Scheduler(engine.limits)
    for request in work:
        scheduler.add(request)
    under_way: deque[tuple[Ticket, Any]] = deque()
    waited = 0.0
    began = time.perf_counter()
    while not scheduler.is_idle or under_way:
        if time.perf_counter() - began < limit:
            for ticket in scheduler.schedule():
                under_way.append((ticket, engine.submit(ticket.work)))
        elif not under_way:
            break
        ticket, result = under_way.popleft()
        asked = time.perf_counter()
        drawn = result.result()
        waited += time.perf_counter() - asked
        scheduler.complete(ticket, drawn)
        scheduler.take_events()
    return scheduler, time.perf_counter() - began, waited


def _report(
    bench: OneGpu, work: list[Request], scheduler: Scheduler, seconds: float, waited: float
) -> None:
    stats, note = scheduler.stats, bench.report.note
    wanted = sum(request.max_tokens for request in work)
    whole = stats.generated_tokens == wanted
    note("serving", "output tokens a second", stats.generated_tokens / seconds, "tokens/s")
    note("serving", "output tokens" if whole else "output tokens; the time was up, of all "
         f"{wanted}", stats.generated_tokens, "", whole=whole)  # fmt: skip
    note("serving", "seconds", seconds, "s")
    note("serving", "in which the host waited for tokens", waited / seconds * 100, "%")
    note("serving", "decode steps", stats.decodes, "", rows=stats.rows)
    note("serving", "rows of a decode step, on average", stats.rows / max(1, stats.decodes), "")
    note("serving", "prefill chunks", stats.chunks, "", preemptions=stats.preemptions)
