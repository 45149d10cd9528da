"""Micro-benchmarks: executor, compile time, each pass, and a message there and back.

    make bench-save NAME=before
    make bench-compare

They call what the scripts of this folder call. Statistics are saved to `results/micro`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import executor_overhead
import pytest
import torch
from compile_time import traced
from pytest_benchmark.fixture import BenchmarkFixture

from cg.backends.program.executor import poll_only
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Module
from cg.passes.base import Pass, Pipeline
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline

HERE = Path(__file__).resolve().parent
INSTRUCTIONS = 1000
SIZES = ((4, 16), (16, 64))
"""Ranks and microbatches of the pipelines that are compiled."""
JOB_TIMEOUT = 240.0


@pytest.mark.parametrize("case", executor_overhead.CASES)
def test_executor(benchmark: BenchmarkFixture, case: str, quick: bool) -> None:
    """An execution of a thousand instructions of one kind."""
    count = 1 if quick else INSTRUCTIONS
    executable = executor_overhead.program(executor_overhead.CASES[case], count)
    inputs = [None, torch.ones(1)]
    benchmark.pedantic(executable.run, (inputs, poll_only), rounds=100, warmup_rounds=3)


def copies(module: Module) -> Callable[[], tuple[tuple[Module], dict[str, Any]]]:
    """The setup of a round that rewrites a module: another copy of it."""
    return lambda: ((clone(module),), {})


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_compile(benchmark: BenchmarkFixture, ranks: int, microbatches: int, quick: bool) -> None:
    """All passes over a training step."""
    module, pipeline = traced("1f1b", ranks, 2 if quick else microbatches)
    compile_ = PassManager(pipeline, verify=False).run
    benchmark.pedantic(compile_, setup=copies(module), rounds=7, warmup_rounds=1)


def pass_names(pipeline: Pipeline) -> list[str]:
    """The names of passes; one that runs again has its number behind it."""
    seen: Counter[str] = Counter()
    found = []
    for pass_ in pipeline:
        seen[pass_.name] += 1
        again = f"-{seen[pass_.name]}" if seen[pass_.name] > 1 else ""
        found.append(pass_.name + again)
    return found


@pytest.fixture(scope="module")
def modules(quick: bool) -> dict[str, tuple[Pass, Module]]:
    """Each pass with the module as it comes to that pass."""
    module, pipeline = traced("1f1b", *SIZES[0 if quick else -1])
    found = {}
    for name, pass_ in zip(pass_names(pipeline), pipeline, strict=True):
        found[name] = pass_, clone(module)
        pass_.run(module)
    return found


@pytest.mark.parametrize("name", pass_names(default_pipeline()))
def test_pass(
    benchmark: BenchmarkFixture, modules: dict[str, tuple[Pass, Module]], name: str
) -> None:
    """One pass or proof over the larger training step."""
    pass_, module = modules[name]
    run = PassManager((pass_,), verify=False).run
    benchmark.pedantic(run, setup=copies(module), rounds=15, warmup_rounds=1)


class RecordedClock:
    """A clock that stands still but for the times that other processes have measured.

    A round trip is timed on its ranks. With this clock the statistics are those of their figures,
    and not of the job that was started for them.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let a time pass."""
        self.now += seconds


CLOCK = RecordedClock()


@pytest.fixture(scope="module")
def round_trips(tmp_path_factory: pytest.TempPathFactory, quick: bool) -> dict[str, list[float]]:
    """The figures of a job of two ranks: for each arm its medians, in µs."""
    file = tmp_path_factory.mktemp("round_trip") / "figures.json"
    command = [sys.executable, "-m", "cg.launch", "-n", "2", str(HERE / "round_trip.py")]
    command += ["--json", str(file)]
    if quick:
        command += ["--rounds", "20", "--repeats", "1"]
    subprocess.run(command, check=True, timeout=JOB_TIMEOUT)
    found: dict[str, list[float]] = json.loads(file.read_text())["round_trip_us"]
    return found


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("arm", ["execute", "step", "mpi4py"])
def test_round_trip(
    benchmark: BenchmarkFixture, round_trips: dict[str, list[float]], arm: str
) -> None:
    """One byte from rank 0 to rank 1 and back; each sample is the median of many."""
    seconds = [figure / 1e6 for figure in round_trips[arm]]
    samples = iter(seconds)
    benchmark.pedantic(lambda: CLOCK.advance(next(samples)), rounds=len(seconds))
