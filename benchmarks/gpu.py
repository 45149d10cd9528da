"""Check and time steps on GPUs, against the same work written by hand; a table comes last.

    python -m cg.launch -n 2 benchmarks/gpu.py [--json FILE] [--sections round_trip,pipeline,…]

Each rank needs a GPU. Sections: round_trip, pipeline, equality, profile (2 ranks or more), overlap
(4 ranks), memory. Times are medians. "hand" is the same work by calls of NCCL and torch, captured
into one CUDA graph on each rank; "device" is the time between two events of the compute stream, put
there while the device is still busy, so that the host is ahead.
"""

from __future__ import annotations

import argparse
import cProfile
import faulthandler
import json
import pstats
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cg
from cg.backends.nccl.communicator import make_pool
from cg.ir.attributes import Stream
from cg.ir.module import Channel
from cg.launch import world as worlds

Row = dict[str, Any]
ROWS: list[Row] = []
PATIENCE = 25.0
"""Seconds after which each rank says where it is, and again."""
NCCL_FLOAT32 = 7


def note(section: str, what: str, value: float, unit: str, **more: Any) -> None:
    """Record a figure; the same call on all ranks, rank 0 prints."""
    row = {"section": section, "what": what, "value": round(value, 4), "unit": unit, **more}
    ROWS.append(row)
    if cg.rank() == 0:
        print(f"  {section:12} {what:58} {row['value']:>12} {unit}", flush=True)


def per_call(run: Callable[[], object], warm: int = 10, count: int = 50) -> float:
    """Median µs of a call with the host waiting for the device after each."""
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    cg.barrier()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        run()
        torch.cuda.current_stream().synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def on_device(run: Callable[[], object], warm: int = 10, count: int = 30, inner: int = 10) -> float:
    """Median µs of a call on the device, with the host ahead: several calls between two events."""
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(count):
        cg.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)
        begin.record()
        for _ in range(inner):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / inner)
    return statistics.median(times) * 1e3


# -- 1. round trips ---------------------------------------------------------------------------


@cg.actor
class Echo(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


SIZES = (("8 B", 2), ("40 MB", 10_000_000))


def raw() -> None:
    """The same by hand alone, to see what settings of NCCL change."""
    for label, numel in SIZES:
        trip = HandRoundTrip(numel)
        note("raw", f"{label} by hand, device", on_device(trip.replay, inner=5), "µs")
        trip.close()


def round_trip() -> None:
    """A tensor goes from rank 0 to rank 1 and back."""
    first, second = Echo.on(0)(), Echo.on(1)()

    def body(x: torch.Tensor) -> torch.Tensor:
        return first.forward(second.forward(first.forward(x)))

    for label, numel in SIZES:
        x = torch.arange(numel, dtype=torch.float32, device="cuda")
        step = cg.trace(outputs=cg.on(0))(body)
        raw = HandRoundTrip(numel)
        hand = on_device(raw.replay, inner=5)
        hand_call = per_call(raw.replay)
        for switches in ("", "-capture"):
            compiled = step.lower(x).compile(passes=switches)
            for _ in range(4):
                out = compiled(x)
            if out is not None:
                assert torch.equal(out, x), "a round trip gives another value"
            name = "captured" if not switches else "eager"
            device = on_device(partial(compiled, x), inner=5)
            call = per_call(partial(compiled, x))
            note("round_trip", f"{label} cg {name}, device", device, "µs", ratio=device / hand)
            note("round_trip", f"{label} cg {name}, call and wait", call, "µs", ratio=call / hand)
            if cg.rank() == 0:
                print("   ", reasons(compiled), flush=True)
            compiled.close()
        note("round_trip", f"{label} by hand, device", hand, "µs")
        note("round_trip", f"{label} by hand, launch and wait", hand_call, "µs")
        raw.close()


class Hand:
    """Work written by hand: a pool of NCCL, three streams, one graph."""

    def __init__(self) -> None:
        world: Any = worlds.world()
        self.pool = make_pool(world)
        self.lines = self.pool.join([Channel(0, (0, 1)), Channel(1, (1, 0))])
        self.device = world.device
        self.streams = {kind: self.device.stream(kind) for kind in Stream}
        self.rank = world.rank
        self.graph: Any = None

    def send(self, channel: int, tensor: torch.Tensor, stream: Any) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        raw = stream.cuda_stream
        self.pool.library.send(tensor.data_ptr(), nbytes, 1, self.lines[channel].comm, raw)

    def recv(self, channel: int, tensor: torch.Tensor, stream: Any) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        raw = stream.cuda_stream
        self.pool.library.recv(tensor.data_ptr(), nbytes, 0, self.lines[channel].comm, raw)

    def capture(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.streams[Stream.COMPUTE]):
            work()
            torch.cuda.synchronize()
            cg.barrier()
            self.graph = torch.cuda.CUDAGraph()
            self.graph.capture_begin(capture_error_mode="thread_local")
            work()
            self.graph.capture_end()

    def replay(self) -> None:
        self.graph.replay()

    def close(self) -> None:
        torch.cuda.synchronize()
        self.graph = None
        self.pool.close()


class HandRoundTrip(Hand):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.x = torch.ones(numel, device="cuda")
        self.y = torch.ones(numel, device="cuda")
        self.capture(self.work)

    def work(self) -> None:
        stream = torch.cuda.current_stream()
        if self.rank == 0:
            self.send(0, self.x, stream)
            self.recv(1, self.y, stream)
        elif self.rank == 1:
            self.recv(0, self.x, stream)
            self.send(1, self.x, stream)


# -- 2. two stages, eight microbatches --------------------------------------------------------

MICROBATCHES = 8


@cg.actor
class Linear(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.eye(size) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w).sum()


def pipeline() -> None:
    """Forward and backward of two matrices."""
    for size in (64, 1024):
        a, b = Linear.on(0)(size), Linear.on(1)(size)
        x = torch.ones(MICROBATCHES * size, size, device="cuda")

        @cg.trace
        def step(x: torch.Tensor, a: Any = a, b: Any = b) -> None:
            losses = [b.loss(a.forward(part)) for part in cg.microbatches(x, MICROBATCHES)]
            cg.backward(cg.mean(losses))

        raw = HandPipeline(size)
        hand = on_device(raw.replay)
        raw.close()
        note("pipeline", f"{size}² by hand, one graph", hand, "µs")
        for switches in ("", "-capture", "-overlap"):
            compiled = step.lower(x).compile(passes=switches)
            name = {"": "captured", "-capture": "eager", "-overlap": "captured, -overlap"}[switches]
            device = on_device(partial(compiled, x))
            note("pipeline", f"{size}² cg {name}, device", device, "µs", ratio=device / hand)
            call = per_call(partial(compiled, x))
            note("pipeline", f"{size}² cg {name}, call and wait", call, "µs", ratio=call / hand)
            if cg.rank() == 0:
                print("   ", reasons(compiled), flush=True)
            compiled.close()


def reasons(compiled: Any) -> list[str]:
    """What the segments of this rank's program do."""
    (executables,) = [each for _, each in compiled._runtimes[0].bound.items()]
    segments = getattr(executables[0], "segments", ())
    return [f"{s.number}: {s.captures} graphs, {s.replays} replays, {s.reason}" for s in segments]


class HandPipeline(Hand):
    """1F1B by hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        new = lambda: torch.ones(size, size, device="cuda")  # noqa: E731
        self.w, self.grad = new(), torch.zeros(size, size, device="cuda")
        self.x = [new() for _ in range(MICROBATCHES)]
        self.h = [new() for _ in range(MICROBATCHES)]
        self.g = [new() for _ in range(MICROBATCHES)]
        self.ones = new()
        # A kernel must not be loaded while a receive waits.
        with torch.cuda.stream(self.streams[Stream.COMPUTE]):
            for _ in range(2):
                torch.mm(self.ones, self.ones.t(), out=self.x[0]).sum()
                torch.mm(self.ones, self.ones, out=self.x[0])
                self.grad.addmm_(self.ones.t(), self.ones)
        torch.cuda.synchronize()
        cg.barrier()
        self.capture(self.work)

    def after(self, one: Any, other: Any) -> None:
        event = torch.cuda.Event()
        event.record(one)
        other.wait_event(event)

    def work(self) -> None:
        compute = torch.cuda.current_stream()
        send, recv = self.streams[Stream.SEND], self.streams[Stream.RECV]
        self.after(compute, send)
        self.after(compute, recv)
        if self.rank == 0:
            arrived = []
            for g in self.g:
                self.recv(1, g, recv)
                event = torch.cuda.Event()
                event.record(recv)
                arrived.append(event)
            for i in range(MICROBATCHES):
                self.forward(i, compute, send)
                if i >= 1:
                    self.backward(i - 1, compute, arrived)
            self.backward(MICROBATCHES - 1, compute, arrived)
        elif self.rank == 1:
            arrived = []
            for h in self.h:
                self.recv(0, h, recv)
                event = torch.cuda.Event()
                event.record(recv)
                arrived.append(event)
            for i in range(MICROBATCHES):
                compute.wait_event(arrived[i])
                torch.mm(self.h[i], self.w, out=self.x[i])
                self.x[i].sum()
                self.grad.addmm_(self.h[i].t(), self.ones)
                torch.mm(self.ones, self.w.t(), out=self.g[i])
                self.after(compute, send)
                self.send(1, self.g[i], send)
        self.after(send, compute)
        self.after(recv, compute)

    def forward(self, i: int, compute: Any, send: Any) -> None:
        torch.mm(self.x[i], self.w, out=self.h[i])
        self.after(compute, send)
        self.send(0, self.h[i], send)

    def backward(self, i: int, compute: Any, arrived: Sequence[Any]) -> None:
        compute.wait_event(arrived[i])
        self.grad.addmm_(self.x[i].t(), self.g[i])


# -- 3. three senders, one receiver -----------------------------------------------------------

SIDE = 10_000


@cg.actor
class Worker:
    @cg.opaque(fake=lambda self, value: torch.empty(SIDE, SIDE, dtype=torch.float16))
    def send(self, value: int) -> torch.Tensor:
        return torch.ones(SIDE, SIDE, dtype=torch.float16, device="cuda") * value

    def recv_and_matmul(self, x: torch.Tensor) -> tuple[float, Any, Any]:
        torch.matmul(x, x)
        return x[0][0].item(), tuple(x.shape), str(x.dtype)


Worker.recv_and_matmul = cg.opaque(Worker.recv_and_matmul)


def overlap() -> None:
    """The receiver multiplies each matrix by itself; `.item()` ends each method."""
    if cg.world_size() < 4:
        return
    receiver = Worker.on(0)()
    senders = [Worker.on(rank)() for rank in (1, 2, 3)]

    @cg.trace(outputs=cg.on(0))
    def step(value: int) -> list[Any]:
        return [receiver.recv_and_matmul(sender.send(value)) for sender in senders]

    x = torch.ones(SIDE, SIDE, dtype=torch.float16, device="cuda")
    matmul = on_device(lambda: torch.matmul(x, x), inner=3) / 1e3
    note("overlap", "one matmul", matmul, "ms")
    for switches in ("", "-overlap"):
        compiled = step.lower(cg.object).compile(passes=switches)
        times = []
        for i in range(25):
            cg.barrier()
            began = time.perf_counter()
            out = compiled(i % 4)
            times.append(time.perf_counter() - began)
            if out is not None:
                assert [o[0] for o in out] == [float(i % 4)] * 3, out
        name = switches or "default"
        note("overlap", f"cg {name}, a step", statistics.median(times[5:]) * 1e3, "ms")
        compiled.close()


# -- 5. the same losses and gradients ---------------------------------------------------------


@cg.actor
class Block(torch.nn.Module):
    def __init__(self, seed: int, lr: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        with torch.device("cpu"):
            self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.to("cuda")
        self.optimizer = torch.optim.SGD(self.parameters(), lr=lr, momentum=0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.forward(x) - y) ** 2).mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


STEPS = 200


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(16, 32, generator=generator).cuda() for _ in range(2))  # type: ignore[return-value]


def plain(stages: int) -> list[float]:
    """The losses of a plain loop on this rank's GPU."""
    blocks = [Block(i, 0.05) for i in range(stages)]
    losses = []
    for i in range(STEPS):
        x, y = data(i)
        parts = []
        for px, py in zip(x.chunk(4), y.chunk(4), strict=True):
            for block in blocks[:-1]:
                px = block.forward(px)
            parts.append(blocks[-1].loss(px, py))
        loss = torch.stack(parts).mean()
        loss.backward()
        for block in blocks:
            block.update()
        losses.append(loss.item())
    return losses


def equality() -> None:
    """Losses of training steps against a plain loop on one GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    count = cg.world_size()
    right = plain(count)
    for switches in ("", "-capture", "-overlap", "-capture,-overlap"):
        stages = [Block.on(rank)(rank, 0.05) for rank in range(count)]

        @cg.trace
        def step(x: torch.Tensor, y: torch.Tensor, stages: Any = stages) -> torch.Tensor:
            losses = []
            for px, py in cg.microbatches((x, y), 4):
                for stage in stages[:-1]:
                    px = stage.forward(px)
                losses.append(stages[-1].loss(px, py))
            loss = cg.mean(losses)
            cg.backward(loss)
            for stage in stages:
                stage.update()
            return loss

        compiled = step.lower(*data(0)).compile(passes=switches)
        losses = [compiled(*data(i)) for i in range(STEPS)]
        values = [loss.item() for loss in losses]
        worst = max(abs(a - b) / abs(b) for a, b in zip(values, right, strict=True))
        note("equality", f"worst relative error of {STEPS} losses, passes='{switches}'", worst, "")
        if cg.rank() == 0:
            print("   ", reasons(compiled), flush=True)
        compiled.close()
    torch.use_deterministic_algorithms(False)


# -- 6. launches and synchronisations ---------------------------------------------------------


def profile() -> None:
    """What the host calls during steps that are captured whole."""
    a, b = Linear.on(0)(64), Linear.on(1)(64)
    x = torch.ones(MICROBATCHES * 64, 64, device="cuda")

    @cg.trace
    def step(x: torch.Tensor) -> None:
        losses = [b.loss(a.forward(part)) for part in cg.microbatches(x, MICROBATCHES)]
        cg.backward(cg.mean(losses))

    compiled = step.lower(x).compile()
    for _ in range(8):
        compiled(x)
    torch.cuda.synchronize()
    cg.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(10):
            compiled(x)
        cg.barrier()
    torch.cuda.synchronize()
    counts: dict[str, int] = {}
    for event in trace.key_averages():
        if event.key.startswith("cuda"):
            counts[event.key] = event.count
    launches = counts.get("cudaGraphLaunch", 0) / 10
    syncs = sum(n for key, n in counts.items() if "Synchronize" in key)
    note("profile", "graph launches in a step", launches, "", counts=counts)
    note("profile", "synchronisations in 10 steps (the profiler's own end adds some)", syncs, "")
    if cg.rank() == 0:
        print("   ", counts, flush=True)
    compiled.close()


def host() -> None:
    """Where the host's time goes in a step that is captured whole."""
    first, second = Echo.on(0)(), Echo.on(1)()

    @cg.trace(outputs=cg.on(0))
    def step(x: torch.Tensor) -> torch.Tensor:
        return first.forward(second.forward(first.forward(x)))

    x = torch.ones(2, device="cuda")
    compiled = step.lower(x).compile()
    for _ in range(20):
        compiled(x)
    torch.cuda.synchronize()
    cg.barrier()
    began = time.perf_counter()
    for _ in range(500):
        compiled(x)
    note("host", "a step, nobody waiting for the device", (time.perf_counter() - began) * 2e3, "µs")
    torch.cuda.synchronize()
    cg.barrier()
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(500):
        compiled(x)
    watch.disable()
    torch.cuda.synchronize()
    if cg.rank() == 0:
        pstats.Stats(watch, stream=sys.stdout).sort_stats("tottime").print_stats(22)
    compiled.close()


# -- what communicators take ------------------------------------------------------------------


def memory() -> None:
    """Device memory and time of one more communicator."""
    world: Any = worlds.world()
    pool = make_pool(world)
    free, _ = torch.cuda.mem_get_info()
    began = time.perf_counter()
    pool.join([Channel(0, (0, 1))])
    seconds = time.perf_counter() - began
    after, _ = torch.cuda.mem_get_info()
    note(
        "memory",
        f"{pool.library.name} {pool.library.version()}: first edge",
        (free - after) / 2**20,
        "MiB",
    )
    note("memory", "to join it", seconds * 1e3, "ms")
    began = time.perf_counter()
    pool.join([Channel(1, (1, 0))])
    note("memory", "a second edge", (after - torch.cuda.mem_get_info()[0]) / 2**20, "MiB")
    note("memory", "to join it", (time.perf_counter() - began) * 1e3, "ms")
    pool.close()


SECTIONS: dict[str, Callable[[], None]] = {
    "memory": memory,
    "raw": raw,
    "round_trip": round_trip,
    "pipeline": pipeline,
    "profile": profile,
    "host": host,
    "equality": equality,
    "overlap": overlap,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="with commas between them")
    args = parser.parse_args()
    world: Any = worlds.world()
    faulthandler.dump_traceback_later(PATIENCE, repeat=True)
    if world.device is None or cg.world_size() < 2:
        sys.exit("start this on 2 ranks or more, each with a GPU: python -m cg.launch -n 2 …")
    for name in args.sections.split(","):
        if cg.rank() == 0:
            print(f"== {name}", flush=True)
        try:
            SECTIONS[name]()
        except Exception:
            # Other ranks may be elsewhere, so nothing after this can be relied on.
            traceback.print_exc()
            sys.stderr.flush()
            raise
        finally:
            if cg.rank() == 0 and args.json is not None:
                args.json.write_text(json.dumps({"rows": ROWS}, indent=1) + "\n")
    if cg.rank() == 0:
        table()


def table() -> None:
    """All figures."""
    print()
    for row in ROWS:
        ratio = f"{row['ratio']:.2f}x by hand" if "ratio" in row else ""
        print(f"{row['section']:12} {row['what']:58} {row['value']:>12} {row['unit']:3} {ratio}")


if __name__ == "__main__":
    main()
