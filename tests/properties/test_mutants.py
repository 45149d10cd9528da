"""The checkers refuse exactly those programs that can go wrong when they run.

Valid programs are mutated: instructions change places, waits and conditions of frees are left out,
channels are split and merged, streams merged, messages and operands retargeted. Of the mutants that
are still programs, in that the verifier takes them, `check-deadlock` and `check-races` refuse one
just if the virtual world finds an execution of it that goes wrong (`mutants.py` says how).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cg.ir.ops.clone import clone
from cg.ir.ops.module import Module
from cg.ir.text.diagnostics import IRError
from cg.ir.text.printer import format_module
from cg.ir.verify.verifier import verify
from cg.passes.check.check_deadlock import CheckDeadlock
from cg.passes.check.check_races import CheckRaces
from cg.passes.manager.manager import PassManager
from cg.passes.manager.registry import parse_pipeline
from tests.passes.random_pipelines import Drawn, Maker, drawn_steps

from ..sampling import scaled
from .abstract_machine import Hosts
from .abstract_memory import Terms
from .interleavings import judge
from .mutants import Bench, mutate

pytestmark = pytest.mark.timeout(300)

FRONT = (
    "dce,assign-stages,differentiate{split_backward=%s},cse,place,dce,insert-transfers,"
    "split-transfers"
)
BACKS = (
    "schedule{schedule=1f1b},overlap,assign-streams,plan-buffers",
    "schedule{schedule=gpipe},assign-streams,plan-buffers",
    "schedule{schedule=1f1b},overlap{lookahead=1},plan-buffers,assign-streams",
    "schedule{schedule=auto},overlap,assign-streams,plan-buffers",
)
EXAMPLES = scaled(400)
"""Of a default run: not halved, so that enough have each verdict."""
PER_EXAMPLE = 16
WANTED = scaled(2400)
"""Mutants that are programs, of a default run; of each verdict a twentieth at least."""


def compile_step(drawn: Drawn, back: str) -> Module:
    drawn.world, drawn.microbatches = 2 + drawn.world % 2, min(drawn.microbatches, 2)
    drawn.actors = [(rank + at) % drawn.world for at, rank in enumerate(drawn.actors)]
    drawn.stages = drawn.stages[:3]
    drawn.skips, drawn.mixes = drawn.skips[:3], drawn.mixes[:3]
    if drawn.opaque is not None and drawn.opaque >= len(drawn.stages) - 1:
        drawn.opaque = None
    module = Maker(drawn).make()
    for name, function in module.functions.items():
        # What shares the memory of an input of the step cannot be destroyed when it is freed.
        if ".f0." in name or name.startswith("mix"):
            module.functions[name] = replace(function, aliases=())
    split = str("schedule=auto" in back).lower()
    PassManager(parse_pipeline(f"{FRONT % split},{back}")).run(module)
    return module


def refusal(module: Module, blocking: bool = True) -> str | None:
    """The checkers' complaint about a module; None if they take it."""
    try:
        CheckDeadlock().run(module)
        CheckRaces(blocking).run(module)
    except IRError as error:
        return str(error)
    return None


def test_the_checkers_agree_with_the_virtual_world_on_every_mutant() -> None:
    count: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
    )
    @given(drawn=drawn_steps(), back=st.sampled_from(BACKS), seed=st.integers(0, 10**9))
    def judge(drawn: Drawn, back: str, seed: int) -> None:
        module = compile_step(drawn, back)
        assert refusal(module) is None
        number = random.Random(seed).randrange
        for _ in range(PER_EXAMPLE):
            mutant = clone(module)
            kinds: list[str] = []
            while mutant == module:
                kinds += [mutate(mutant, number) for _ in range(1 + number(3))]
            try:
                verify(mutant)
            except IRError:
                count["no program"] += 1
                continue
            judge_one(mutant, kinds, count)

    judge()
    well_formed = count["good"] + count["deadlock"] + count["race"]
    assert well_formed >= WANTED, count
    assert min(count["good"], count["deadlock"], count["race"]) >= WANTED // 20, count


def judge_one(mutant: Module, kinds: list[str], count: Counter[str]) -> None:
    said = refusal(mutant)
    wrong = Bench().goes_wrong(mutant)
    if said is not None and not wrong:
        # The virtual world has no transport that keeps what is sent, whose sender goes on early.
        wrong = bool(judge(mutant, Terms(), hosts=Hosts.BLOCKING).faults)
    assert wrong == (said is not None), f"after {kinds}: {said}\n{format_module(mutant)}"
    if said is None:
        count["good"] += 1
    else:
        count["deadlock" if "deadlock" in said else "race"] += 1
        # What goes wrong on a CPU does so all the more where nothing waits.
        assert refusal(mutant, blocking=False) is not None
