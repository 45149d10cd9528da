"""Measures, records and simulates a pipeline on the ranks of a job."""

from __future__ import annotations

import torch

import cg
from cg.launch.measure import link_benchmark as edges
from tests.properties.pipelines import Pipe, ResidualStage, inputs, make_step


def main() -> None:
    torch.set_num_threads(1)
    edges.SIDE = 64  # a fake device is no faster than its host
    pipe = Pipe(tuple(range(cg.world_size())), 4, schedule="zb-h1")
    stages = [ResidualStage.on(rank)(rank) for rank in pipe.ranks]
    lowered = cg.trace(make_step(pipe, stages)).lower(*inputs(pipe))
    compiled = lowered.compile(schedule=cg.schedules.by_name(pipe.schedule))
    costs = cg.measure(compiled, *inputs(pipe), executions=2)
    (recording,) = compiled.record(*inputs(pipe))
    expected = compiled(*inputs(pipe))  # the step itself still runs
    assert torch.isfinite(expected)
    texts = cg.allgather((costs.to_json(), str(compiled.simulate(costs)), str(recording)))
    assert len(set(texts)) == 1, texts
    assert all(link.time(0) >= 0 for link in costs.channels.values())
    assert set(costs.channels) == set(compiled.module.channels)
    assert len({span.rank for span in recording.spans}) == cg.world_size()
    # Ranks of one machine have one clock: no stage starts before the one that it waits for ends.
    first = [
        span for span in recording.spans if span.op.mb == 0 and str(span.op.task).endswith("F0")
    ]
    ends = {rank: max(s.end for s in first if s.rank == rank) for rank in pipe.ranks}
    starts = {rank: min(s.start for s in first if s.rank == rank) for rank in pipe.ranks}
    assert all(ends[r] <= starts[r + 1] for r in pipe.ranks[:-1]), (starts, ends)
    print(f"rank {cg.rank()}: measured")


if __name__ == "__main__":
    main()
