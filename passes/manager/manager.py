"""Run a pipeline: check that it fits together, run each pass, verify, time and dump."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from ...ir.ops.clone import clone
from ...ir.ops.module import Module
from ...ir.phases import Phase
from ...ir.text.diagnostics import IRError
from ...ir.text.printer import format_module
from ...ir.verify.verifier import verify
from ..base import Pass, Pipeline
from ..check.check_types import CheckTypes


class PipelineError(ValueError):
    """Passes in an order that cannot work; raised before any of them runs."""


class DishonestPassError(AssertionError):
    """A pass that said it changed nothing and did, or the reverse: an error in that pass."""


@dataclass(frozen=True)
class PassReport:
    """The report of one pass.

    Attributes:
        name: the pass's name.
        seconds: how long it ran, verification and dumps apart.
        changed: what it answered.
        ops: number of ops of all programs after it.
    """

    name: str
    seconds: float
    changed: bool
    ops: int


class DumpSink(Protocol):
    """Takes the text of the module after the passes that changed it."""

    def write(self, step: int, label: str, text: str) -> None:
        """`step` counts passes from 1; step 0 is the module as it came, labelled by its phase."""


OnPass = Callable[[Pass, Module, PassReport], None]


@dataclass(frozen=True)
class PassManager:
    """Runs passes in order.

    Attributes:
        pipeline: the passes.
        verify: whether to verify the module.
        each: whether to do so before the first pass, and after each that changed it, so that an
            error names the pass; or only where a phase ends, and at the end.
        check: whether to hold each pass to its answer by comparing the text before and after.
        dump: where texts go, if anywhere.
        on_pass: called after each pass, and its verification.
    """

    pipeline: Pipeline
    verify: bool = True
    each: bool = True
    check: bool = False
    dump: DumpSink | None = None
    on_pass: OnPass | None = None

    def run(self, module: Module) -> list[PassReport]:
        """Run the pipeline on `module`, in place.

        Raises:
            PipelineError: the passes do not fit the module's phase or one another.
            IRError: the module is invalid, or a pass cannot compile it. A module that a pass has
                made invalid is named as that pass's error.
            DishonestPassError: with `check`, a pass answered wrongly whether it changed anything.
        """
        check_pipeline(self.pipeline, module.phase)
        with _collector_paused():
            return self._run(module)

    def _run(self, module: Module) -> list[PassReport]:
        if self.verify and self.each:
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
                self._after_phase(module)
                is_stale = False
            if self.on_pass is not None:
                self.on_pass(pass_, module, report)
        return reports

    def _after_change(self, step: int, pass_: Pass, module: Module) -> None:
        # The dump comes first: who reads of an invalid module wants to see it.
        if self.dump is not None:
            self.dump.write(step, f"after-{pass_.name}", format_module(module))
        if not (self.verify and self.each):
            return
        try:
            verify(module)
        except IRError as error:
            error.add_note(f"the module was valid until pass '{pass_.name}' changed it")
            raise

    def _after_phase(self, module: Module) -> None:
        """Verify what no single pass has been verified for."""
        if self.verify and not self.each:
            verify(module)


def run_on_copy(
    pipeline: Pipeline, module: Module, dump: DumpSink | None = None
) -> tuple[Module, list[PassReport]]:
    """Run a pipeline on a copy of a module, which stays as it is.

    The copy is verified where a phase ends, and at the end. If anything is wrong, all is done once
    more and verified after each pass: the error names the pass.

    Returns:
        The copy, and what each pass did.

    Raises:
        PipelineError, IRError: as `PassManager.run` does.
    """
    if dump is None:
        copy = clone(module)
        with suppress(Exception):
            return copy, PassManager(pipeline, each=False).run(copy)
    copy = clone(module)
    return copy, PassManager(pipeline, dump=dump).run(copy)


def check_pipeline(pipeline: Pipeline, phase: Phase) -> Phase:
    """The phase that a module in `phase` will be in after `pipeline`.

    Raises:
        PipelineError: a pass would find the module in a phase that it does not accept.
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
    """A table of what each pass did and how long it took."""
    width = max([len(report.name) for report in reports], default=0)
    lines = [
        f"{report.seconds * 1e3:9.1f} ms  {report.name:<{width}}  {report.ops:>8} ops"
        f"{'' if report.changed else '  unchanged'}"
        for report in reports
    ]
    total = sum(report.seconds for report in reports)
    return "\n".join([*lines, f"{total * 1e3:9.1f} ms  in all"]) + "\n"


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python from looking for garbage cycles, of which passes make next to none.

    Each search visits every op and value made so far; on large modules they took half of the time.
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
    ops = sum(len(program.ops) for program in module.programs)
    return PassReport(pass_.name, seconds, changed, ops)


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
