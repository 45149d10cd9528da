"""Count the calls of hosts in steps that are captured whole: one graph a step, and no wait."""

from __future__ import annotations

from functools import partial

import torch

import cg

from .counting import check, counted
from .pipeline import MICROBATCHES, Linear
from .report import Report

STEPS = 10
WARM = 8
"""Steps ahead of those that count, in which graphs are captured."""

COPIES = 2
"""Of an input that comes from the host: to the device, and from there to where the graph reads."""


def profile(report: Report) -> None:
    """Calls of CUDA on all ranks in steps whose input is on the device, and on the host.

    Raises:
        AssertionError: a rank does more than launch one graph a step, and copy its inputs.
    """
    stages = [Linear.on(rank)(64) for rank in range(cg.world_size())]
    x = torch.ones(MICROBATCHES * 64, 64, device="cuda")

    @cg.trace
    def step(x: torch.Tensor) -> None:
        losses = []
        for part in cg.microbatches(x, MICROBATCHES):
            for stage in stages[:-1]:
                part = stage.forward(part)
            losses.append(stages[-1].loss(part))
        cg.backward(cg.mean(losses))

    # Whether ranks give the same is looked at in some executions only, on hosts.
    compiled = step.lower(x).compile(check_inputs=False)
    counted(lambda: None)  # the first profile of a process has more to do
    nothing = counted(lambda: None)
    reads = [len(compiled.module.program_of(rank).params) for rank in range(cg.world_size())]
    for where, given, copies in (("the device", x, 0), ("the host", x.cpu(), COPIES)):
        for _ in range(WARM):
            compiled(given)
        found = counted(partial(_run, compiled, given))
        allowed = [copies * count for count in reads]
        for rank, mine in enumerate(found):
            what = f"input on {where}, rank {rank}: graph launches in a step"
            report.note("profile", what, mine.graphs / STEPS, "", counts=dict(mine.calls))
            report.say(f"    copies in a step: {mine.copies / STEPS:g} of {allowed[rank]} allowed")
            report.say("   ", dict(mine.calls))
        check(found, nothing, STEPS, allowed)
        report.say(f"  nothing else was launched, no host has waited: input on {where}")
    compiled.close()


def _run(compiled: cg.Compiled, x: torch.Tensor) -> None:
    for _ in range(STEPS):
        compiled(x)
