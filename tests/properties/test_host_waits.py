"""`check-deadlock` refuses a program of devices exactly if hosts that wait for them stand still.

The oracle is `tests/properties/hosts.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cg.ir.ops import Value
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Module, Program
from cg.ir.text.diagnostics import IRError
from cg.ir.text.printer import format_module
from cg.ir.verify.verifier import verify
from cg.passes.manager.manager import PassManager
from cg.passes.manager.registry import parse_pipeline
from tests.passes.random_pipelines import Drawn, Maker, drawn_steps

from ..sampling import scaled
from .hosts import Hosts, refusal
from .mutants import move, renumber, swap

pytestmark = pytest.mark.timeout(300)

PIPELINE = (
    "dce,assign-stages,differentiate{{split_backward={split}}},cse,place,dce,insert-transfers,"
    "choose-transports{{ranks={ranks}}},split-transfers,schedule{{schedule={schedule}}},overlap,"
    "assign-streams"
)
SCHEDULES = ("1f1b", "gpipe", "zb-h1")
EXAMPLES = scaled(160)
PER_EXAMPLE = 40


def compiled(drawn: Drawn, schedule: str) -> Module:
    module = Maker(drawn).make()
    ranks = "+".join(["nccl"] * module.world)
    split = str(schedule == "zb-h1").lower()
    text = PIPELINE.format(split=split, ranks=ranks, schedule=schedule)
    PassManager(parse_pipeline(text)).run(module)
    return module


def waits_are_program(module: Module) -> bool:
    """True if waits for what comes to a device stand behind its posting, as values do."""
    return all(_is_ordered(program) for program in module.programs)


def _is_ordered(program: Program) -> bool:
    known: set[Value] = set(program.params)
    for op in program.ops:
        if not known.issuperset(op.operands):
            return False
        known.update(op.results)
    return True


def mutants(module: Module, seed: int) -> Iterator[Module]:
    number = random.Random(seed).randrange
    for _ in range(PER_EXAMPLE):
        mutant = clone(module)
        for _ in range(1 + number(2)):
            program = mutant.programs[number(len(mutant.programs))]
            (swap if number(4) == 0 else move)(mutant, program, number)
        renumber(mutant)
        try:
            verify(mutant)
        except IRError:
            continue
        if waits_are_program(mutant):
            yield mutant


def test_programs_of_devices_are_refused_just_if_waiting_hosts_stand_still() -> None:
    count: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, derandomize=True)
    @given(drawn=drawn_steps(), schedule=st.sampled_from(SCHEDULES), seed=st.integers(0, 10**9))
    def judge(drawn: Drawn, schedule: str, seed: int) -> None:
        module = compiled(drawn, schedule)
        assert refusal(module) is None
        assert not Hosts(module).stand_still()
        for mutant in mutants(module, seed):
            said = refusal(mutant)
            assert Hosts(mutant).stand_still() == (said is not None), (
                f"{said}\n{format_module(mutant)}"
            )
            kind = "good" if said is None else "device" if "its device" in said else "deadlock"
            count[kind] += 1

    judge()
    assert min(count["good"], count["device"], count["deadlock"]) >= EXAMPLES // 10, count
