"""Pipeline parallel decoding over a slow link, which is synthetic: a fixed delay of each message.

    python -m cg.launch -n 2 benchmarks/serving/slow_link.py [--delay 10] [--json FILE]

Activations and tokens of the engine of examples/serve go by a transport of this file, which a
message takes `--delay` milliseconds to cross; tables and commands go by shared memory. Arms, on the
tiny Qwen2 of engine.py, with B = 8 rows in each group:

- no link: shared memory alone, which says what the stages cost;
- asynchronous: a send returns at once, and a value is awaited where it is first used. Measured at
  the beginning and at the end of a run, so that a machine that changes meanwhile shows;
- blocking: a rank that sends does nothing else until the message has crossed;
- awaited early: asynchronous, but a value is awaited where its receive is posted (`-overlap`);
- by the driver: asynchronous, but a group's tokens do not go from the last stage to the first by
  the carry: the driver takes each result and hands it in with the next batch.

With one group in flight the link is waited for by everybody; with several, only by the group that
is on its way. The prediction is that of `compiled.simulate` for one execution, with the measured
time of the stages and the link's delay: a group's next execution begins when the last has ended,
unless a rank is busy for longer than that with all groups.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import cg
from cg.backends.base import Port, World
from cg.backends.poison import Poison
from cg.backends.transports import registry
from cg.ir.ops import Collective, Recv, Send
from cg.ir.ops.module import Channel
from cg.ir.types import ValueType
from cg.launch.runtime.runtime import transport_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.serving.engine import PROMPT, config, prefill_of, prompts, rows_of
from examples.serve.engine import CgEngine, start
from examples.serve.settings import Options
from examples.serve.variants import DecodeSize, PrefillSize
from examples.serve.work import POSITION, TOKEN, Decode

BATCH = 8
STEPS = 40
GROUPS = (1, 2, 4)


# -- the link -----------------------------------------------------------------------------------


class SlowLink:
    """A communicator whose messages can be taken `delay` seconds after they were sent.

    Args:
        world: all ranks.
        delay: seconds.
        is_blocking: whether a sender waits for that long.
        bells: rings ranks that sleep when a message has crossed.
    """

    def __init__(self, world: World, delay: float, is_blocking: bool, bells: Bells) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.delay = delay
        self.is_blocking = is_blocking
        self.bells = bells

    def send_port(self, op: Send, channel: Channel, type_: ValueType) -> Port:
        return SlowSend(self, channel)

    def recv_port(self, op: Recv, channel: Channel, type_: ValueType) -> Port:
        return SlowRecv(self, channel)

    def collective_port(
        self, op: Collective, channel: Channel, operand: ValueType | None, result: ValueType
    ) -> Port:
        raise NotImplementedError("pipelines have none")

    def progress(self) -> None:
        """Nothing: MPI moves on when ports are polled."""

    def reset(self) -> None:
        """Take what is under way."""
        while (message := self.comm.improbe()) is not None:
            message.recv()

    def close(self) -> None:
        """Nothing: the job ends soon."""


class SlowSend:
    """Sends a value with the time at which it may be taken."""

    needs_release = False

    def __init__(self, link: SlowLink, channel: Channel) -> None:
        self._link = link
        self._channel = channel
        self._request: Any = None

    def start(self, value: Any) -> None:
        link, target = self._link, self._channel.ranks[1]
        due = time.monotonic() + link.delay
        if link.is_blocking:
            time.sleep(link.delay)
        value = value.clone() if isinstance(value, torch.Tensor) else value
        self._request = link.comm.isend((due, value), target, self._channel.id)
        link.bells.ring_at(due, target)

    def fail(self, poison: Poison) -> None:
        self.start(poison.to_bytes())

    def poll(self) -> bool:
        return bool(self._request.Test())

    def take(self) -> None:
        """A send makes no value."""

    def release(self) -> None:
        """Nothing is held."""


class SlowRecv:
    """Takes a value once it has crossed."""

    needs_release = False

    def __init__(self, link: SlowLink, channel: Channel) -> None:
        self._link = link
        self._channel = channel
        self._came: tuple[float, Any] | None = None
        self._into: torch.Tensor | None = None

    def start(self, value: Any) -> None:
        self._into = value

    def fail(self, poison: Poison) -> None:
        """A receive has no operand that could be an error."""

    def poll(self) -> bool:
        if self._came is None:
            message = self._link.comm.improbe(self._channel.ranks[0], self._channel.id)
            if message is None:
                return False
            self._came = message.recv()
        return time.monotonic() >= self._came[0]

    def take(self) -> Any:
        assert self._came is not None, "it is taken once poll has been true"
        value, self._came = self._came[1], None
        if isinstance(value, bytes):
            raise Poison.from_bytes(value)
        return value if self._into is None else self._into.copy_(value)

    def release(self) -> None:
        """The value is in memory of its own."""


class Bells:
    """A thread that rings ranks at given times: who waits sleeps, and MPI would not wake it."""

    def __init__(self, world: World) -> None:
        self._node = transport_of(world).node
        self._due: list[tuple[float, int]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def ring_at(self, due: float, rank: int) -> None:
        with self._changed:
            heapq.heappush(self._due, (due, rank))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    wait = self._due[0][0] - time.monotonic() if self._due else None
                    self._changed.wait(wait)
                _, rank = heapq.heappop(self._due)
            self._node.ring(rank)


def register_links(delay: float) -> None:
    """The transports `slow` and `slow-blocking`, on all ranks."""
    bells: list[Bells] = []

    def connecting(is_blocking: bool) -> Any:
        def connect(world: World, channels: Sequence[Channel]) -> SlowLink:
            if not bells:
                bells.append(Bells(world))
            return SlowLink(world, delay, is_blocking, bells[0])

        return connect

    registry.register("slow", connecting(False))
    registry.register("slow-blocking", connecting(True))


# -- measuring ----------------------------------------------------------------------------------


def options(via: str, passes: str) -> Options:
    return Options(
        groups=max(GROUPS),
        batches=(BATCH,),
        chunks=(PROMPT,),
        blocks=1 + 8 * BATCH * max(GROUPS),
        widths=(8,),
        context=128,
        via=via,
        passes=passes,
    )


def decode(engine: CgEngine, groups: int, by_driver: bool = False) -> dict[str, float]:
    """ITL and tokens/s of so many groups of B rows; a group's next batch is submitted at once."""
    under_way: list[Any] = [None] * groups
    tokens = [[1] * BATCH for _ in range(groups)]
    tables = [rows_of(BATCH, group * BATCH) for group in range(groups)]
    gaps: list[float] = []
    last = [0.0] * groups
    began = time.perf_counter()

    def submit(group: int, step: int) -> None:
        rows = tables[group]
        rows[:, TOKEN] = tokens[group] if by_driver or not step else -1
        rows[:, POSITION] = PROMPT + step
        under_way[group] = engine.submit(Decode(group, rows))

    def collect(group: int) -> None:
        tokens[group] = under_way[group].result()
        now = time.perf_counter()
        if last[group]:
            gaps.append(now - last[group])
        last[group] = now

    for step in range(STEPS):
        for group in range(groups):
            before = under_way[group]
            if by_driver and step:
                collect(group)
            submit(group, step)
            if not by_driver and step:  # one behind: the carry has what the driver does not know
                here, under_way[group] = under_way[group], before
                collect(group)
                under_way[group] = here
    for group in range(groups):
        collect(group)
    seconds = time.perf_counter() - began
    return {
        "itl": statistics.median(gaps) * 1e3,
        "tokens_per_second": groups * BATCH * STEPS / seconds,
    }


def first_token(engine: CgEngine) -> float:
    """Milliseconds to the first token of a prompt of two chunks, which follow one another."""
    prompt = prompts(2)
    began = time.perf_counter()
    first = engine.submit(prefill_of(prompt[0], 0, last=False))
    second = engine.submit(prefill_of(prompt[1], 0, PROMPT))
    first.result()
    second.result()
    return (time.perf_counter() - began) * 1e3


def _graph(engine: CgEngine, kind: type[DecodeSize] | type[PrefillSize]) -> cg.Compiled:
    """The graph of the first variant of a kind."""
    return next(g[0] for size, g in engine.graphs.compiled.items() if isinstance(size, kind))


@dataclass(frozen=True)
class Paper:
    """What predictions are made from: milliseconds of a stage, and of a message.

    Attributes:
        stage, chunk: of a decode batch, and of a chunk of a prompt.
        link: for a message to cross.
        send: for how long a message keeps its sender busy.
    """

    stage: float
    chunk: float
    link: float = 0.0
    send: float = 0.0

    def itl(self, engine: CgEngine, groups: int) -> float:
        """An execution of a group begins when its last has ended, or when a rank has time."""
        return max(
            self._end(_graph(engine, DecodeSize), ".decode", self.stage), groups * self._turn()
        )

    def ttft(self, engine: CgEngine) -> float:
        """The second chunk follows the first by as long as a rank is busy with that."""
        return (
            self._end(_graph(engine, PrefillSize), ".prefill", self.chunk) + self.chunk + self.send
        )

    def _turn(self) -> float:
        return self.stage + self.send

    def _end(self, graph: cg.Compiled, method: str, stage: float) -> float:
        """When the last message of one execution has arrived, as `simulate` says."""
        stages = [name for name in graph.module.functions if name.endswith(method)]
        slow = [id_ for id_, channel in graph.module.channels.items() if channel.via is not None]
        costs = cg.Costs(
            functions=dict.fromkeys(stages, stage),
            channels=dict.fromkeys(slow, cg.Link(self.link)),
        )
        return max(message.ready for message in graph.simulate(costs).messages)


def arm(
    name: str, engine: CgEngine, rounds: int, paper: Paper, by_driver: bool = False
) -> list[dict[str, Any]]:
    found = []
    for groups in GROUPS:
        decode(engine, groups, by_driver)  # warm
        runs = [decode(engine, groups, by_driver) for _ in range(rounds)]
        itl = statistics.median(run["itl"] for run in runs)
        predicted = paper.itl(engine, groups)
        row = {
            "arm": name,
            "groups": groups,
            "ttft_ms": statistics.median(first_token(engine) for _ in range(rounds)),
            "itl_ms": itl,
            "predicted_ttft_ms": paper.ttft(engine),
            "predicted_itl_ms": predicted,
            "tokens_per_second": statistics.median(run["tokens_per_second"] for run in runs),
            "predicted_tokens_per_second": groups * BATCH / predicted * 1e3,
        }
        print(
            f"{name:>20} | {groups} groups | TTFT {row['ttft_ms']:6.1f} ms, on paper "
            f"{row['predicted_ttft_ms']:6.1f} | ITL {itl:6.1f} ms, on paper {predicted:6.1f} | "
            f"{row['tokens_per_second']:6.0f} tokens/s, on paper "
            f"{row['predicted_tokens_per_second']:6.0f}",
            flush=True,
        )
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay", type=float, default=10.0, help="milliseconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    register_links(args.delay / 1e3)
    found: list[dict[str, Any]] = []
    stage = chunk = 0.0
    plan = [
        ("no link", "auto", "", 0.0, 0.0, False),
        ("asynchronous", "slow", "", args.delay, 0.0, False),
        ("by the driver", "", "", args.delay, 0.0, True),
        ("blocking", "slow-blocking", "", args.delay, args.delay, False),
        ("awaited early", "slow", "-overlap", args.delay, 0.0, False),
        ("asynchronous again", "slow", "", args.delay, 0.0, False),
    ]
    engine = None
    for name, via, passes, delay, send, by_driver in plan:
        if via:  # else the engine of the arm before
            if engine is not None:
                engine.close()
            engine = start(config(), options(via, passes))
        if engine is None:
            continue
        if not stage:
            runs = [decode(engine, 1)["itl"] for _ in range(args.rounds + 1)]
            stage = statistics.median(runs[1:]) / cg.world_size()
            firsts = [first_token(engine) for _ in range(args.rounds + 1)]
            chunk = statistics.median(firsts[1:]) / (cg.world_size() + 1)  # two chunks in a row
        paper = Paper(stage, chunk, delay, send)
        found += arm(name, engine, args.rounds, paper, by_driver)
    if engine is not None:
        engine.close()
        if args.json:
            figures = {"synthetic": True, "delay_ms": args.delay, "rows": found}
            args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
