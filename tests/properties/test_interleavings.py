"""Each small change of a dump is refused by the checks, or runs as well as the original.

The mutants of `text_mutants.py` pass what a dump has to pass before it runs: the parser, the
verifier, `check-deadlock` and `check-races`. What they let through is judged by the abstract
machine of `interleavings.py`: in no interleaving does it stand still, race, or read what is not
there. Without races it computes one thing in all interleavings. Where only that has changed which
says where and when ops are done, this is what the original computes.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from benchmarks.synthetic_groups import GroupSteps, group_module
from cg.ir.attributes import Effect
from cg.ir.ops import Call
from cg.ir.ops.module import (
    Module,
)
from cg.ir.phases import Phase
from cg.ir.text.diagnostics import (
    IRError,
)
from cg.ir.text.parser import (
    parse_module,
)
from cg.ir.text.printer import (
    format_module,
)
from cg.ir.verify.verifier import verify
from cg.passes import schedules
from cg.passes.check.check_deadlock import CheckDeadlock
from cg.passes.check.check_races import CheckRaces
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import (
    default_pipeline,
)
from cg.passes.placement.fabrics import Fabrics
from tests.passes.random_pipelines import Drawn, Maker
from tests.text.test_text import FILES, read_cases

from .abstract_memory import Terms
from .interleavings import Verdict, explore, judge
from .text_mutants import Mutant, mutants

pytestmark = pytest.mark.timeout(3000)

NCCL = Fabrics("nccl+nccl", "f32")
HCCL = Fabrics("hccl+hccl", "f32", "hccl")
SAMPLE = 24
"""Mutants of each program that a default run judges."""


def pipeline(stages: int, *, trained: bool = True, opaque: int | None = None) -> Module:
    """A traced pipeline of two microbatches over two ranks; stage i is on rank i % 2."""
    drawn = Drawn(
        world=2,
        microbatches=2,
        actors=[stage % 2 for stage in range(stages)],
        stages=list(range(stages)),
        skips=[[] for _ in range(stages)],
        mixes=[False] * stages,
        summed=True,
        reduced=False,
        trained=trained,
        opaque=opaque,
        saves=True,
        gathered=False,
    )
    return Maker(drawn).make()


def compiled(
    module: Module, schedule: str, fabrics: Fabrics | None = None, in_flight: int = 0
) -> str:
    """The dump of a module behind the pipeline of `compile`."""
    chosen = schedules.by_name(schedule)
    passes = default_pipeline(chosen, fabrics=fabrics, in_flight=in_flight)
    PassManager(passes, check=True).run(module)
    return format_module(module)


def stored() -> Module:
    """The traced step of tests/text/schedule-fsdp.cg, whose parameters lie in pieces."""
    (file,) = [file for file in FILES if file.stem == "schedule-fsdp"]
    return parse_module(read_cases(file)[0].source)


def exchanged() -> str:
    """The step of tests/text/schedule-rows.cg, whose experts two ranks share."""
    (file,) = [file for file in FILES if file.stem == "schedule-rows"]
    module = parse_module(read_cases(file)[0].source)
    passes = default_pipeline(schedules.by_name("1f1b"))
    first = [each.name for each in passes].index("split-transfers")
    PassManager(passes[first:], check=True).run(module)
    return format_module(module)


PROGRAMS: dict[str, Callable[[], str]] = {
    "1f1b": lambda: compiled(pipeline(2), "1f1b"),
    "1f1b nccl": lambda: compiled(pipeline(2), "1f1b", NCCL),
    "1f1b hccl": lambda: compiled(pipeline(2), "1f1b", HCCL),
    "zb-h1": lambda: compiled(pipeline(2), "zb-h1"),
    "interleaved nccl": lambda: compiled(pipeline(4), "interleaved", NCCL),
    "tp": lambda: compiled(group_module(GroupSteps(((1, 2),), microbatches=2)), "1f1b"),
    "dp nccl": lambda: compiled(group_module(GroupSteps(((2, 1),), microbatches=2)), "1f1b", NCCL),
    "fsdp": lambda: compiled(stored(), "1f1b"),
    "fsdp nccl": lambda: compiled(stored(), "gpipe", NCCL),
    "rows of experts": exchanged,
    "driven": lambda: compiled(pipeline(2, trained=False), "1f1b", NCCL, in_flight=2),
    "driven, announced": lambda: compiled(
        pipeline(2, trained=False, opaque=0), "1f1b", NCCL, in_flight=2
    ),
}


def refuse(text: str) -> Module | str:
    """The module of a dump that may run; or else who refuses it."""
    try:
        module = parse_module(text)
    except IRError:
        return "parser"
    for name, check in (
        ("verifier", verify),
        ("check-deadlock", CheckDeadlock().run),
        ("check-races", CheckRaces().run),
    ):
        try:
            check(module)
        except IRError:
            return name
    return module


State = tuple[int | None, str | None]


def order_of_calls(module: Module) -> dict[State, list[tuple[Effect, list[str]]]]:
    """For each actor on each rank its calls, as far as their order counts.

    Reads side by side may change places, and so may what adds to gradients. To change places with
    anything else is another program: its value is not that of the original.
    """
    found: dict[State, list[tuple[Effect, list[str]]]] = defaultdict(list)
    for program in module.programs:
        for op in program.ops:
            if not isinstance(op, Call):
                continue
            function = module.functions[op.fn.name]
            if function.effect is Effect.PURE or function.actor is None:
                continue
            runs = found[program.rank, function.actor]
            commutes = function.effect in (Effect.READ, Effect.ACCUMULATE)
            if not (commutes and runs and runs[-1][0] is function.effect):
                runs.append((function.effect, []))
            names = ", ".join(value.name for value in op.operands)
            runs[-1][1].append(f"{function.name}({names}) {op.key}")
            runs[-1][1].sort()
    return found


@dataclass
class Judged:
    """The judgement of a program's mutants.

    Attributes:
        count: the mutants by what became of them.
        holes: those that the checks let through, and that can go wrong.
    """

    count: Counter[str]
    holes: list[str]


class Judge:
    """Judges the mutants of one dump."""

    def __init__(self, text: str, driven: bool = False) -> None:
        self.text = text
        self.driven = driven
        self.terms = Terms()
        module = refuse(text)
        assert isinstance(module, Module), f"{module} refuses\n{text}"
        self.original = self._judge(module)
        self.calls = order_of_calls(module)

    def _judge(self, module: Module) -> Verdict:
        return judge(module, self.terms, driven=self.driven)

    def all(self, sample: int | None) -> Judged:
        """Judge all mutants, or a sample of them."""
        assert not self.original.faults, f"{self.original.faults}\n{self.text}"
        found = list(mutants(self.text))
        if sample is not None and sample < len(found):
            found = random.Random(0).sample(found, sample)
        judged = Judged(Counter(), [])
        for mutant in found:
            module = refuse(mutant.text)
            if isinstance(module, str):
                judged.count[f"refused by the {module}"] += 1
            elif faults := self._faults(mutant, module):
                judged.holes.append(f"{mutant.change}\n  {'; '.join(faults[:3])}")
            else:
                judged.count["accepted, and right"] += 1
        return judged

    def _faults(self, mutant: Mutant, module: Module) -> tuple[str, ...]:
        """What can go wrong with a mutant that the checks let through."""
        verdict = self._judge(module)
        same = (verdict.outputs, verdict.states) == (self.original.outputs, self.original.states)
        if verdict.faults or same or not mutant.keeps:
            return verdict.faults
        return () if order_of_calls(module) != self.calls else ("another value",)


def expect_no_holes(judged: Judged, record: Callable[[str, object], None]) -> None:
    for what, count in judged.count.items():
        record(f"mutants {what}", count)
    assert not judged.holes, f"{len(judged.holes)} holes:\n" + "\n".join(judged.holes[:12])


@pytest.mark.parametrize("name", PROGRAMS)
def test_mutants_of_schedules(
    name: str, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    judge_ = Judge(PROGRAMS[name](), driven="driven" in name)
    sample = None if request.config.getoption("--slow") else SAMPLE
    expect_no_holes(judge_.all(sample), record_property)


@cache
def written() -> dict[str, str]:
    """The programs of tests/text that have streams, and that may run."""
    found: dict[str, str] = {}
    for file in FILES:
        for case in read_cases(file):
            for text in filter(None, (case.source, case.expected)):
                module = scheduled(text)
                if module is not None and isinstance(refuse(text), Module):
                    found.setdefault(format_module(module), f"{file.stem}: {case.name}")
    return {name: text for text, name in found.items()}


def scheduled(text: str) -> Module | None:
    """The module of a text, if that is one of programs with streams."""
    try:
        module = parse_module(text)
    except IRError:
        return None
    ops = (op for program in module.programs for op in program.ops)
    is_ready = module.phase is Phase.SCHEDULED and any(op.stream is not None for op in ops)
    return module if is_ready else None


def test_mutants_of_programs_written_by_hand(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    slow = request.config.getoption("--slow")
    judged = Judged(Counter(), [])
    for name, text in written().items():
        one = Judge(text, driven=name.startswith("split-tails")).all(None if slow else 4)
        judged.count += one.count
        judged.holes += [f"{name}: {hole}" for hole in one.holes]
    expect_no_holes(judged, record_property)


SMALL = """
module @step phase=scheduled world=2 {
  function @a.f(f32[4]) -> (f32[4]) {actor = a, aliases = {0 -> 0}, effect = update, kind = graph}
  channel 0 {ranks = {0..1}, slot_bytes = 16, slots = 1}
  channel 1 {ranks = {1,0}, slot_bytes = 16, slots = 0}
  program @0(%x: f32[4]) {
    %h = copy(%x) {stream = compute} : f32[4]
    %h.there = wait(%h) {stream = send} : f32[4]
    %d = send(%h.there) {chan = 0, peer = 1, seq = 0, slot = 0, stream = send} : future<unit>
    %s = wait(%d) {stream = compute} : unit
    free(%h, %s)
    return()
  }
  program @1() {
    %r = recv() {chan = 0, peer = 0, seq = 0, slot = 0, stream = recv} : future<f32[4]>
    %v = wait(%r) {stream = compute} : f32[4]
    %w = call(%v) {fn = @a.f, stream = compute} : f32[4]
    free(%v)
    free(%w)
    return()
  }
}
"""


def runnable() -> Iterator[tuple[str, Module]]:
    """Mutants of a small program that the verifier takes, right or wrong."""
    for mutant in mutants(format_module(parse_module(SMALL))):
        try:
            module = parse_module(mutant.text)
            verify(module)
            CheckDeadlock().run(module)
        except IRError:
            continue
        yield mutant.change, module


def test_a_few_runs_show_what_all_interleavings_can_do(request: pytest.FixtureRequest) -> None:
    """The machine that holds one op after the other is compared with one that plays everything."""
    found = list(runnable())
    if not request.config.getoption("--slow"):
        refused = [pair for pair in found if refuse(format_module(pair[1])) == "check-races"]
        others = [pair for pair in found if pair not in refused]
        found = refused[:6] + random.Random(0).sample(others, 6)
    wrong = 0
    for change, module in found:
        terms = Terms()
        verdict = judge(module, terms)
        faults, ends = explore(module, terms)
        assert bool(verdict.faults) == bool(faults), f"{change}: {verdict.faults}, {faults}"
        if not faults:
            assert len(ends) == 1, change
        wrong += bool(faults)
    assert 0 < wrong < len(found)
