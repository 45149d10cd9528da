"""The program of each rank of HCCL's self-test, `cg.backends.hccl.selftest`.

It compares steps over actors on NPUs with plain PyTorch on the CPU. Each step runs often enough to
be captured and replayed where that is possible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...backends.devices.programs.executable import DeviceExecutable
from ...backends.exchanges import outcomes
from ...backends.hccl.selftest import ROW
from ...ir.attributes import ReduceOp
from ...ir.ops import AllGather, AllReduce, AllToAll, ReduceScatter
from ...ir.types import Place
from ...tracer.record.intrinsics.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from ...tracer.record.intrinsics.gradients import backward
from ...tracer.record.intrinsics.microbatches import mean, microbatches
from ...tracer.record.intrinsics.via import via
from ..api.api import actor, trace
from ..api.compiled import Compiled
from ..world.world import world

EXECUTIONS = 8
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8)


class SelftestLayer(nn.Module):
    """A layer, and a method that returns its argument."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(16, 16)
        self.scale = seed + 1

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 16] to [n, 16]."""
        return self.linear(x).tanh()  # type: ignore[no-any-return]

    def give(self, x: Tensor) -> Tensor:
        """Multiply by a factor that differs between ranks."""
        return x * self.scale


PartActor: Any = actor(SelftestLayer)


def main() -> None:
    """Run all checks; rank 0 prints a row for each."""
    here = world()
    parts = [PartActor.on(rank)(rank) for rank in range(here.size)]
    checks: dict[str, Callable[[], str]] = {
        "messages from rank to rank": lambda: _messages(parts),
        "collectives": lambda: _collectives(parts),
        "training equals a plain loop": lambda: _training(parts),
        "time of a round trip": lambda: _round_trip(parts),
    }
    failed = False
    for name, check in checks.items():
        error, details = None, ""
        try:
            details = check()
        except Exception as problem:  # the table shows any failure
            error = f"{type(problem).__name__}: {problem}"
        errors = [message for message in here.allgather(error) if message is not None]
        if here.rank == 0:
            line = f"FAIL | {name} | {errors[0]}" if errors else f"pass | {name} | {details}"
            print(ROW + " ".join(line.split()), flush=True)
        if errors:
            failed = True
            break  # devices do not recover from a failed exchange
    if failed:
        raise SystemExit(1)


def _messages(parts: Sequence[Any]) -> str:
    """Send a value of each type once around all ranks."""

    @trace
    def step(x: Tensor) -> Tensor:
        for part in [*parts, parts[0]]:
            x = via(part.give(x), "hccl")
        return x

    factor = parts_product(len(parts))
    for dtype in DTYPES:
        x = torch.ones(6, 5).to(dtype)
        compiled = step.lower(x).compile()
        for _ in range(EXECUTIONS):
            _equal(compiled(x).cpu(), x * factor)
        details = _captured(compiled)
        compiled.close()
    return f"{len(DTYPES)} types, {EXECUTIONS} executions each; {details}"


def parts_product(size: int) -> int:
    """The product of the factors by which ranks multiply a value on its way around."""
    product = 1
    for rank in range(size):
        product *= rank + 1
    return product


def _collectives(parts: Sequence[Any]) -> str:
    size = len(parts)

    @trace
    def step(x: Tensor) -> tuple[list[Tensor], ...]:
        values = [part.give(x) for part in parts]
        return (
            all_reduce(values, "sum"),
            all_reduce(values, "avg" if x.is_floating_point() else "min"),
            all_reduce(values, "prod"),
            all_reduce(values, "max"),
            all_gather(values, 1),
            reduce_scatter(values, "sum", 0),
            all_to_all(values, 0),
            broadcast(values[0], parts),
        )

    for dtype in DTYPES:
        x = torch.arange(1, 2 * size + 1).to(dtype).view(2 * size, 1).expand(2 * size, 3)
        x = x.contiguous() % 3
        values = [x * (rank + 1) for rank in range(size)]
        group = Place(tuple(range(size)))
        mean = ReduceOp.AVG if dtype.is_floating_point else ReduceOp.MIN
        ops = (
            *(AllReduce(group=group, op=op) for op in (ReduceOp.SUM, mean)),
            *(AllReduce(group=group, op=op) for op in (ReduceOp.PROD, ReduceOp.MAX)),
            AllGather(group=group, dim=1),
            ReduceScatter(group=group),
            AllToAll(group=group),
        )
        expected = [*(outcomes(op.exchange, values) for op in ops), [values[0]] * size]
        compiled = step.lower(x).compile()
        for _ in range(EXECUTIONS):
            for results, references in zip(compiled(x), expected, strict=True):
                for actual, right in zip(results, references, strict=True):
                    torch.testing.assert_close(actual.cpu(), right, rtol=1e-2, atol=1e-2)
        compiled.close()
    return f"8 collectives of {len(DTYPES)} types, {EXECUTIONS} executions each"


def _training(parts: Sequence[Any]) -> str:
    plain = [SelftestLayer(rank) for rank in range(len(parts))]
    x = torch.linspace(-1, 1, 8 * 16).view(8, 16)

    @trace
    def step(x: Tensor) -> Tensor:
        losses = []
        for (h,) in microbatches((x,), 4):
            for part in parts:
                h = via(part.forward(h), "hccl")
            losses.append(parts[0].give(h).square().mean())
        loss = mean(losses)
        backward(loss)
        return loss

    compiled = step.lower(x).compile()
    for _ in range(EXECUTIONS):
        losses = []
        for h in x.chunk(4):
            for part in plain:
                h = part.forward(h)
            losses.append(plain[0].give(h).square().mean())
        loss = torch.stack(losses).mean()
        torch.autograd.backward(loss)
        torch.testing.assert_close(compiled(x).cpu(), loss.detach(), rtol=1e-3, atol=1e-4)
    for part, plain_part in zip(parts, plain, strict=True):
        if part.is_local:
            for parameter, reference in zip(
                part.local.parameters(), plain_part.parameters(), strict=True
            ):
                gradient, expected = parameter.grad.cpu(), reference.grad
                torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-3)
    details = _captured(compiled)
    compiled.close()
    return f"losses and gradients of {EXECUTIONS} steps; {details}"


def _round_trip(parts: Sequence[Any]) -> str:
    @trace
    def step(x: Tensor) -> Tensor:
        there = via(parts[0].give(x), "hccl")
        back: Tensor = parts[0].give(via(parts[-1].give(there), "hccl"))
        return back

    latencies = []
    for count in (2, 4 << 20):
        x = torch.ones(count)
        compiled = step.lower(x).compile()
        times = []
        for _ in range(20):
            began = time.perf_counter()
            compiled(x).cpu()
            times.append(time.perf_counter() - began)
        latencies.append(f"{4 * count} bytes {1e6 * sorted(times)[10]:.0f} us")
        compiled.close()
    return ", ".join(latencies) + " (with the host's part; median of 20)"


def _captured(compiled: Compiled) -> str:
    """Say in words how much of this rank's program is replayed."""
    executables = [e for r in compiled._runtimes if r is not None for e in r.bound[world().rank]]
    segments = [s for e in executables if isinstance(e, DeviceExecutable) for s in e.segments]
    reasons = sorted({segment.reason for segment in segments if segment.reason})
    replays = sum(segment.replays for segment in segments)
    return f"{len(segments)} graphs replayed {replays} times" + "".join(f", {r}" for r in reasons)


def _equal(actual: Tensor, expected: Tensor) -> None:
    if not torch.equal(actual, expected):
        raise AssertionError(
            f"{actual.dtype}: got {actual.flatten()[:4]}, not {expected.flatten()[:4]}"
        )


if __name__ == "__main__":
    main()
