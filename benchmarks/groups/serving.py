"""The engine of examples/serve on two GPUs, in two stages and by tensor parallelism.

Qwen2.5-0.5B's shapes of random weights, in float16 on GPUs. No front takes part: requests go to the
scheduler, in the process of the engine's first rank.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from one_gpu.qwen2 import REAL, SMALL

from examples.serve.engine import CgEngine, start
from examples.serve.requests import GREEDY, Request
from examples.serve.scheduler import Scheduler
from examples.serve.settings import Options
from examples.serve.tickets import Ticket
from examples.serve.work import POSITION, SLOT, TABLE, TOKEN, Chunk, Decode, Prefill, Rows

from .bench import Bench

BATCH, STEPS, PROMPT, BLOCK = 8, 200, 32, 16
"""Rows of a group, its decode steps in a turn, tokens of their prompts, tokens of a block."""
IN, OUT, RATE, REQUESTS = 233, 218, 4.0, 40
"""Of the requests that come one by one: tokens, arrivals a second, and how many there are."""


def serving(bench: Bench) -> None:
    """Tokens a second of one and of two groups; times to first tokens of requests that arrive."""
    for tp, name in ((1, "two stages"), (2, "tensor parallel")):
        _groups(bench, tp, name)
        _arrivals(bench, tp, name)


def _engine(bench: Bench, tp: int, context: int, rows: int, **more: Any) -> CgEngine | None:
    """The engine, on rank 0; on the other rank None, once rank 0 has closed it."""
    sizes = SMALL if bench.is_small else REAL
    options = Options(
        blocks=1 + rows * (context // BLOCK),
        block_size=BLOCK,
        context=context,
        widths=() if bench.is_gpu else (context // BLOCK,),
        dtype=torch.float16 if bench.is_gpu else torch.float32,
        draws=False,
        tp=tp,
        **more,
    )
    return start(sizes.config(context), options)


def _groups(bench: Bench, tp: int, name: str) -> None:
    context = 256
    engine = _engine(bench, tp, context, 2 * BATCH, groups=2, batches=(BATCH,), chunks=(PROMPT,))
    if engine is None:
        return
    found = [[_tokens_a_second(engine, groups, context) for groups in (1, 2)]
             for _ in range(1 + bench.rounds)][1:]  # fmt: skip
    engine.close()
    (one, _), (two, busy) = (
        map(statistics.median, zip(*column, strict=True)) for column in zip(*found, strict=True)
    )
    note = bench.report.note
    note("serving", f"{name}, B = {BATCH}, a token of one group", BATCH / one * 1e3, "ms")
    note("serving", f"{name}, B = {BATCH}, one group", one, "tokens/s")
    note("serving", f"{name}, B = {BATCH}, two groups", two, "tokens/s")
    note("serving", f"{name}, two groups / one", two / one, "x")
    note("serving", f"{name}, two groups, while the driver starts steps", busy * 100, "%")


def _tokens_a_second(engine: CgEngine, groups: int, context: int) -> tuple[float, float]:
    """Tokens a second, and the share of the time for which the driver starts steps.

    It waits for none of them before it has started all, so with a share near 1 the host is what
    takes the time.
    """
    width = context // BLOCK
    tables = [_rows(group, width) for group in range(groups)]
    for table in tables:
        for row in table:
            chunk = Chunk([7] * PROMPT, 0, tuple(row[TABLE:].tolist()), True, GREEDY)
            engine.submit(Prefill((chunk,))).result()
    gc.collect()
    gc.freeze()  # as the server does: a collection among the steps is none of theirs
    began = time.perf_counter()
    results = []
    for _ in range(STEPS):
        for group, table in enumerate(tables):
            results.append(engine.submit(Decode(group, table)))
            table[:, POSITION] += 1
    started = time.perf_counter() - began
    for result in results:
        result.result()
    took = time.perf_counter() - began
    return groups * BATCH * STEPS / took, started / took


def _rows(group: int, width: int) -> Rows:
    """A group's rows behind their prompts, each with blocks of its own."""
    rows = np.zeros((BATCH, TABLE + width), np.int64)
    rows[:, TOKEN], rows[:, POSITION], rows[:, SLOT] = -1, PROMPT, np.arange(BATCH)
    first = 1 + group * BATCH * width
    rows[:, TABLE:] = np.arange(first, first + BATCH * width).reshape(BATCH, width)
    return rows


def _arrivals(bench: Bench, tp: int, name: str) -> None:
    engine = _engine(bench, tp, 512, REQUESTS, batches=(1, 2, 4, 8), chunks=(256,))
    if engine is None:
        return
    draw = random.Random(0)
    wait, arrivals = 0.0, []
    for _ in range(REQUESTS):
        wait += draw.expovariate(RATE)
        arrivals.append(wait)
    first, last = _serve(engine, arrivals)
    engine.close()
    waits = [(first[number] - at) * 1e3 for number, at in enumerate(arrivals)]
    between = [(last[number] - first[number]) / (OUT - 1) * 1e3 for number in first]
    note, what = bench.report.note, f"{name}, {RATE:.0f} requests/s of {IN} + {OUT} tokens"
    note("serving", f"{what}, TTFT p50", statistics.median(waits), "ms")
    note("serving", f"{what}, TTFT p90", statistics.quantiles(waits, n=10)[-1], "ms")
    note("serving", f"{what}, TPOT p50", statistics.median(between), "ms")


def _serve(engine: CgEngine, arrivals: list[float]) -> tuple[dict[int, float], dict[int, float]]:
    """Serve requests as they arrive; when each one's first and last token were there."""
    scheduler = Scheduler(engine.limits)
    waiting = deque(enumerate(arrivals))
    under_way: deque[tuple[Ticket, Any]] = deque()
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    began = time.perf_counter()
    while waiting or under_way or not scheduler.is_idle:
        now = time.perf_counter() - began
        while waiting and waiting[0][1] <= now:
            number, _ = waiting.popleft()
            prompt = tuple((number + token) % 500 for token in range(IN))
            scheduler.add(Request(number, prompt, OUT, ignore_eos=True))
        for ticket in scheduler.schedule():
            under_way.append((ticket, engine.submit(ticket.work)))
        if under_way:
            ticket, result = under_way.popleft()
            scheduler.complete(ticket, result.result())
            now = time.perf_counter() - began
            for number in scheduler.take_events().pairs[::2]:
                first.setdefault(number, now)
                last[number] = now
        elif waiting:
            time.sleep(max(0.0, min(5e-4, waiting[0][1] - now)))
    return first, last
