"""`check-deadlock` refuses a program of devices exactly if hosts that wait for them stand still.

The oracle plays hosts and devices by itself: before each op a host waits until all messages that it
has put on its device are over, which is the worst that a call of the host can do. It shares no code
with the checks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cg.ir.ops import Communication, Free, Return, Value, View, Wait
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Module, Program
from cg.ir.text.diagnostics import IRError
from cg.ir.text.printer import format_module
from cg.ir.verify.verifier import verify
from cg.passes.check.check_deadlock import CheckDeadlock
from cg.passes.manager.manager import PassManager
from cg.passes.manager.registry import parse_pipeline
from cg.passes.placement.fabrics import is_by_stream
from tests.passes.random_pipelines import Drawn, Maker, drawn_steps

from ..sampling import scaled
from .mutants import move, renumber, swap

pytestmark = pytest.mark.timeout(300)

PIPELINE = (
    "dce,assign-stages,differentiate{{split_backward={split}}},cse,place,dce,insert-transfers,"
    "choose-transports{{ranks={ranks}}},split-transfers,schedule{{schedule={schedule}}},overlap,"
    "assign-streams"
)
SCHEDULES = ("1f1b", "gpipe", "zb-h1")
EXAMPLES = scaled(160)
PER_EXAMPLE = 12
Message = tuple[int, int]
"""The channel and the number of a message."""


def compiled(drawn: Drawn, schedule: str) -> Module:
    module = Maker(drawn).make()
    ranks = "+".join(["nccl"] * module.world)
    split = str(schedule == "zb-h1").lower()
    text = PIPELINE.format(split=split, ranks=ranks, schedule=schedule)
    PassManager(parse_pipeline(text)).run(module)
    return module


class _Hosts:
    """Every rank's host, and the messages on their devices."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.at = [0] * len(module.programs)
        self.put: list[list[Communication]] = [[] for _ in module.programs]
        self.over: set[Message] = set()
        self.ends = Counter(
            (op.chan, op.seq)
            for program in module.programs
            for op in program.ops
            if isinstance(op, Communication)
        )

    def stand_still(self) -> bool:
        """Let all hosts go as far as they come; True if one does not come to its end."""
        moves = True
        while moves:
            gone = sum(map(self._go, range(len(self.at))))
            moves = self._complete() or gone > 0
        ended = all(at == len(p.ops) for at, p in zip(self.at, self.module.programs, strict=True))
        return not (ended and len(self.over) == len(self.ends))

    def _go(self, rank: int) -> int:
        """Let a host go on until it is blocked; over how many ops it has come."""
        program = self.module.programs[rank]
        before = self.at[rank]
        while self.at[rank] < len(program.ops) and not self._is_blocked(rank, program):
            op = program.ops[self.at[rank]]
            if isinstance(op, Communication):
                self.put[rank].append(op)
            self.at[rank] += 1
        return self.at[rank] - before

    def _is_blocked(self, rank: int, program: Program) -> bool:
        op = program.ops[self.at[rank]]
        under_way = [one for one in self.put[rank] if (one.chan, one.seq) not in self.over]
        if isinstance(op, Wait):
            return any(one.result is op.operands[0] for one in under_way)
        if isinstance(op, Free | View | Return):
            return False
        return any(is_by_stream(self.module.channels[one.chan or 0]) for one in under_way)

    def _complete(self) -> bool:
        heads: Counter[Message] = Counter()
        for put in self.put:
            streams: set[object] = set()
            for op in put:
                message, stream = (op.chan or 0, op.seq or 0), op.stream or op
                if message not in self.over:
                    heads[message] += stream not in streams
                    streams.add(stream)
        ready = [message for message, ends in heads.items() if ends == self.ends[message]]
        self.over.update(ready)
        return bool(ready)


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


def refusal(module: Module) -> str | None:
    try:
        CheckDeadlock().run(module)
    except IRError as error:
        return str(error)
    return None


def test_programs_of_devices_are_refused_just_if_waiting_hosts_stand_still() -> None:
    count: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, derandomize=True)
    @given(drawn=drawn_steps(), schedule=st.sampled_from(SCHEDULES), seed=st.integers(0, 10**9))
    def judge(drawn: Drawn, schedule: str, seed: int) -> None:
        module = compiled(drawn, schedule)
        assert refusal(module) is None
        assert not _Hosts(module).stand_still()
        for mutant in mutants(module, seed):
            said = refusal(mutant)
            assert _Hosts(mutant).stand_still() == (said is not None), (
                f"{said}\n{format_module(mutant)}"
            )
            kind = "good" if said is None else "device" if "its device" in said else "deadlock"
            count[kind] += 1

    judge()
    assert min(count["good"], count["device"], count["deadlock"]) >= EXAMPLES // 10, count
