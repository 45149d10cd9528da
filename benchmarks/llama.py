"""Train a Llama-shaped model in pipelines of cg and of torch.distributed.pipelining, side by side.

    python -m cg.launch -n 2 benchmarks/llama.py [--json FILE] [--sections agree,line,…]
        [--microbatches 4,8] [--fuse inductor] [--compile-torch | --no-torch]

16 layers of Llama-7B's shape, embedding and head, in bfloat16, sequences of 2048, one a microbatch;
forward and backward only. Each rank needs a GPU; `--small --device cpu` tries everything out
without. Both sides have the same modules, weights, data and cuts, in the same processes, one after
the other. A step is timed from a barrier to the barrier behind it, medians are given; gradients are
dropped between steps.

Sections: `agree` (losses and gradients of both sides, small model), `parts` (what a layer, the
embedding and the head cost, and the cuts that follow), `line`, `vee`, `loop` (schedules, by how
stages lie on ranks), `balanced` (the cuts by cost), `switches` (one schedule with passes of cg
switched off).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import llama_peer as peer
import torch
from llama_model import (
    LLAMA,
    SMALL,
    Cut,
    Part,
    Placing,
    Shape,
    Weights,
    balanced,
    batch,
    even,
    forget_gradients,
)
from llama_rows import GIB, PAIRS, Bench, table
from torch import Tensor

import cg
from cg.launch.world import world as worlds
from cg.passes.schedules import Schedule

SCHEDULES = {
    "line": ("gpipe", "1f1b", "zb-h1", "zb-h2", "auto"),
    "vee": ("zb-v", "dualpipe-v", "auto"),
    "loop": ("interleaved", "looped-bfs", "auto"),
}
"""Those of cg, by how stages lie on ranks. `auto` is searched with the costs of those before it."""

WHOLE_BACKWARDS = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
)
"""Schedules of torch that take compiled stages."""

TOLERANCE = 0.03
"""Of a gradient in bfloat16, as a share of its largest element."""


@cg.actor
class Stage(Part):
    """A part of the model as an actor."""


# -- cg -------------------------------------------------------------------------------------------


@dataclass
class Pipe:
    """Actors for the stages of a cut, and the step lowered for each number of microbatches."""

    shape: Shape
    cut: Cut
    placing: Placing
    device: str
    stages: list[Any] = field(init=False)
    _lowered: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        homes = zip(self.placing.ranks, self.cut, strict=True)
        self.stages = [Stage.on(rank)(self.shape, part, self.device) for rank, part in homes]

    @property
    def local(self) -> list[Any]:
        """The actors of this rank."""
        return [self.stages[index] for index in self.placing.mine(cg.rank())]

    def lowered(self, x: Tensor, y: Tensor) -> Any:
        """The step, traced when it is first asked for."""
        m = x.shape[0]
        if m not in self._lowered:
            self._lowered[m] = lowered(self.stages, self.placing, x, y)
        return self._lowered[m]


def lowered(stages: Sequence[Any], placing: Placing, x: Tensor, y: Tensor) -> Any:
    """Forward and backward of all microbatches; the loss is on the last stage's rank."""

    @cg.trace(outputs=cg.on(placing.ranks[-1]))
    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for h, targets in cg.microbatches((x, y), x.shape[0]):
            for stage in stages:
                h = stage.forward(h)
            losses.append(stages[-1].loss(h, targets))
        loss = cg.mean(losses)
        cg.backward(loss)
        return loss

    return step.lower(x, y)


def chosen(name: str, costs: cg.Costs | None, ranks: int) -> Schedule:
    """A schedule by name; `auto` may hold as much as ZB-H2 does."""
    if name != "auto":
        return cg.schedules.by_name(name)
    return cg.schedules.auto(max_activations=2.0 * ranks, costs=costs)


def run_cg(
    bench: Bench,
    section: str,
    name: str,
    pipe: Pipe,
    microbatches: int,
    passes: str = "",
) -> None:
    """Compile and time one schedule, and hold it against what its simulation says."""
    placing, cut = pipe.placing, pipe.cut
    x, y = batch(bench.shape, microbatches, str(bench.device))
    costs = bench.costs.get((cut, True, microbatches)) or bench.costs.get(
        (cut, False, microbatches)
    )
    schedule = chosen(name, costs, cg.world_size())
    began = time.perf_counter()
    fuse = bench.options.fuse
    compiled = pipe.lowered(x, y).compile(schedule=schedule, passes=passes, fuse=fuse)
    compile_s = time.perf_counter() - began
    mine = pipe.local
    milliseconds = bench.timed(lambda: compiled(x, y), mine)
    peaks = bench.peaks()
    forget_gradients(mine)
    figures = bench.speed(milliseconds, microbatches)
    label = f"{name} (loop)" if name == "auto" and placing.name == "loop" else name
    label += f" {passes}" if passes else ""
    # The parameters, as many gradients, and what the plan holds besides.
    own = cg.allgather(sum(2 * p.numel() * p.element_size() for s in mine for p in s.parameters()))
    plans = compiled.memory_analysis()
    planned = [(plan.peak + each) / GIB for plan, each in zip(plans, own, strict=True)]
    bench.note(
        section,
        f"cg {label}, m={microbatches}",
        figures["tokens_per_second_per_gpu"],
        "tokens/s/GPU",
        side="cg",
        schedule=label,
        microbatches=microbatches,
        cut=[len(layers) for layers in cut],
        placing=placing.name,
        fuse=fuse,
        not_fused=not_fused(compiled),
        **figures,
        peak_gib=peaks,
        planned_gib=[round(each, 2) for each in planned],
        compile_s=round(compile_s, 2),
        segments=cg.allgather(segments(compiled)),
        **bubbles(bench, compiled, schedule, cut, (x, y), mine),
    )
    compiled.close()


def bubbles(
    bench: Bench,
    compiled: Any,
    schedule: Schedule,
    cut: Cut,
    data: tuple[Tensor, Tensor],
    modules: Sequence[Any],
) -> dict[str, Any]:
    """Idle shares of a step: recorded, and simulated with costs measured once for each cut.

    With more microbatches a GPU idles less, and its clocks are slower: each number has its costs.
    """
    key = (cut, schedule.splits, len(data[0]))
    if key not in bench.costs:
        costs = cg.measure(compiled, *data, executions=4)
        # Channels have other numbers in other programs; all edges are alike.
        bench.costs[key] = replace(costs, channels={})
        forget_gradients(modules)
    predicted = compiled.simulate(bench.costs[key])
    recorded = compiled.record(*data, executions=2)[-1]
    forget_gradients(modules)
    return {
        "bubble": round(recorded.bubble_ratio, 4),
        "recorded_ms": round(recorded.makespan, 3),
        "simulated_bubble": round(predicted.bubble_ratio, 4),
        "simulated_ms": round(predicted.makespan, 3),
        "tf_tb_tw_ms": [
            [round(each, 3) for each in times] if isinstance(times, tuple) else times
            for times in (getattr(bench.costs[key], name) for name in ("tf", "tb", "tw"))
        ],
    }


def not_fused(compiled: Any) -> dict[str, str]:
    """Which methods of actors are not compiled as they were to be, and why, on any rank."""
    everywhere = cg.allgather({name: why for name, why in compiled.fused.items() if why})
    of_all = {name: why for found in everywhere for name, why in found.items()}
    return {name: why for name, why in of_all.items() if "operator of the step" not in why}


def segments(compiled: Any) -> list[str]:
    """Describe the captured parts of this rank's program: graphs, replays, and reasons."""
    (executables,) = [each for _, each in compiled._runtimes[0].bound.items()]
    parts = getattr(executables[0], "segments", ())
    return [f"{s.captures} graphs, {s.replays} replays, {s.reason}" for s in parts]


# -- torch ----------------------------------------------------------------------------------------


def run_torch(
    bench: Bench,
    section: str,
    name: str,
    parts: dict[int, Part],
    placing: Placing,
    cut: Cut,
    microbatches: int,
) -> None:
    """Time one schedule of torch.distributed.pipelining."""
    x, y = batch(bench.shape, microbatches, str(bench.device))
    run = peer.make_run(name, parts, placing, bench.shape, microbatches, bench.device)
    milliseconds = bench.timed(lambda: run(x, y), list(parts.values()))
    figures = bench.speed(milliseconds, microbatches)
    bench.note(
        section,
        f"torch {name}, m={microbatches}",
        figures["tokens_per_second_per_gpu"],
        "tokens/s/GPU",
        side="torch",
        schedule=name,
        microbatches=microbatches,
        cut=[len(layers) for layers in cut],
        placing=placing.name,
        compiled=bench.options.compile_torch,
        **figures,
        peak_gib=bench.peaks(),
    )
    forget_gradients(parts.values())


# -- sections -------------------------------------------------------------------------------------


def compare(bench: Bench, section: str, placing: Placing, cut: Cut, names: Sequence[str]) -> None:
    """All schedules of one layout of stages, on both sides."""
    pipe = Pipe(bench.shape, cut, placing, str(bench.device))
    for name in names:
        for m in bench.options.microbatches:
            with bench.guarded(section, f"cg {name}, m={m}"):
                run_cg(bench, section, name, pipe, m)
    del pipe
    bench.free()
    if bench.options.no_torch:
        return
    of_torch = [PAIRS[name] for name in names if name in PAIRS]
    of_torch = list(peer.SCHEDULES[placing.name]) if section == placing.name else of_torch
    if bench.options.compile_torch:
        of_torch = [name for name in of_torch if name in WHOLE_BACKWARDS]
    parts: dict[int, Part] = {}
    with bench.guarded(section, "torch, making stages", is_torch=True):
        parts |= peer.make_parts(bench.shape, cut, placing, str(bench.device))
        if bench.options.compile_torch:
            for layer in [layer for part in parts.values() for layer in part.layers.values()]:
                layer.compile()
    for name in of_torch:
        for m in bench.options.microbatches:
            if name == "ScheduleDualPipeV" and m < len(placing.ranks):
                continue  # torch refuses it
            if bench.torch_is_sound:
                with bench.guarded(section, f"torch {name}, m={m}", is_torch=True):
                    run_torch(bench, section, name, parts, placing, cut, m)


def in_layout(name: str, bench: Bench) -> None:
    """The schedules of a layout, layers cut evenly."""
    placing = Placing.make(name, cg.world_size())
    cut = even(bench.shape.layers, len(placing.ranks))
    compare(bench, name, placing, cut, SCHEDULES[name])


def parts(bench: Bench) -> None:
    """Time a layer, the embedding and the head alone, and cut by that."""
    weights = bench.weights or measured_weights(bench)
    for name in ("layer", "embedding", "head"):
        bench.note("parts", f"{name}, forward and backward", getattr(weights, name), "ms")
    for layout in SCHEDULES:
        placing = Placing.make(layout, cg.world_size())
        equal = even(bench.shape.layers, len(placing.ranks))
        by_cost = balanced(bench.shape.layers, placing, weights)
        for name, cut in (("even", equal), ("by cost", by_cost)):
            costs = weights.of(cut)
            loads = [sum(costs[s] for s in placing.mine(r)) for r in range(cg.world_size())]
            layers = [len(each) for each in cut]
            what = f"{layout}, cut {name}: {layers}, busiest rank"
            bench.note("parts", what, max(loads), "ms a microbatch", loads=loads, cut=layers)


def measured_weights(bench: Bench) -> Weights:
    """The cost of parts on rank 0, by autograd; kept for all sections."""
    layers, shape = bench.shape.layers, bench.shape
    ranges = (range(1, 2), range(0), range(layers, layers))
    bench.weights = Weights(*(cg.allgather(_alone(bench, each))[0] for each in ranges))
    bench.free()
    assert shape.layers > 2, "a layer in the middle is timed"
    return bench.weights


def _alone(bench: Bench, layers: range) -> float:
    part = Part(bench.shape, layers, str(bench.device))
    x, y = batch(bench.shape, 1, str(bench.device))
    size = (1, bench.shape.sequence, bench.shape.width)
    hidden = torch.randn(size, device=bench.device, dtype=torch.bfloat16, requires_grad=True)

    def run() -> None:
        out = part(x if part.is_first else hidden)
        (part.loss(out, y) if part.is_last else out.sum()).backward()

    times = []
    for _ in range(4):
        bench.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            run()
        bench.synchronize()
        times.append((time.perf_counter() - began) / 5 * 1e3)
    return min(times[1:])


def by_cost(bench: Bench) -> None:
    """Schedules with layers cut by measured cost, where that is not the even cut."""
    weights = bench.weights or measured_weights(bench)
    for layout, names in (("line", ("1f1b", "zb-h2")), ("vee", ("zb-v",))):
        placing = Placing.make(layout, cg.world_size())
        cut = balanced(bench.shape.layers, placing, weights)
        if cut == even(bench.shape.layers, len(placing.ranks)):
            bench.note("balanced", f"{layout}: the even cut is the best", 0, "")
            continue
        compare(bench, "balanced", placing, cut, names)


def switches(bench: Bench) -> None:
    """The gain of graphs and early receives."""
    placing = Placing.make("line", cg.world_size())
    cut = even(bench.shape.layers, len(placing.ranks))
    pipe = Pipe(bench.shape, cut, placing, str(bench.device))
    for passes in ("-capture", "-overlap", "-capture,-overlap"):
        m = bench.options.microbatches[-1]
        with bench.guarded("switches", f"cg 1f1b {passes}"):
            run_cg(bench, "switches", "1f1b", pipe, m, passes)


def agree(bench: Bench) -> None:
    """The loss and all gradients of one step, of each schedule of cg, against those of torch."""
    m = 4
    x, y = batch(SMALL, m, str(bench.device))
    for layout, name, other in (
        ("line", "1f1b", "Schedule1F1B"),
        ("line", "zb-h2", "Schedule1F1B"),
        ("vee", "zb-v", "ScheduleZBVZeroBubble"),
        ("loop", "interleaved", "ScheduleInterleaved1F1B"),
    ):
        placing = Placing.make(layout, cg.world_size())
        cut = even(SMALL.layers, len(placing.ranks))
        with bench.guarded("agree", name, is_torch=True):
            pipe = Pipe(SMALL, cut, placing, str(bench.device))
            schedule = cg.schedules.by_name(name)
            lowered_step, fuse = pipe.lowered(x, y), bench.options.fuse
            with lowered_step.compile(schedule=schedule, fuse=fuse) as compiled:
                loss = compiled(x, y)
            of_torch = peer.make_parts(SMALL, cut, placing, str(bench.device))
            right = peer.make_run(other, of_torch, placing, SMALL, m, bench.device)(x, y)
            pairs = zip(pipe.local, of_torch.values(), strict=True)
            worst = max(difference(one, two) for one, two in pairs)
            if right is not None:
                worst = max(worst, float((loss - right).abs() / right.abs()))
            worst = max(cg.allgather(worst))
            bench.note("agree", f"{name} and {other}, worst difference", worst, "")
            # Fused kernels round less often.
            if not worst < TOLERANCE * (2 if bench.options.fuse else 1):
                raise AssertionError(f"{name}: loss or gradients differ by {worst}")


def difference(one: Part, other: Part) -> float:
    """The largest of all gradients' differences, each as a share of its largest element."""
    of_other = dict(other.named_parameters())
    found = []
    for name, parameter in one.named_parameters():
        mine, right = parameter.grad, of_other[name].grad
        if mine is None or right is None or not bool(right.abs().max() > 0):
            raise AssertionError(f"{name} has no gradient on one of the sides")
        found.append(float((mine - right).float().abs().max() / right.float().abs().max()))
    return math.inf if any(map(math.isnan, found)) else max(found)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "agree": agree,
    "parts": parts,
    "line": partial(in_layout, "line"),
    "vee": partial(in_layout, "vee"),
    "loop": partial(in_layout, "loop"),
    "balanced": by_cost,
    "switches": switches,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, help="where the figures go")
    add("--sections", default=",".join(SECTIONS), help="with commas between them")
    add("--microbatches", default="4,8", help="how many, with commas between them")
    add("--repeats", type=int, default=5, help="timed steps of each schedule")
    add("--warm", type=int, default=4, help="steps before those; graphs are captured in the third")
    add("--patience", type=float, help="seconds until what hangs ends the job: 150; compiling, 900")
    add("--fuse", help="compile methods of cg's side with this: inductor")
    add("--compile-torch", action="store_true", help="torch.compile the layers on torch's side")
    add("--no-torch", action="store_true", help="cg's side only, for what is held against paper")
    add("--small", action="store_true", help="a small model")
    add("--device", default="auto", choices=("auto", "cpu"), help="cpu: without GPUs")
    options = parser.parse_args()
    options.microbatches = [int(each) for each in options.microbatches.split(",")]
    compiles = options.fuse or options.compile_torch
    options.patience = options.patience or (900.0 if compiles else 150.0)
    unknown = set(options.sections.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return options


def main() -> None:
    options = parse()
    world: Any = worlds.world()
    if cg.world_size() < 2 or world.is_virtual:
        sys.exit("start this on 2 ranks or more: python -m cg.launch -n 2 benchmarks/llama.py")
    if (world.device is None) != (options.device == "cpu"):
        sys.exit("each rank needs a GPU; or start with CG_DEVICE=cpu, and --device cpu")
    device = torch.device("cpu") if world.device is None else world.device.torch_device
    bench = Bench(options, SMALL if options.small else LLAMA, device)
    peer.join(device, len(set(world.nodes)), options.patience)
    for name in options.sections.split(","):
        began = time.perf_counter()
        if cg.rank() == 0:
            print(f"== {name}", flush=True)
        with bench.guarded(name, "section"):
            SECTIONS[name](bench)
        if cg.rank() == 0:
            print(f"   {time.perf_counter() - began:.1f} s", flush=True)
    bench.write()
    if cg.rank() == 0:
        print(table(bench.rows, tuple(SCHEDULES)), flush=True)
    peer.leave()


if __name__ == "__main__":
    main()
