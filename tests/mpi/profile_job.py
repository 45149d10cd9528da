"""Profiles a step and a graph, on all ranks of a job.

mpiexec -n 2 python -m tests.mpi.profile_job folder
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cg
from tests.stages import LinearStage

WIDTH = 16
Event = dict[str, Any]
ROUNDING = 0.002
"""Microseconds; a trace is written to the nanosecond."""


def events_of(trace: Path) -> list[Event]:
    found = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert isinstance(found, list)
    return found


def check_trace(events: Sequence[Event], ranks: int, uncertainty: float) -> None:
    """A process for each rank, threads whose slices do not overlap, no message before its send."""
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(ranks)}
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    assert {pid for pid, _ in tracks} == set(range(ranks))
    for slices in tracks.values():
        end = 0.0
        for event in slices:
            assert event["ts"] >= end - ROUNDING
            assert event["dur"] >= 0
            end = event["ts"] + event["dur"]
    tails = {e["id"]: e for e in events if e["ph"] == "s"}
    heads = {e["id"]: e for e in events if e["ph"] == "f"}
    assert tails.keys() == heads.keys()
    assert tails
    for number, tail in tails.items():
        assert heads[number]["pid"] != tail["pid"]
        assert heads[number]["ts"] >= tail["ts"] - uncertainty - ROUNDING


@cg.actor
class SpeakingStage(LinearStage):
    """A linear stage, and a method of objects."""

    @cg.opaque
    def say(self, text: str) -> str:
        return f"{text} {cg.rank()}"


def main() -> None:
    folder = Path(sys.argv[1])
    size = cg.world_size()
    stages = [SpeakingStage.on(rank)(rank, WIDTH) for rank in range(size)]

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        losses = []
        for mx in cg.microbatches(x, 4):
            for stage in stages:
                mx = stage.forward(mx)
            losses.append(mx.mean())
        loss = cg.mean(losses)
        cg.backward(loss)
        return loss

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def talk(text: str) -> str:
        for stage in stages:
            text = stage.say(text)
        return text

    x = torch.zeros(8, WIDTH)
    compiled = step.lower(x).compile()
    with cg.profile(folder) as profile:
        compiled(x)
        compiled(x)
        with talk.lower(cg.object).compile(max_inflight=4) as graph:
            if cg.rank() == 0:
                futures = [graph.execute("hello") for _ in range(8)]
                assert {future.result() for future in futures} == {"hello 0 1"}
    if cg.rank() == 0:
        check(profile.trace, profile.manifest, size)
        assert profile.picture("step").rows[1].rank == 1
        profile.visualize(folder / "step.html", "step", predicted=compiled.simulate())
    profile.visualize(folder / "talk.svg", "talk")
    if cg.rank() == 1:
        with_error(lambda: profile.picture(), "pictures are made on rank 0")
    print(f"rank {cg.rank()}: profiled")


def check(trace: Path, manifest: Path, size: int) -> None:
    """On rank 0, what was written."""
    about = json.loads(manifest.read_text(encoding="utf-8"))
    readings = [*about["clocks"]["start"], *about["clocks"]["end"]]
    uncertainty = max(reading["uncertainty"] for reading in readings)
    assert uncertainty < 1e5, readings
    events = events_of(trace)
    check_trace(events, size, 2 * uncertainty)
    assert [s["executions"] for s in about["steps"]] == [2, 8]
    assert len({each["pid"] for each in about["processes"]}) == size
    assert sum(each["recorded"] for each in about["processes"]) == sum(
        e["ph"] == "X" for e in events
    )
    assert about["world"]["kind"] == "mpi"
    assert "MPI" in about["versions"]["mpi"] or about["versions"]["mpi"]


def with_error(call: Any, text: str) -> None:
    try:
        call()
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error: {text}")


if __name__ == "__main__":
    main()
