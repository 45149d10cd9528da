"""Helpers of the sections: time, memory, and graphs that are captured by hand."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from groups.bench import Bench, Run
from torch import Tensor

import cg

GIB = 2**30


@dataclass
class OneGpu(Bench):
    """A run of the sections on one rank.

    Attributes:
        limit: seconds that a section may take; what would begin later is left out.
        only: words of the arms that are wanted; all if empty.
    """

    limit: float = 150.0
    only: tuple[str, ...] = ()
    _began: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """A section begins."""
        self._began = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds that the section has left."""
        return self.limit - (time.monotonic() - self._began)

    def wants(self, what: str, seconds: float = 0.0) -> bool:
        """True if something is wanted and can be done in time; prints a line if time is short.

        Args:
            seconds: that it takes at most.
        """
        if self.only and not any(word in what for word in self.only):
            return False
        if self.left < seconds:
            self.report.say(f"  left out, with {self.left:.0f} s left: {what}")
            return False
        return True

    def compile_seconds(self, on_gpu: float) -> float:
        """The most that compiling takes: nothing to speak of in a trial, where nothing is."""
        return on_gpu if self.compiles else 0.0

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Say how long it has taken to prepare something."""
        began = time.monotonic()
        yield
        self.report.say(f"  prepared in {time.monotonic() - began:.1f} s: {what}")

    def turns_ms(
        self, section: str, arms: Mapping[str, Run], inner: int, before: Run | None = None
    ) -> dict[str, float]:
        """Time arms in turns, and note each.

        Args:
            before: called ahead of each measurement, while the clock stands.
        """
        found = self.turns(arms, inner, before=before)
        for name, value in found.items():
            self.report.note(section, name, value, "ms")
        return found

    def free(self) -> None:
        """Give back what nobody uses any more, and count the peak of memory anew."""
        gc.collect()
        if self.is_gpu:
            self.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """GiB of tensors at most since `free`; 0 without a GPU."""
        return torch.cuda.max_memory_allocated() / GIB if self.is_gpu else 0.0

    def reserved(self) -> float:
        """GiB that are taken from the GPU once what is free is given back; 0 without a GPU."""
        if not self.is_gpu:
            return 0.0
        self.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() / GIB


class ByHand:
    """A function of one tensor, captured into a CUDA graph; on hosts the function itself."""

    def __init__(self, run: Callable[[Tensor], Tensor], example: Tensor) -> None:
        self._run = run
        self._graph: Any = None
        if not example.is_cuda:
            return
        self._input = example.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run(self._input)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = run(self._input)

    def __call__(self, x: Tensor) -> Tensor:
        if self._graph is None:
            return self._run(x)
        self._input.copy_(x)
        self._graph.replay()
        return self._output


def how_captured(compiled: Any) -> str:
    """The work that the graphs of a compiled step, or of a driven graph's contexts, have done."""
    if compiled._open_graph is None:
        executables = compiled._runtimes[0].bound[cg.rank()]
    else:
        contexts = compiled._open_graph.graph.contexts[cg.rank()]
        executables = [each for context in contexts for each in context.instances]
    parts = [part for each in executables for part in getattr(each, "segments", ())]
    counts = f"{sum(p.captures for p in parts)} captures, {sum(p.replays for p in parts)} replays"
    reasons = sorted({str(part.reason) for part in parts if part.reason is not None})
    return f"{len(parts)} graphs, {counts}" + "".join(f"; {reason}" for reason in reasons)
