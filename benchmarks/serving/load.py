"""A load generator for servers with OpenAI's endpoints, with the formulas of vLLM's benchmark.

    python benchmarks/serving/load.py --url http://127.0.0.1:8000 --requests 200 --rate 4
    python benchmarks/serving/load.py --url … --rate inf --scale 0.4 --goodput ttft:200 itl:50
    python benchmarks/serving/load.py --url … --rate inf --requests 256 --processes 8

Arrivals are drawn from a seed: gaps are exponential, or gamma with --burstiness, or none with
`--rate inf`; --scale multiplies them. Prompts are token ids, so no server spends time on text.

One process of Python reads some ten thousand chunks a second. With --processes each of several has
its share of the requests, and all begin at one time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import numpy as np
from clients import LEAD, deal, take

PERCENTILES = (50, 90, 99)
CLIENT = (sys.executable, str(Path(__file__).resolve()), "--client")
"""The command of a process that sends its share of a trace."""
DEADLINE = 3600.0
"""Seconds for a trace."""


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: seconds after the beginning, ids, and how many tokens it draws."""

    at: float
    prompt: tuple[int, ...]
    output: int


Body = Callable[[Arrival], Mapping[str, Any]]
"""Gives the fields of the request of an arrival."""


def body_of(arrival: Arrival) -> dict[str, Any]:
    """The fields by which ids are continued greedily, to as many tokens as are asked for."""
    return {
        "prompt": list(arrival.prompt),
        "max_tokens": arrival.output,
        "temperature": 0,
        "ignore_eos": True,
    }


@dataclass
class Row:
    """The outcome of a request; times are of one monotonic clock."""

    began: float
    first: float | None = None
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between chunks with text
    input: int = 0
    output: int = 0
    error: str = ""
    is_cancelled: bool = False


def lognormal(count: int, mean: float, least: int, most: int, rng: np.random.Generator) -> Any:
    """Lengths with sigma 1 and about that mean, as use of chats is said to be."""
    drawn = rng.lognormal(0.0, 1.0, count)
    return np.clip((drawn * mean / drawn.mean()).round(), least, most).astype(int)


def make_trace(
    count: int,
    seed: int,
    rate: float = math.inf,
    scale: float = 1.0,
    burstiness: float = 1.0,
    lengths: str = "chat",
    means: tuple[float, float] = (232.6, 218.2),
    longest: int = 2048,
    vocabulary: int = 256,
    prefix: int = 0,
) -> list[Arrival]:
    """Draw a trace; the same arguments give the same trace.

    Args:
        rate: requests a second, on average.
        scale: factor on the gaps.
        burstiness: shape of the gamma distribution of gaps; 1 is exponential.
        lengths: `chat` for lognormal ones, `fixed`, or `random` for uniform ones of mean ± half.
        means: of prompts and of outputs, in tokens.
        longest: of prompt and output together.
        vocabulary: ids are below it.
        prefix: tokens that all prompts share.
    """
    rng = np.random.default_rng(seed)
    found: list[Any] = []
    for mean in means:
        if lengths == "fixed":
            found.append(np.full(count, round(mean)))
        elif lengths == "random":
            found.append(rng.integers(max(1, round(mean * 0.5)), round(mean * 1.5) + 1, count))
        else:
            found.append(lognormal(count, mean, 4, longest, rng))
    gaps = np.zeros(count)
    if not math.isinf(rate):
        gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    times = (np.cumsum(gaps) - gaps[0]) * scale
    offsets = rng.integers(0, vocabulary, count)
    shared = (np.arange(prefix) % vocabulary).tolist()
    trace = []
    for i in range(count):
        output = int(min(found[1][i], longest - prefix - 1))
        length = int(min(found[0][i], longest - prefix - output))
        own = ((offsets[i] + i + np.arange(length)) % vocabulary).tolist()
        trace.append(Arrival(float(times[i]), (*shared, *own), output))
    return trace


async def replay(
    url: str,
    trace: Sequence[Arrival],
    *,
    streams: bool = True,
    concurrency: int = 0,
    leaving: Sequence[bool] = (),
    key: str | None = None,
    salt: str = "",
    start: float | None = None,
    body: Body = body_of,
) -> list[Row]:
    """Send a trace; a row for each request, in its order.

    Args:
        streams: whether answers are streamed; without, a request has no first token.
        concurrency: requests at a time; 0: as many as come.
        leaving: which requests are cut off at half of their output; none if empty.
        salt: requests of another salt share no cached prefix with these.
        start: when the trace begins, on the monotonic clock; by default now.
        body: the fields of a request, besides those that the arguments stand for.
    """
    gate = asyncio.Semaphore(concurrency or max(1, len(trace)))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=DEADLINE)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        began = monotonic() + LEAD if start is None else start

        async def one(arrival: Arrival, is_leaving: bool) -> Row:
            await asyncio.sleep(began + arrival.at - monotonic())
            async with gate:
                own = body(arrival)
                return await ask(session, url, arrival, own, streams, is_leaving, salt)

        pairs = zip(trace, leaving or [False] * len(trace), strict=True)
        return list(await asyncio.gather(*(one(each, left) for each, left in pairs)))


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    arrival: Arrival,
    own: Mapping[str, Any],
    streams: bool,
    is_leaving: bool,
    salt: str = "",
) -> Row:
    """Send one request and time its chunks; errors are in the row."""
    body = {**own, "stream": streams}
    if streams:
        body["stream_options"] = {"include_usage": True}
    if salt:
        body["cache_salt"] = salt
    row = Row(monotonic(), input=len(arrival.prompt))
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                row.error = f"{response.status} {(await response.text())[:200]}"
            elif streams:
                await _read(response, row, arrival.output // 2 if is_leaving else 0)
            else:
                row.output = (await response.json())["usage"]["completion_tokens"]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        row.error = repr(error)
    row.ended = monotonic()
    return row


async def _read(response: aiohttp.ClientResponse, row: Row, leaves_at: int) -> None:
    last = 0.0
    chunks = 0
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        now = monotonic()
        event = json.loads(line[6:])
        if "error" in event:
            row.error = event["error"]["message"]
        elif event.get("usage"):
            row.output = event["usage"]["completion_tokens"]
        elif event["choices"] and event["choices"][0]["text"]:
            chunks += 1
            if row.first is None:
                row.first = now
            else:
                row.gaps.append(now - last)
            last = now
            if leaves_at and chunks >= leaves_at:
                row.is_cancelled = True
                response.close()
                return


def summarize(
    rows: Sequence[Row], trace: Sequence[Arrival], limits: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """TTFT, TPOT, ITL and E2E in ms, throughput, and goodput under limits in ms.

    TPOT is one value a request, (E2E - TTFT) / (output - 1); ITL pools the gaps of all chunks.
    """
    done = [row for row in rows if not row.error and not row.is_cancelled]
    times: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2e": []}
    good = 0
    for row in done:
        whole = row.ended - row.began
        own: dict[str, float] = {"e2e": whole}
        if row.first is not None:
            own["ttft"] = row.first - row.began
            if row.output > 1:
                own["tpot"] = (whole - own["ttft"]) / (row.output - 1)
        for name, value in own.items():
            times[name].append(value)
        times["itl"] += row.gaps
        own["itl"] = max(row.gaps, default=0.0)
        good += all(own.get(name, 0.0) * 1e3 <= most for name, most in (limits or {}).items())
    began = min(row.began for row in rows)
    seconds = max(row.ended for row in rows) - began
    planned = trace[-1].at - trace[0].at
    achieved = max(row.began for row in rows) - began
    return {
        "requests": len(rows),
        "failed": sum(bool(row.error) for row in rows),
        "cancelled": sum(row.is_cancelled for row in rows),
        "seconds": seconds,
        "input_tokens": sum(row.input for row in done),
        "output_tokens": sum(row.output for row in done),
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": sum(row.output for row in done) / seconds,
        "total_tokens_per_second": sum(row.input + row.output for row in done) / seconds,
        "goodput": good / seconds,
        "arrivals_late": achieved - planned,
        "ms": {
            name: {f"p{p}": float(np.percentile(values, p)) * 1e3 for p in PERCENTILES}
            for name, values in times.items()
            if values
        },
    }


def run(
    url: str,
    trace: Sequence[Arrival],
    *,
    cancels: float = 0.0,
    seed: int = 0,
    processes: int = 1,
    deadline: float = DEADLINE,
    command: Sequence[str] = CLIENT,
    **options: Any,
) -> list[Row]:
    """Send a trace from this process, or from several; a row for each request, in its order.

    Args:
        cancels: share of requests that are cut off at half of their output.
        seed: of the draw of these.
        processes: that send; with 1 it is this one.
        deadline: seconds for several processes, with their start.
        command: of each of several processes.
        options: as `replay` takes them.

    Raises:
        ClientError: one of several processes has ended without rows, or not by the deadline.
    """
    leaving = (np.random.default_rng(seed).random(len(trace)) < cancels).tolist()
    if processes == 1:
        return _here(url, trace, leaving=leaving, **options)
    gates = split(options.pop("concurrency", 0), processes)
    shares = [
        {
            "url": url,
            "trace": [asdict(each) for each in trace[place::processes]],
            "options": {**options, "leaving": leaving[place::processes], "concurrency": gate},
        }
        for place, gate in enumerate(gates)
    ]
    rows = [Row(began=0.0)] * len(trace)
    for place, found in enumerate(deal(command, shares, deadline)):
        rows[place::processes] = [Row(**each) for each in found]
    return rows


def split(concurrency: int, processes: int) -> list[int]:
    """How many requests at a time are whose, of so many together; 0 is no bound.

    Raises:
        ValueError: there are fewer than processes.
    """
    if 0 < concurrency < processes:
        raise ValueError(f"{concurrency} requests at a time are too few for {processes} processes")
    return [concurrency // processes + (n < concurrency % processes) for n in range(processes)]


def _here(url: str, trace: Sequence[Arrival], **options: Any) -> list[Row]:
    """`replay`, with as many files as this process may open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return asyncio.run(replay(url, trace, **options))


def _client(share: Any, start: float) -> list[dict[str, Any]]:
    """Send a share of a trace."""
    trace = [Arrival(each["at"], tuple(each["prompt"]), each["output"]) for each in share["trace"]]
    rows = _here(share["url"], trace, start=start, **share["options"])
    return [asdict(row) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000")
    add("--requests", type=int, default=100)
    add("--rate", type=float, default=4.0, help="requests a second; inf sends all at once")
    add("--scale", type=float, default=1.0, help="factor on the gaps between arrivals")
    add("--burstiness", type=float, default=1.0)
    add("--lengths", choices=("chat", "fixed", "random"), default="chat")
    add("--means", type=float, nargs=2, default=(29.0, 27.0), help="tokens in and out")
    add("--longest", type=int, default=256)
    add("--vocabulary", type=int, default=256)
    add("--prefix", type=int, default=0, help="tokens that all prompts share")
    add("--concurrency", type=int, default=0)
    add("--cancels", type=float, default=0.0)
    add("--goodput", nargs="*", default=[], metavar="NAME:MS", help="ttft:200 itl:50 e2e:1000")
    add("--seed", type=int, default=0)
    add("--processes", type=int, default=1, help="that send, each its share of the requests")
    add("--deadline", type=float, default=DEADLINE, help="seconds for --processes to send all")
    add("--key")
    add("--json", type=Path, help="write the summary, and every request's times")
    given = parser.parse_args()
    trace = make_trace(
        given.requests,
        given.seed,
        given.rate,
        given.scale,
        given.burstiness,
        given.lengths,
        tuple(given.means),
        given.longest,
        given.vocabulary,
        given.prefix,
    )
    rows = run(
        given.url,
        trace,
        cancels=given.cancels,
        processes=given.processes,
        deadline=given.deadline,
        concurrency=given.concurrency,
        key=given.key,
    )
    limits = {name: float(ms) for name, _, ms in (each.partition(":") for each in given.goodput)}
    summary = summarize(rows, trace, limits)
    print(json.dumps(summary, indent=1))
    if given.json:
        whole = {"summary": summary, "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--client"]:
        take(_client)
    else:
        main()
