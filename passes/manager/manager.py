"""Run a pipeline: check that its passes fit together, run each pass, verify, time and dump."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from ...ir.alike.alike_programs import count_ops
from ...ir.ops.clone import clone
from ...ir.ops.module import Module
from ...ir.phases import Phase
from ...ir.text.diagnostics import IRError
from ...ir.text.printer import format_module
from ...ir.verify.verifier import verify
from ..base import Pass, Pipeline
from ..check.check_types import CheckTypes


class PipelineError(ValueError):
    """The order of passes cannot work; raised before any of them runs."""


class DishonestPassError(AssertionError):
    """A pass reported a change but made none, or the reverse: an error in that pass."""


@dataclass(frozen=True)
class PassReport:
    """The report of one pass.

    Attributes:
        name: the name of the pass.
        seconds: how long it ran, without verification and dumps.
        changed: whether the pass reported a change.
        ops: the number of ops of all programs after the pass.
        remarks: lines on what it has decided, for users.
    """

    name: str
    seconds: float
    changed: bool
    ops: int
    remarks: tuple[str, ...] = ()


class DumpSink(Protocol):
    """Takes the text of the module after each pass that has changed it."""

    def write(self, step: int, label: str, text: str) -> None:
        """Take a text; `step` counts passes from 1, and step 0 is the input, labelled by phase."""


OnPass = Callable[[Pass, Module, PassReport], None]


@dataclass(frozen=True)
class PassManager:
    """Runs passes in order.

    Attributes:
        pipeline: the passes.
        verify: whether to verify the module.
        verify_each: whether to verify before the first pass and after each pass that changed the
            module, so that an error names the pass. False: only where a phase ends, and at the end.
        check: whether to compare the text before and after each pass with the pass's report.
        dump: takes the texts, if given.
        on_pass: called after each pass and its verification.
    """

    pipeline: Pipeline
    verify: bool = True
    verify_each: bool = True
    check: bool = False
    dump: DumpSink | None = None
    on_pass: OnPass | None = None

    def run(self, module: Module) -> list[PassReport]:
        """Run the pipeline on `module`, in place.

        Raises:
            PipelineError: the passes do not fit the module's phase, or one another.
            IRError: the module is invalid, or a pass cannot compile it. If a pass has made it
                invalid, a note names the pass.
            DishonestPassError: with `check`, a pass reported wrongly whether it changed anything.
        """
        check_pipeline(self.pipeline, module.phase)
        with _collector_paused():
            return self._run(module)

    def _run(self, module: Module) -> list[PassReport]:
        if self.verify and self.verify_each:
            verify(module)
        if self.dump is not None:
            self.dump.write(0, str(module.phase), format_module(module))
        digest = _digest(module) if self.check else None
        reports = []
        is_stale = False
        for step, pass_ in enumerate(self.pipeline, start=1):
            report = _timed(pass_, module)
            reports.append(report)
            if digest is not None:
                digest = _check_honesty(report, digest, _digest(module))
            if report.changed:
                self._after_change(step, pass_, module)
            is_stale = not isinstance(pass_, CheckTypes) and (is_stale or report.changed)
            if pass_.ensures is not None or (is_stale and step == len(self.pipeline)):
                if self.verify and not self.verify_each:
                    verify(module)
                is_stale = False
            if self.on_pass is not None:
                self.on_pass(pass_, module, report)
        return reports

    def _after_change(self, step: int, pass_: Pass, module: Module) -> None:
        # The dump comes first, so that an invalid module can be read.
        if self.dump is not None:
            self.dump.write(step, f"after-{pass_.name}", format_module(module))
        if not (self.verify and self.verify_each):
            return
        try:
            verify(module)
        except IRError as error:
            error.add_note(f"the module was valid until pass '{pass_.name}' changed it")
            raise


def run_on_copy(
    pipeline: Pipeline, module: Module, dump: DumpSink | None = None
) -> tuple[Module, list[PassReport]]:
    """Run a pipeline on a copy of a module; the module itself does not change.

    The copy is verified where a phase ends, and at the end. If anything is wrong, the pipeline runs
    again on a new copy, which is verified after each pass, so that the error names the pass.

    Returns:
        The copy, and the report of each pass.

    Raises:
        PipelineError, IRError: as `PassManager.run` does.
    """
    if dump is None:
        copy = clone(module)
        with suppress(Exception):
            return copy, PassManager(pipeline, verify_each=False).run(copy)
    copy = clone(module)
    return copy, PassManager(pipeline, dump=dump).run(copy)


def check_pipeline(pipeline: Pipeline, phase: Phase) -> Phase:
    """The phase of a module after `pipeline`, if it is in `phase` before.

    Raises:
        PipelineError: a pass would get the module in a phase that it does not accept.
    """
    reached_by = "it starts"
    for pass_ in pipeline:
        if phase not in pass_.requires:
            accepted = " or ".join(map(str, pass_.requires))
            raise PipelineError(
                f"pass '{pass_.name}' needs a module in phase {accepted}, "
                f"but {reached_by} in phase {phase}"
            )
        if pass_.ensures is not None:
            phase = pass_.ensures
            reached_by = f"pass '{pass_.name}' leaves it"
    return phase


def format_reports(reports: list[PassReport]) -> str:
    """A table of passes: how long each took, the ops after it, whether it changed anything, and its
    remarks.
    """
    width = max([len(report.name) for report in reports], default=0)
    lines = [
        f"{report.seconds * 1e3:9.1f} ms  {report.name:<{width}}  {report.ops:>8} ops"
        f"{'' if report.changed else '  unchanged'}"
        + "".join(f"\n{'':14}{remark}" for remark in report.remarks)
        for report in reports
    ]
    total = sum(report.seconds for report in reports)
    return "\n".join([*lines, f"{total * 1e3:9.1f} ms  in all"]) + "\n"


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python from searching for garbage cycles, since passes make hardly any.

    Each search visits all ops and values so far; on large modules this took half of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _timed(pass_: Pass, module: Module) -> PassReport:
    start = time.perf_counter()
    changed = pass_.run(module)
    seconds = time.perf_counter() - start
    remarks = pass_.remarks(module)
    return PassReport(pass_.name, seconds, changed, count_ops(module), remarks)


def _check_honesty(report: PassReport, before: str, after: str) -> str:
    if report.changed != (before != after):
        said, did = ("a", "no") if report.changed else ("no", "a")
        raise DishonestPassError(
            f"pass '{report.name}' reported {said} change but made {did} change; "
            "this is an error in the pass, please report it with a dump of the module"
        )
    return after


def _digest(module: Module) -> str:
    return hashlib.sha256(format_module(module).encode()).hexdigest()
