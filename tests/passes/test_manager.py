"""The pass manager: its checks, its measurements, and the files that it writes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from cg.ir.ops import Constant, Value
from cg.ir.ops.module import Module
from cg.ir.phases import Phase
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module
from cg.ir.types import DType, Place, TensorType
from cg.launch.api.dumps import Dump
from cg.passes.base import Pass
from cg.passes.manager.manager import (
    DishonestPassError,
    PassManager,
    PassReport,
    PipelineError,
    check_pipeline,
    format_reports,
    run_on_copy,
)
from cg.passes.manager.registry import parse_pipeline

TEXT = """
module @step phase=traced world=2 {
  function @f(f32[4]) -> (f32[4]) {actor = a, effect = read}
  program @step(%x: f32[4]@{0..1}) {
    %unused = view(%x) {dim = 0, length = 2, start = 0} : f32[2]@0
    %h = call(%x) {fn = @f} : f32[4]@1
    return(%h) {at = {0..1}}
  }
}
"""


@dataclass(frozen=True)
class Grow(Pass):
    """Appends constants before the return, and answers as it is told."""

    count: int = 0
    answer: bool = True
    name_of_value: str | None = None

    name: ClassVar[str] = "grow"
    requires: ClassVar[tuple[Phase, ...]] = tuple(Phase)

    def run(self, module: Module) -> bool:
        for number in range(self.count):
            type_ = TensorType(DType.F32, (), Place.of(0))
            value = Value(self.name_of_value or f"new.{number}", type_)
            module.program.ops.insert(-1, Constant((), (value,), fill=1.0))
        return self.answer


@dataclass
class Texts:
    """A dump in memory."""

    written: list[tuple[int, str, str]] = field(default_factory=list)

    def write(self, step: int, label: str, text: str) -> None:
        self.written.append((step, label, text))


def test_a_pipeline_in_a_wrong_order_is_refused_before_it_runs(
    read: Callable[[str], Module],
) -> None:
    module = read(TEXT)
    pipeline = parse_pipeline("dce,split-transfers,insert-transfers")
    with pytest.raises(
        PipelineError,
        match="pass 'split-transfers' needs a module in phase placed, "
        "but it starts in phase traced",
    ):
        PassManager(pipeline).run(module)
    assert module == read(TEXT)


def test_a_wrong_order_names_the_pass_that_left_the_phase() -> None:
    with pytest.raises(
        PipelineError,
        match="'differentiate' needs a module in phase traced, "
        "but pass 'insert-transfers' leaves it in phase placed",
    ):
        check_pipeline(parse_pipeline("insert-transfers,dce,differentiate"), Phase.TRACED)


def test_the_phase_at_the_end_is_known() -> None:
    assert check_pipeline(parse_pipeline("dce,insert-transfers,dce"), Phase.TRACED) is Phase.PLACED
    assert check_pipeline((), Phase.ASYNC) is Phase.ASYNC


def test_reports_count_and_are_formatted(read: Callable[[str], Module]) -> None:
    module = read(TEXT)
    reports = PassManager(parse_pipeline("dce,cse,insert-transfers,split-transfers")).run(module)
    assert [(r.name, r.changed, r.ops) for r in reports] == [
        ("dce", True, 2),
        ("cse", False, 2),
        ("insert-transfers", True, 3),
        ("split-transfers", True, 4),
    ]
    assert all(report.seconds >= 0 for report in reports)
    table = format_reports(
        [PassReport("dce", 0.0123, True, 2, ("a choice",)), PassReport("cse", 0.5, False, 2)]
    )
    assert table == (
        "     12.3 ms  dce         2 ops\n"
        "              a choice\n"
        "    500.0 ms  cse         2 ops  unchanged\n"
        "    512.3 ms  in all\n"
    )


def test_dumps_are_written_only_after_changes(
    read: Callable[[str], Module], tmp_path: Path
) -> None:
    pipeline = parse_pipeline("dce,cse,insert-transfers,split-transfers")
    directory = tmp_path / "new" / "dump"
    module = read(TEXT)
    PassManager(pipeline, dump=Dump(directory, "step")).run(module)
    assert sorted(path.name for path in directory.iterdir()) == [
        "step.000.traced.cg",
        "step.001.after-dce.cg",
        "step.003.after-insert-transfers.cg",
        "step.004.after-split-transfers.cg",
    ]
    assert parse_module((directory / "step.000.traced.cg").read_text()) == read(TEXT)
    assert parse_module((directory / "step.004.after-split-transfers.cg").read_text()) == module


@pytest.mark.parametrize(
    ("liar", "message"),
    [
        (Grow(1, False), "pass 'grow' reported no change but made a change"),
        (Grow(0, True), "pass 'grow' reported a change but made no change"),
    ],
)
def test_a_dishonest_pass_is_caught(
    read: Callable[[str], Module], liar: Pass, message: str
) -> None:
    with pytest.raises(DishonestPassError, match=message):
        PassManager((liar,), check=True).run(read(TEXT))
    PassManager((liar,), check=False).run(read(TEXT))


def test_a_pass_that_breaks_the_module_is_named_and_the_dump_shows_it(
    read: Callable[[str], Module],
) -> None:
    texts = Texts()
    with pytest.raises(IRError, match="%h is defined twice") as caught:
        PassManager((Grow(1, True, "h"),), dump=texts).run(read(TEXT))
    assert caught.value.__notes__ == ["the module was valid until pass 'grow' changed it"]
    assert [(step, label) for step, label, _ in texts.written] == [(0, "traced"), (1, "after-grow")]
    assert "%h = constant()" in texts.written[1][2]


def test_on_a_copy_the_pass_is_named_as_well(read: Callable[[str], Module]) -> None:
    """Although the module is verified only where a phase ends, and at the end."""
    module = read(TEXT)
    copy, (report,) = run_on_copy((Grow(1),), module)
    assert (report.name, len(copy.program.ops)) == ("grow", len(module.program.ops) + 1)
    ends = parse_pipeline("insert-transfers")
    for pipeline in ((Grow(1, True, "h"),), (Grow(1, True, "h"), *ends)):
        with pytest.raises(IRError, match="%h is defined twice") as caught:
            run_on_copy(pipeline, module)
        assert caught.value.__notes__ == ["the module was valid until pass 'grow' changed it"]
    assert format_module(module) == format_module(read(TEXT))


def test_a_phase_is_verified_where_it_ends(read: Callable[[str], Module]) -> None:
    for pipeline in (
        (Grow(1, True, "h"),),
        (Grow(1, True, "h"), *parse_pipeline("insert-transfers")),
    ):
        with pytest.raises(IRError, match="%h is defined twice") as caught:
            PassManager(pipeline, verify_each=False).run(read(TEXT))
        assert not hasattr(caught.value, "__notes__")


def test_an_invalid_module_is_refused_before_the_first_pass(read: Callable[[str], Module]) -> None:
    module = read(TEXT)
    Grow(1, True, "h").run(module)
    with pytest.raises(IRError, match="%h is defined twice") as caught:
        PassManager(()).run(module)
    assert not hasattr(caught.value, "__notes__")
    PassManager((), verify=False).run(module)
    with pytest.raises(IRError, match="%h is defined twice"):
        PassManager(parse_pipeline("check-types"), verify=False).run(module)


def test_the_callback_sees_every_pass(read: Callable[[str], Module]) -> None:
    seen: list[tuple[str, bool, int]] = []

    def note(pass_: Pass, module: Module, report: PassReport) -> None:
        assert pass_.name == report.name
        seen.append((report.name, report.changed, len(module.program.ops)))

    PassManager(parse_pipeline("cse,dce"), on_pass=note).run(read(TEXT))
    assert seen == [("cse", False, 3), ("dce", True, 2)]


@pytest.mark.parametrize("was_on", [True, False])
def test_the_garbage_collector_is_as_before_also_after_an_error(
    read: Callable[[str], Module], was_on: bool
) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        states: list[bool] = []
        manager = PassManager((Grow(1),), on_pass=lambda *_: states.append(gc.isenabled()))
        manager.run(read(TEXT))
        with pytest.raises(IRError):
            PassManager((Grow(1, True, "h"),)).run(read(TEXT))
        assert states == [False]
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()
