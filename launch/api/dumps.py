"""Write the module after each pass, the schedule and the costs of a compilation to a directory."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...backends.base import World
from ...backends.failures.fallbacks import Fallbacks
from ...backends.failures.participants import is_device_only
from ...backends.per_world import PerWorld
from ...ir.ops.module import Module
from ...passes.lower.capture import describe
from ...passes.manager.manager import PassReport, format_reports
from ...passes.simulate.program_grid import format_grid
from ...tracer.record.trace import Trace
from ..pictures.program_timeline import picture_in_units
from ..pictures.timeline_html import timeline_html
from ..pictures.timeline_svg import timeline_svg
from ..world.devices import fabrics_of
from .compile_options import CompileOptions


@dataclass(frozen=True)
class Dump:
    """The directory and the file names of one compilation's dump.

    Attributes:
        directory: made if it does not exist.
        prefix: the step's name; the n-th compilation of a step of this name, in this process and to
            this directory, adds `-n`.
        passes: a pattern in the names of the passes that write their module; None for all.
        is_wanted: True if this rank writes its compilation; otherwise it writes only findings
            of its runs.
    """

    directory: Path
    prefix: str
    passes: re.Pattern[str] | None = None
    is_wanted: bool = True

    def write(self, step: int, label: str, text: str) -> None:
        """Write `prefix.005.after-split-transfers.cg`; see `DumpSink`."""
        if self.passes is None or self.passes.search(label.removeprefix("after-")):
            self.add(f"{step:03d}.{label}.cg", text)

    def finish(self, module: Module, reports: Sequence[PassReport]) -> None:
        """Write the schedule as a grid and as timelines, and what each pass did and cost."""
        self.add("grid.txt", format_grid(module))
        timeline = picture_in_units(module)
        self.add("timeline.svg", timeline_svg(timeline))
        self.add("timeline.html", timeline_html(timeline))
        self.add("passes.txt", format_reports(list(reports)))

    def remove(self, name: str) -> None:
        """Remove the file of this name that an earlier program may have written."""
        (self.directory / f"{self.prefix}.{name}").unlink(missing_ok=True)

    def append(self, name: str, text: str) -> None:
        """Append to the file of this name, while the step runs."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / f"{self.prefix}.{name}").open("a", encoding="utf-8") as file:
            file.write(text)

    def add(self, name: str, text: str) -> None:
        """Write another text of the same compilation."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / f"{self.prefix}.{name}").write_text(text, encoding="utf-8")


def make_dump(options: CompileOptions, name: str, world: World) -> Dump | None:
    """Make the dump of a compilation; None if it writes nothing.

    Args:
        options: of the compilation; their folder comes before that of the environment.
        name: of the step.
        world: this process's; ranks other than rank 0 add their number to the names of files.
    """
    settings = options.settings
    directory = settings.dump if options.dump is None else Path(options.dump)
    rank = world.rank
    if directory is None:
        return None
    compilations = _compilations.of(world, Counter)
    compilations[directory.absolute(), name] += 1
    count = compilations[directory.absolute(), name]
    prefix = name if count == 1 else f"{name}-{count}"
    prefix = prefix if rank == 0 else f"{prefix}.rank{rank}"
    is_wanted = settings.dump_ranks is None or rank in settings.dump_ranks
    return Dump(directory, prefix, settings.dump_passes, is_wanted)


def dump_reports(trace: Trace, module: Module, world: World, sink: Dump, is_driven: bool) -> None:
    """Write which layers compute in float8, and which device graphs the programs have, if any."""
    if trace.float8:
        sink.add("float8.txt", "".join(f"{line}\n" for line in trace.float8))
    fabrics = fabrics_of(world)
    if fabrics is not None:
        whole = not is_driven or is_device_only(module)
        sink.add("graphs.txt", describe(module, fabrics, whole))


def fallbacks_of(module: Module, world: World, dumped: Dump | None) -> Fallbacks:
    """Make the list of this rank's graphs that are not replayed; with a dump it is written, too."""
    if dumped is None:
        return Fallbacks(module, world.rank)
    if not dumped.is_wanted:
        dumped.remove("graphs.txt")
    return Fallbacks(module, world.rank, functools.partial(dumped.append, "graphs.txt"))


_compilations: PerWorld[Counter[tuple[Path, str]]] = PerWorld()
"""The number of compilations, by directory and name of the step."""
