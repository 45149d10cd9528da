"""nano-vllm's benchmark as streams of the server of examples/serve, with its front."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nano
import torch
from load import Arrival, Row, run, summarize
from processes import READY, serving

from .bench import OneGpu
from .folder import write
from .qwen2 import REAL, SMALL

CLIENTS = 8
"""Processes that send the requests: one cannot read what a GPU writes."""
LEAST = 60.0
"""Seconds for a round, where the section has fewer left."""
TIMES = (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"))


def online(bench: OneGpu) -> None:
    """Output tokens a second, and times to tokens, all requests at once, greedy, in float16.

    The server has the sizes of the offline section's engine, and variants besides for requests that
    draw tokens or ask for log-probabilities. `--only fused` compiles as there.
    """
    load = nano.SMALL if bench.is_small else nano.REAL
    dtype = torch.float16 if bench.is_gpu else torch.float32
    fuse = bench.fuse if "fused" in bench.only else None
    with tempfile.TemporaryDirectory(prefix="cg-one-gpu-") as folder:
        model, log = Path(folder) / "model", Path(folder) / "log"
        with bench.timed("the folder of the model"):
            write(model, SMALL if bench.is_small else REAL, load.context, dtype)
        command = nano.server(model, load, str(dtype).removeprefix("torch."), fuse)
        with serving(command, "", log, READY) as server:
            bench.report.say(f"  prepared in {server.ready:.1f} s: the server, its graphs captured")
            try:
                _stream(server.url, load.warm_up(), "warm", LEAST)
                found = []
                for turn in range(max(1, bench.rounds)):
                    if turn and bench.left < 30.0:
                        break
                    limit = max(LEAST, bench.left)
                    found.append(_stream(server.url, load.draw(), f"round {turn}", limit))
            except Exception:
                bench.report.say(log.read_text()[-3000:])
                raise
    _report(bench, found)


def _stream(
    url: str, drawn: Sequence[tuple[tuple[int, ...], int]], salt: str, limit: float
) -> dict[str, Any]:
    """The figures of a load.

    Args:
        salt: of this load, which finds nothing in the prefix cache that others have left there.
        limit: seconds.
    """
    trace = [Arrival(0.0, prompt, output) for prompt, output in drawn]
    rows = run(url, trace, processes=CLIENTS, deadline=limit, salt=salt)
    check(rows, trace)
    chunks = sum(1 + len(row.gaps) for row in rows)
    return {**summarize(rows, trace), "chunks": chunks}


def check(rows: Sequence[Row], trace: Sequence[Arrival]) -> None:
    """See to it that each request has got exactly its number of tokens, and text.

    Raises:
        AssertionError: one has not.
    """
    for number, (row, each) in enumerate(zip(rows, trace, strict=True)):
        assert not row.error, f"request {number}: {row.error}"
        assert row.output == each.output, f"request {number}: {row.output} of {each.output} tokens"
        assert row.first is not None, f"request {number}: no text"


def _report(bench: OneGpu, found: Sequence[dict[str, Any]]) -> None:
    """Medians of the rounds, beside which all of them are kept."""

    def note(what: str, values: Sequence[float], unit: str) -> None:
        samples = [round(value, 4) for value in values]
        bench.report.note("server", what, statistics.median(values), unit, samples=samples)

    def column(name: str) -> list[float]:
        return [each[name] for each in found]

    note(
        "through the server, output tokens a second", column("output_tokens_per_second"), "tokens/s"
    )
    note("through the server, output tokens", column("output_tokens"), "")
    note("through the server, seconds", column("seconds"), "s")
    tokens = [each["output_tokens"] / each["chunks"] for each in found]
    note("through the server, tokens of a chunk, on average", tokens, "")
    for key, name in TIMES:
        for quantile in found[0]["ms"][key]:
            values = [each["ms"][key][quantile] for each in found]
            note(f"through the server, {name} {quantile}", values, "ms")
