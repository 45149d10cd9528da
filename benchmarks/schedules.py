"""Every schedule: bubble and activations by formula, on paper, and as run on CPU ranks.

    python -m cg.launch -n 4 benchmarks/schedules.py [--ranks 2 4] [--only auto] [--json FILE]

The runs are synthetic: stages sleep instead of computing, so that a rank needs no core. What calls
and messages cost is measured once for each layout of stages, with 4 microbatches and one schedule;
from that the makespans of the other schedules and sizes are foreseen, and held against what the
calls of real executions take from first to last. What `auto` finds, in the memory of 1F1B and as
`auto-2p` in twice as much, it finds with the measured costs; its gradients are held against those
of 1F1B, bit by bit. Fewer ranks than there are leave the others idle.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import closed_forms
import torch
from sleeping import Times, batch, make_stages, make_step

import cg
from cg.passes.schedules import Pipeline, Schedule
from cg.passes.simulate.schedule_simulator import Simulation, simulate

COSTS = (Times(12.0, 12.0, 12.0), Times(14.0, 14.0, 7.0))
RANKS = (2, 4)
MICROBATCHES = (4, 8)


@dataclass(frozen=True)
class Layout:
    """How stages lie on ranks, and which schedules are run on them.

    Attributes:
        chunks: stages of each rank.
        names: of the schedules; the first of those that split backwards, and of those that do
            not, is measured for the others.
    """

    chunks: int
    names: tuple[str, ...]

    def ranks(self, p: int) -> tuple[int, ...]:
        line = tuple(range(p))
        vee = "zb-v" in self.names
        return line + line[::-1] if vee else line * self.chunks


LAYOUTS = (
    Layout(1, ("gpipe", "1f1b", "zb-h1", "zb-h2", "auto", "auto-2p")),
    Layout(2, ("interleaved", "looped-bfs", "auto", "auto-2p")),
    Layout(2, ("zb-v", "dualpipe-v", "auto", "auto-2p")),
)


@dataclass(frozen=True)
class Row:
    """One schedule of one size. Times are in milliseconds; bubbles are shares of the makespan.

    Attributes:
        formula_bubble, formula_activations: closed forms, where there are any.
        paper_bubble, paper_activations: of the schedule, with the nominal times and no transfers.
        predicted, predicted_bubble: of the compiled programs, with the measured costs.
        measured, measured_bubble: medians over the executions.
        error: of the prediction, as a share of what was measured.
        chosen: what `auto` says of its choice.
        gradients_of_1f1b: of what `auto` found, whether all ranks have the gradients of 1F1B.
    """

    schedule: str
    ranks: int
    microbatches: int
    tf: float
    tb: float
    tw: float
    formula_bubble: float | None
    paper_bubble: float
    formula_activations: float | None
    paper_activations: float
    predicted: float
    measured: float
    predicted_bubble: float
    measured_bubble: float
    error: float
    chosen: str = ""
    gradients_of_1f1b: bool | None = None


@dataclass
class Pipe:
    """The stages of one layout and their costs; making `costs` is collective."""

    layout: Layout
    p: int
    times: Times
    executions: int
    costs: dict[bool, cg.Costs] = field(default_factory=dict)
    plain: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return self.layout.ranks(self.p)

    @cached_property
    def stages(self) -> list[Any]:
        return make_stages(self.ranks, self.times)

    def compile(self, schedule: Schedule, m: int) -> cg.Compiled:
        return make_step(self.stages, m).lower(*batch(m)).compile(schedule=schedule)

    def costs_of(self, schedule: Schedule) -> cg.Costs:
        """Measured once for schedules with whole backwards, and once for those with halves."""
        if schedule.splits not in self.costs:
            m = MICROBATCHES[0]
            with self.compile(schedule, m) as compiled:
                costs = cg.measure(compiled, *batch(m), executions=self.executions)
            # Channels have other numbers in other programs; all edges are of one machine.
            usual = median(link.latency for link in costs.channels.values())
            link = cg.Link(usual, max(link.bandwidth for link in costs.channels.values()))
            self.costs[schedule.splits] = replace(costs, channels={}, link=link)
        return self.costs[schedule.splits]

    def row(self, name: str, m: int) -> Row:
        is_search = name.startswith("auto")
        schedule = cg.schedules.auto() if is_search else cg.schedules.by_name(name)
        costs = self.costs_of(schedule)
        if is_search:
            schedule = cg.schedules.auto(2 * self.p if name == "auto-2p" else None, costs)
        with self.compile(schedule, m) as compiled:
            predicted = compiled.simulate(costs)
            found = compiled.record(*batch(m), executions=self.executions + 1)[1:]
            gradients = self.gradients(compiled, m) if is_search else []
            chosen = compiled.schedule_report
        agrees: bool | None = None
        if is_search:
            pairs = zip(gradients, self.gradients_of_1f1b(m), strict=True)
            agrees = all(cg.allgather(all(torch.equal(one, other) for one, other in pairs)))
        measured = median(run.makespan for run in found)
        paper = self.on_paper(schedule, m)
        v, times = self.layout.chunks, self.times
        idle = closed_forms.bubble(name, self.p, m, v, times)
        return Row(
            name,
            self.p,
            m,
            *asdict(times).values(),
            formula_bubble=None if idle is None else idle / (idle + m * times.whole),
            paper_bubble=paper.bubble_ratio,
            formula_activations=closed_forms.activations(name, self.p, m, v),
            paper_activations=max(paper.peak_activations),
            predicted=predicted.makespan,
            measured=measured,
            predicted_bubble=predicted.bubble_ratio,
            measured_bubble=median(run.bubble_ratio for run in found),
            error=predicted.makespan / measured - 1,
            chosen=chosen,
            gradients_of_1f1b=agrees,
        )

    def gradients(self, compiled: cg.Compiled, m: int) -> list[torch.Tensor]:
        """What one execution gives the weights of this rank's stages; collective."""
        mine = [stage.local.weight for stage in self.stages if stage.is_local]
        for weight in mine:
            weight.grad = None
        compiled(*batch(m))
        return [weight.grad.clone() for weight in mine]

    def gradients_of_1f1b(self, m: int) -> list[torch.Tensor]:
        """The same under 1F1B; collective."""
        if m not in self.plain:
            with self.compile(cg.schedules.one_f_one_b(), m) as compiled:
                self.plain[m] = self.gradients(compiled, m)
        return self.plain[m]

    def on_paper(self, schedule: Schedule, m: int) -> Simulation:
        order = schedule(Pipeline(self.ranks, m))
        nominal = cg.Costs(**asdict(self.times)).shared(self.ranks)
        return simulate(order, self.ranks, m, nominal)


def rows(ranks: Sequence[int], executions: int, only: str) -> Iterator[Row]:
    """The rows of all schedules whose names begin so; collective."""
    for p in ranks:
        for times in COSTS:
            for layout in LAYOUTS:
                pipe = Pipe(layout, p, times, executions)
                for name in filter(lambda name: name.startswith(only), layout.names):
                    for m in MICROBATCHES:
                        yield pipe.row(name, m)


def table(found: Sequence[Row]) -> str:
    """A line for each row, as Markdown; shares in per cent, times in milliseconds."""

    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:g}"

    lines = [
        "| schedule | p | m | tf, tb, tw | bubble: formula | paper | activations: formula "
        "| paper | makespan: predicted | measured | error | bubble: predicted | measured |",
        "|" + " --- |" * 13,
    ]
    for row in found:
        cells = (
            f"`{row.schedule}`",
            str(row.ranks),
            str(row.microbatches),
            ", ".join(map(number, (row.tf, row.tb, row.tw))),
            share(row.formula_bubble),
            share(row.paper_bubble),
            number(row.formula_activations),
            number(row.paper_activations),
            f"{row.predicted:.1f}",
            f"{row.measured:.1f}",
            f"{row.error:+.1%}",
            share(row.predicted_bubble),
            share(row.measured_bubble),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure on all ranks; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--executions", type=int, default=8, help="of each schedule")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="in the pipeline")
    parser.add_argument("--only", default="", help="schedules whose names begin so")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    options = parser.parse_args()
    ranks = [p for p in options.ranks if p <= cg.world_size()]
    found: list[Row] = []
    for row in rows(ranks, options.executions, options.only):
        found.append(row)
        if cg.rank() == 0:
            where = f"{row.ranks} ranks, {row.microbatches} microbatches"
            print(f"{row.schedule}, {where}: {row.error:+.2%}", file=sys.stderr, flush=True)
    if cg.rank() == 0:
        worst = max(abs(row.error) for row in found)
        print(table(found))
        print(f"\nlargest error {worst:.2%} of {len(found)}")
        searched = [row for row in found if row.gradients_of_1f1b is not None]
        equal = sum(bool(row.gradients_of_1f1b) for row in searched)
        own = [row for row in searched if "a search" in row.chosen]
        off = max((abs(row.error) for row in own), default=0.0)
        print(
            f"auto: {equal} of {len(searched)} orders have the gradients of 1F1B; {len(own)} are no"
        )
        print(f"known schedules, and of these the largest error is {off:.2%}")
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))


if __name__ == "__main__":
    main()
