"""`cg-sim`: simulate a pipeline schedule on paper. It needs neither torch nor MPI."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...ir.pipeline.costs import Costs
from ...ir.text.files import read_text
from ...passes import schedules
from ...passes.schedules import Order, Pipeline
from ...passes.simulate.rank_grid import grid
from ...passes.simulate.schedule_simulator import Simulation, simulate
from ...passes.simulate.stored_stages import Storing
from ..pictures.schedule_timeline import picture_of_schedule
from ..pictures.write import write_picture

_DESCRIPTION = """\
Run a pipeline schedule on paper, and print one JSON object: makespan_ms, bubble_ratio and, for
each rank of the pipeline, peak_activations, and peak_bytes if costs have activation_bytes; with
--grid also the grid, which goes to standard error as text. For auto also bound_ms, which no order
can be under, the gap above it as a share, what the order comes from, how many were tried, and
search_s, with --remat the stages that recompute, and a line that says so to standard error. --svg,
--html and --perfetto write the timeline to files."""

_EPILOG = """\
B is the gradient of the inputs, W that of the weights; a schedule that does not split the backward
runs both as one. The times are those of a whole rank: where it hosts v chunks, each takes 1/v of
them, and its activations count 1/v. The makespan is the longest time from a rank's first start to
its last end, and the bubble ratio the share of it in which the ranks are idle. tcomm delays only
what needs the transfer. With --group-size F each rank of the pipeline is a group of F ranks that
store a stage's parameters in pieces: parameter_traffic is what each of them receives in a step, in
units of its stage's parameters. A gather is issued when the task before it starts. An activation
is held from F to B, and --mw of it from B to W. With --remat auto chooses stages whose B runs
their forward again, so that they hold --mr of an activation until B, and all of it while B runs.
"""

_TIMES = ("tf", "tb", "tw", "tcomm", "tgather", "treduce", "mw", "mr")

_LAYOUTS = {"interleaved": "loop", "looped-bfs": "loop", "zb-v": "vee", "dualpipe-v": "vee"}


@dataclass(frozen=True, slots=True)
class _SimulatedPipeline:
    """A pipeline and its schedule, which are to be simulated.

    Attributes:
        search: the results of the search of `auto`; empty for other schedules.
        remat: the stages that recompute.
    """

    pipeline: Pipeline
    order: Order
    search: dict[str, object]
    remat: tuple[int, ...] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _arguments()
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(_simulate(options))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"cg-sim: error: {error}\n")
        return 1
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cg-sim",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--schedule", default="1f1b", choices=schedules.names(), help="default: 1f1b"
    )
    choice.add_argument("--table", metavar="FILE", help="a schedule of your own, a line a rank")
    add("--stages", type=int, metavar="P", help="how many ranks the pipeline has")
    add("--microbatches", type=int, metavar="M")
    add("--chunks", type=int, metavar="V", help="chunks of a rank (interleaved, looped-bfs, auto)")
    add("--layout", choices=("loop", "vee"), help="how chunks lie on ranks: 0,1,0,1 or 0,1,1,0")
    add("--tf", type=float, metavar="MS", help="time of a forward; default 1")
    add("--tb", type=float, metavar="MS", help="time of an input gradient; default 1")
    add("--tw", type=float, metavar="MS", help="time of a weight gradient; default 1")
    add("--tcomm", type=float, metavar="MS", help="time of a transfer; default 0")
    add("--group-size", type=int, metavar="F", help="ranks that store a stage in pieces; default 1")
    add("--keep", choices=("step", "task"), help="how long they keep it gathered; default step")
    add("--tgather", type=float, metavar="MS", help="time to gather a stage; default 0")
    add("--treduce", type=float, metavar="MS", help="time to reduce its gradients; default 0")
    add("--mw", type=float, metavar="SHARE", help="of the activations that W needs; default 1")
    add("--mr", type=float, metavar="SHARE", help="of them that a stage holds that recomputes")
    add("--costs", metavar="FILE", help="costs as JSON; the options above come before it")
    add("--max-activations", type=float, metavar="K", help="memory of auto; default: P")
    add(
        "--max-bytes",
        type=_bytes,
        metavar="N[,N...]",
        help="the same in bytes, or for each rank; needs activation_bytes",
    )
    add("--budget", type=float, metavar="SECONDS", help="time of auto; default: by size")
    add("--remat", action="store_const", const=True, help="auto may let stages recompute: --mr")
    add("--seed", type=int, metavar="N", help="what auto draws its moves from; default: 0")
    add("--grid", action="store_true", help="draw the rank grid")
    add("--svg", metavar="FILE", type=Path, help="draw the timeline")
    add("--html", metavar="FILE", type=Path, help="draw it as a page to zoom into")
    add("--perfetto", metavar="FILE", type=Path, help="write it as a trace for ui.perfetto.dev")
    return parser


def _bytes(text: str) -> float | tuple[float, ...]:
    """The bytes that every rank may hold, or those of each rank."""
    limits = tuple(map(float, text.split(",")))
    return limits if len(limits) > 1 else limits[0]


def _simulate(options: argparse.Namespace) -> str:
    """The JSON object that is printed, as text."""
    costs = _costs(options)
    problem = _from_table(options) if options.table else _from_name(options, costs)
    pipeline = problem.pipeline
    costs = _of_stages(costs, pipeline)
    if problem.remat:
        costs = replace(costs, remat=problem.remat)
    storing = _storing(options)
    simulation = simulate(
        problem.order, pipeline.stage_ranks, pipeline.microbatches, costs, storing
    )
    if not math.isfinite(simulation.makespan):
        raise ValueError("the makespan is too large for a number: choose smaller costs")
    result: dict[str, object] = {
        "makespan_ms": round(simulation.makespan, 6),
        "bubble_ratio": round(simulation.bubble_ratio, 9),
        "peak_activations": [_number(peak) for peak in simulation.peak_activations],
    }
    if costs.activation_bytes is not None:
        peaks = (simulation.timeline.held(rank, costs) for rank in simulation.ranks)
        result["peak_bytes"] = [_number(peak) for peak in peaks]
    result |= problem.search
    if storing is not None:
        result["parameter_traffic"] = _number(simulation.traffic)
    if options.grid:
        result["grid"] = grid(simulation.timeline)
        sys.stderr.write(str(result["grid"]))
    _draw(options, problem, simulation)
    return json.dumps(result) + "\n"


def _storing(options: argparse.Namespace) -> Storing | None:
    """How stages are stored in pieces; None if they are not."""
    members = 1 if options.group_size is None else options.group_size
    if members < 1:
        raise ValueError(f"--group-size {members}: a group has at least 1 rank")
    if options.group_size is None:
        storage_options = [("--keep", options.keep), ("--tgather", options.tgather)]
        for name, value in [*storage_options, ("--treduce", options.treduce)]:
            if value is not None:
                raise ValueError(f"{name} is for stages that are stored in pieces: --group-size F")
        return None
    return Storing(members, options.keep or "step")


def _draw(options: argparse.Namespace, problem: _SimulatedPipeline, simulation: Simulation) -> None:
    """Write the files that were asked for."""
    files: dict[str, Path | None] = {
        ".svg": options.svg,
        ".html": options.html,
        ".json": options.perfetto,
    }
    if not any(files.values()):
        return
    name = Path(options.table).name if options.table else options.schedule
    pipeline = problem.pipeline
    picture = picture_of_schedule(
        simulation.timeline,
        f"{name}: {len(pipeline.ranks)} ranks, {pipeline.microbatches} microbatches",
        f"on paper: {simulation.makespan:.6g} ms, bubble {simulation.bubble_ratio:.2%}",
    )
    for suffix, path in files.items():
        if path is not None:
            write_picture(picture, path, suffix)


def _number(value: float) -> float:
    """Round off the noise of sums; a whole number becomes an int."""
    value = round(value, 9)
    return int(value) if value == int(value) else value


def _costs(options: argparse.Namespace) -> Costs:
    overrides = {name: getattr(options, name) for name in _TIMES}
    costs = Costs.load(options.costs) if options.costs else Costs()
    return replace(costs, **{name: value for name, value in overrides.items() if value is not None})


def _of_stages(costs: Costs, pipeline: Pipeline) -> Costs:
    """The costs of each stage.

    Raises:
        ValueError: costs are given for another number of stages.
    """
    for name in ("tf", "tb", "tw", "tcomm"):
        value = getattr(costs, name)
        needed = pipeline.stages - (name == "tcomm")
        # The last stage sends nothing, but measured costs have an entry for it.
        if isinstance(value, tuple) and len(value) not in (needed, pipeline.stages):
            raise ValueError(
                f"costs: {name} is given for {len(value)} stages, but the pipeline has "
                f"{pipeline.stages}"
            )
    return costs.shared(pipeline.stage_ranks)


def _from_name(options: argparse.Namespace, costs: Costs) -> _SimulatedPipeline:
    name = options.schedule
    for needed in ("stages", "microbatches"):
        if getattr(options, needed) is None:
            raise ValueError(f"say how many {needed} there are: --{needed} N")
        if getattr(options, needed) < 1:
            raise ValueError(f"--{needed} {getattr(options, needed)}: there must be at least 1")
    chunks = _chunks(options)
    _check_size(options.stages * chunks, options.microbatches)
    pipeline = Pipeline(_layout(options, chunks), options.microbatches)
    if name == "auto":
        return _searched(options, pipeline, _of_stages(costs, pipeline))
    for option in _OF_SEARCH:
        if getattr(options, option) is not None:
            flag = option.replace("_", "-")
            raise ValueError(f"--{flag} is for auto; schedule '{name}' does not search")
    return _SimulatedPipeline(pipeline, schedules.by_name(name)(pipeline), {})


_OF_SEARCH = ("max_activations", "max_bytes", "budget", "seed", "remat")


def _searched(options: argparse.Namespace, pipeline: Pipeline, costs: Costs) -> _SimulatedPipeline:
    """The order that auto finds, and how good it is."""
    if options.budget is not None and not options.budget > 0:
        raise ValueError(f"--budget {options.budget}: it must be above 0")
    schedule = schedules.auto(
        options.max_activations,
        costs,
        max_bytes=options.max_bytes,
        seed=options.seed or 0,
        seconds=options.budget,
        remat=bool(options.remat),
    )
    begin = time.monotonic()
    best = schedules.found_orders(schedule, pipeline)[0]
    seconds = time.monotonic() - begin
    sys.stderr.write(f"auto: {best} ({seconds:.2f} s)\n")
    schedules.validate(pipeline, best.order, "auto")
    search = {
        "bound_ms": _number(best.bound),
        "gap": round(best.gap, 9),
        "source": best.source,
        **({"remat": list(best.remat)} if options.remat else {}),
        "tried": best.trials,
        "search_s": round(seconds, 3),
    }
    return _SimulatedPipeline(pipeline, best.order, search, best.remat)


_MOST_STAGES, _MOST_CELLS = 1 << 10, 1 << 18


def _check_size(stages: int, microbatches: int) -> None:
    """Refuse a pipeline that would take minutes, or all memory, on paper.

    Raises:
        ValueError: it is too large.
    """
    if stages > _MOST_STAGES or stages * microbatches > _MOST_CELLS:
        raise ValueError(
            f"{_shown(stages)} stages and {_shown(microbatches)} microbatches are too many: at "
            f"most {_MOST_STAGES:,} stages, and {_MOST_CELLS:,} for stages times microbatches"
        )


def _shown(number: int) -> str:
    return f"{number:,}" if number < 10**30 else "over 10**30"


def _chunks(options: argparse.Namespace) -> int:
    """How many chunks each rank has."""
    usual_chunks = 2 if options.schedule in _LAYOUTS or options.layout == "vee" else 1
    chunks: int = usual_chunks if options.chunks is None else options.chunks
    if chunks < 1:
        raise ValueError(f"--chunks {chunks}: there must be at least 1")
    return chunks


def _layout(options: argparse.Namespace, chunks: int) -> tuple[int, ...]:
    """The rank of each stage."""
    line = tuple(range(options.stages))
    usual = _LAYOUTS.get(options.schedule, "loop")
    if (options.layout or usual) == "loop":
        return line * chunks
    if chunks != 2:
        raise ValueError(f"--chunks {chunks}: a pipeline that goes down and up again has 2 a rank")
    return line + line[::-1]


def _from_table(options: argparse.Namespace) -> _SimulatedPipeline:
    """The problem of a table, whose stages are each on the rank that runs them."""
    for name in ("chunks", "layout", *_OF_SEARCH):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is not for a --table, which has its own")
    text = read_text(options.table)
    pipeline = schedules.table_pipeline(text, options.table)
    _check_size(pipeline.stages, pipeline.microbatches)
    sizes = {"stages": len(pipeline.ranks), "microbatches": pipeline.microbatches}
    for name, size in sizes.items():
        if getattr(options, name) not in (None, size):
            requested = getattr(options, name)
            raise ValueError(f"--{name} {requested}: the table {options.table} has {size}")
    return _SimulatedPipeline(pipeline, schedules.table(text, options.table)(pipeline), {})


if __name__ == "__main__":
    sys.exit(main())
