"""`cg-opt`: read IR, run passes over it, and write IR. It needs neither torch nor MPI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ... import passes  # noqa: F401 - importing the package registers every pass
from ...ir.ops.module import Module
from ...ir.text.diagnostics import IRError
from ...ir.text.files import NotTextError, read_text
from ...ir.text.parser import parse_module
from ...ir.text.plan_file import HEAD, PlanFile, PlanFileError
from ...ir.text.printer import format_module
from ...passes.base import OptionError, Pass
from ...passes.check.check_deadlock import CheckDeadlock
from ...passes.check.check_races import CheckRaces
from ...passes.check.check_types import CheckTypes
from ...passes.manager import registry
from ...passes.manager.manager import PassManager, PassReport, PipelineError, format_reports
from ...passes.schedules.orders.base import ScheduleError

_EPILOG = """\
A pipeline is written dce,split-transfers{option=value}. The module that comes out goes to standard
output; everything else, what --print-between and --time-passes print included, goes to standard
error. A plan, as compiled.save writes it, stays a plan, whose programs are proven anew. The exit
status is 1 if the module or the pipeline is wrong.
"""


_USER_ERRORS = (
    IRError,
    PipelineError,
    registry.UnknownPassError,
    OptionError,
    ScheduleError,
    OSError,
    UnicodeDecodeError,
    NotTextError,
    PlanFileError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _arguments().parse_args(arguments)
    try:
        sys.stdout.write(_list_passes() if options.list_passes else _optimise(options))
    except _USER_ERRORS as error:
        notes = "".join(f"\n  note: {note}" for note in getattr(error, "__notes__", ()))
        prefix = "" if isinstance(error, IRError) else "error: "
        sys.stderr.write(f"{prefix}{error}{notes}\n")
        return 1
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cg-opt",
        description="Read a module of IR, run passes over it, and write it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", default="-", help="a .cg file; - is standard input")
    parser.add_argument("--passes", default="", metavar="A,B", help="the pipeline to run")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check the module before the first pass and after each",
    )
    parser.add_argument("--locations", action="store_true", help="write the user's source lines")
    parser.add_argument(
        "--print-between", action="store_true", help="print the module after each pass, to stderr"
    )
    parser.add_argument(
        "--time-passes", action="store_true", help="print what each pass took, to stderr"
    )
    parser.add_argument("--list-passes", action="store_true", help="print all passes, and end")
    return parser


def _optimise(options: argparse.Namespace) -> str:
    """The text of the module that comes out of the pipeline."""
    pipeline = registry.parse_pipeline(options.passes)
    text = sys.stdin.read() if options.file == "-" else read_text(options.file)
    file = "<stdin>" if options.file == "-" else options.file
    plan = PlanFile.of(text, file) if text.startswith(HEAD) else None
    module = parse_module(text, file) if plan is None else plan.module
    if plan is not None:
        pipeline = (*pipeline, CheckTypes(), CheckDeadlock(), CheckRaces())

    def show(pass_: Pass, module: Module, report: PassReport) -> None:
        title = f"after {pass_}" if report.changed else f"after {pass_}: unchanged"
        text = format_module(module, options.locations) if report.changed else ""
        sys.stderr.write(f"// ---- {title}\n{text}")

    manager = PassManager(
        pipeline,
        verify=options.verify,
        check=True,
        on_pass=show if options.print_between else None,
    )
    reports = manager.run(module)
    if options.time_passes:
        sys.stderr.write(format_reports(reports))
    return format_module(module, options.locations) if plan is None else str(plan)


def _list_passes() -> str:
    lines = []
    for name in registry.names():
        cls = registry.lookup(name)
        phases = "|".join(map(str, cls.requires))
        if cls.ensures is not None:
            phases = f"{phases} -> {cls.ensures}"
        lines.append(f"{name}{cls.describe_options()}  [{phases}]\n    {registry.summary(name)}\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
