"""Random models, trained by compiled steps and by plain PyTorch in one process.

`model_programs.py` draws a program: a model of blocks that users have, cut into stages; where the
stages are, and how they are laid out; what trains them. `model_steps.py` has the stages and a step,
which cg compiles here, and which plain PyTorch runs as it is. Losses, outputs, gradients,
parameters and buffers are compared after each step. What cg refuses by an error of its own counts
as refused.

    python -m tests.properties.models 0 1000
"""

from __future__ import annotations

import gc
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.values.plan import Sharding

from ..tracer.groups.training import cut_out, region_of
from .blocks import BLOCKS, Digits
from .model_programs import Program, program_of
from .model_steps import COMPILED, PLAIN, Part, batch, gradients_of, run_stages, train

REFUSALS = (cg.TraceError, cg.IRError, cg.ScheduleError)
ARGUMENTS_BY_ROWS = (
    *("enter(x)", "enter(mask)", "forward(message)", "forward(mask)"),
    *("join(message)", "join(skip)", "join(mask)", "repeat(message)", "repeat(mask)"),
    *("score(h)", "score(target)"),
)
"""Arguments of stages whose first dimension is that of the batch."""


def place_stages(program: Program) -> list[Any]:
    """The actors, as users make them."""
    stages: list[Any] = []
    for index, home in enumerate(program.place.homes):
        if program.place.grid is not None:
            stages.append(_on_mesh(program, index, home))
            continue
        owner = _owner_of_blocks(program, index)
        shared = None if owner is None else stages[owner].local
        stages.append(Part.on(home)(program, index, shared))  # type: ignore[attr-defined]
    return stages


def _owner_of_blocks(program: Program, index: int) -> int | None:
    """The stage whose blocks a stage has: the first one of its rank."""
    first = program.place.homes.index(program.place.homes[index])
    return first if program.shares and first < index else None


def _on_mesh(program: Program, index: int, home: int) -> Any:
    place = program.place
    assert place.grid is not None
    dp, tp = place.grid
    if place.is_mixed and index == len(place.homes) - 1:
        return Part.on(home * dp * tp)(program, index)  # type: ignore[attr-defined]
    mesh = cg.mesh(range(home * dp * tp, (home + 1) * dp * tp), dp=dp, tp=tp)
    store = cg.cut(0, "dp") if place.is_stored else cg.whole
    return Part.on(mesh, plan=plan_of(program, index), store=store)(program, index)  # type: ignore[attr-defined]


def plain_stages(program: Program) -> list[Part]:
    """The same stages in one process."""
    stages: list[Part] = []
    for index in range(len(program.stages)):
        owner = _owner_of_blocks(program, index)
        stages.append(Part(program, index, None if owner is None else stages[owner]))
    return stages


def plan_of(program: Program, index: int) -> dict[str, Sharding]:
    """The plan of a stage on a mesh."""
    place, spec = program.place, program.stages[index]
    rows = cg.whole if place.plan == "whole" else cg.cut(0, "dp")
    vocabulary = cg.cut(0, "tp") if place.plan == "megatron" else cg.whole
    plan: dict[str, Sharding] = {"|".join(ARGUMENTS_BY_ROWS): rows, "score(weight)": vocabulary}
    if place.plan == "megatron":
        for number, (name, _) in enumerate(spec.blocks):
            for keys, sharding in BLOCKS[name].cuts.items():
                paths = (f"blocks.{number}.{key}" for key in keys.split("|"))
                plan["|".join(paths)] = sharding
        if index == 0 and program.embedding is not None:
            plan["entry.weight"] = vocabulary
        if index == len(program.stages) - 1 and not program.is_tied:
            plan["head.*"] = vocabulary
    elif place.plan == "random":
        for path, sharding in _random_cuts(program, index):
            plan.setdefault(path, sharding)
    return plan


def _random_cuts(program: Program, index: int) -> Iterator[tuple[str, Sharding]]:
    """Paths of parameters of a stage, and how each is cut."""
    parameters = dict(Part(program, index).named_parameters())
    for number in program.place.cuts:
        digits = Digits(number)
        path = sorted(parameters)[digits.take(len(parameters))]
        if parameters[path].ndim:
            axis = "tp" if program.place.is_stored else ("tp", "dp")[digits.take(2)]
            yield path, cg.cut(digits.take(parameters[path].ndim), axis)


@dataclass(frozen=True)
class State:
    """What a plain stage has after a step, by name."""

    last_gradients: Mapping[str, Tensor | None]
    grads: Mapping[str, Tensor | None]
    tensors: Mapping[str, Tensor]

    @staticmethod
    def of(part: Part) -> State:
        grads = gradients_of(part)
        named = (*part.named_parameters(), *part.named_buffers())
        tensors = {name: tensor.detach().clone() for name, tensor in named}
        return State(part.last_gradients, grads, tensors)


@dataclass(frozen=True)
class StepResult:
    """What plain PyTorch gave in a step, and has after it."""

    outputs: Any
    stages: Sequence[State]


Cut = Callable[[str, Any], Any]
"""Gives the part that a rank has of a tensor of a name."""


class Difference(AssertionError):
    """A compiled program and plain PyTorch differ."""


def train_plain(program: Program) -> tuple[list[StepResult], Any]:
    """All steps in plain PyTorch; and what a last one without gradients gives."""
    stages = plain_stages(program)
    results = []
    for step in range(program.steps):
        outputs = train(program, stages, PLAIN, *batch(program, step))
        results.append(StepResult(outputs, [State.of(stage) for stage in stages]))
    if program.evaluates:
        for stage in stages:
            stage.eval()
    with torch.no_grad():
        x, mask, _ = batch(program, program.steps)
        return results, run_stages(program, stages, x, mask)[0]


def check(program: Program) -> str:
    """Compare a program with plain PyTorch; return `equal`, or why it was not compared.

    Raises:
        Difference: they differ.
    """
    try:
        results, inference = train_plain(program)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"not run: plain PyTorch: {str(error).splitlines()[0][:80]}"
    if not all(bool(result.outputs["loss"].isfinite()) for result in results):
        return "not run: not finite"
    with use_world(VirtualWorld(program.place.world)):
        try:
            stages = place_stages(program)
            compiled = compile_step(program, stages, 0)
        except Exception as error:
            return f"refused: {refusal(error)}"
        for step, result in enumerate(results):
            if program.resizes and step == program.steps - 1:
                compiled = compile_step(program, stages, step)
            compare_step(program, stages, compiled(*batch(program, step)), result, step)
        if program.infers:
            compare_inference(program, stages, inference)
    return "equal"


def compile_step(program: Program, stages: Sequence[Any], step: int) -> cg.Compiled:
    """Compile for the batch of a step."""
    place = program.place
    inputs = None if program.inputs is None else cg.on(program.inputs)

    @cg.trace(inputs=inputs)
    def traced(x: Tensor, mask: Tensor, target: Tensor) -> Any:
        return train(program, stages, COMPILED, x, mask, target)

    lowered = traced.lower(*batch(program, step))
    return lowered.compile(
        schedule=cg.schedules.by_name(program.schedule),
        fsdp=cg.fsdp(keep=place.keep) if place.is_stored else None,
        passes=program.passes,
    )


def refusal(error: Exception) -> str:
    """The reason of an error of cg's own, without what differs from program to program; else
    raises the error."""
    if not isinstance(error, REFUSALS):
        raise error
    text = re.sub(r"\d+", "N", str(error).splitlines()[0])
    return f"{type(error).__name__}: {text[:160]}"


def compare_inference(program: Program, stages: Sequence[Any], expected: Any) -> None:
    """A step without gradients, after the training."""

    @cg.trace
    def infer(x: Tensor, mask: Tensor) -> Any:
        with torch.no_grad():
            return run_stages(program, stages, x, mask)[0]

    if program.evaluates:
        for stage in stages:
            for _, part, _ in instances(stage):
                part.eval()
    x, mask, _ = batch(program, program.steps)
    compare_tensors("the inference", expected, infer(x, mask), program.tolerance)


def compare_step(
    program: Program, stages: Sequence[Any], outputs: Any, result: StepResult, step: int
) -> None:
    """Compare what a step gave and left with plain PyTorch."""
    for name, expected in result.outputs.items():
        # Updated weights differ by rounding, and a norm may enlarge what comes of it.
        is_updated = step > 0 or name == "after"
        tolerance = 4 * program.tolerance if is_updated else program.tolerance
        pairs = zip(tree_flatten(expected)[0], tree_flatten(outputs[name])[0], strict=True)
        for number, pair in enumerate(pairs):
            compare_tensors(f"step {step}: {name} {number}", *pair, tolerance)
    largest = _largest_gradient(result)
    scales = {"last_gradients": largest, "grads": largest, "tensors": 0.05 * largest}
    for stage, state in zip(stages, result.stages, strict=True):
        for rank, part, cut in instances(stage):
            label = f"step {step}: {stage.name} on rank {rank}"
            compare_state(label, state, State.of(part), cut, program.tolerance, scales)


def _largest_gradient(result: StepResult) -> float:
    """The largest element of all gradients of a step; 1 if there are none.

    Sums that cancel leave rounding of what they are made of, as the gradient of keys' biases.
    """
    gradients = [g for state in result.stages for g in state.last_gradients.values()]
    sizes = [float(g.abs().max()) for g in gradients if g is not None and g.numel()]
    return max(sizes, default=1.0)


def compare_state(
    label: str,
    expected: State,
    actual: State,
    cut: Cut,
    tolerance: float,
    scales: Mapping[str, float],
) -> None:
    """Compare what a rank's part of a stage has with what the plain stage has."""
    for kind, scale in scales.items():
        expected_tensors, actual_tensors = getattr(expected, kind), getattr(actual, kind)
        if expected_tensors.keys() != actual_tensors.keys():
            names = f"{actual_tensors.keys()}, not of {expected_tensors.keys()}"
            raise Difference(f"{label}: {kind} of {names}")
        for name, tensor in expected_tensors.items():
            pair = cut(name, tensor), actual_tensors[name]
            compare_tensors(f"{label}: {kind} {name}", *pair, tolerance, scale)


def instances(stage: Any) -> Iterator[tuple[int, Part, Cut]]:
    """Ranks of a stage, their objects, and how to cut whole tensors like theirs."""
    if stage._group is None:
        yield stage.rank, stage.local, lambda name, tensor: tensor
        return
    for rank, part in stage.instances.items():

        def cut(name: str, tensor: Any, rank: int = rank) -> Any:
            return None if tensor is None else cut_out(tensor, region_of(stage, name, rank))

        yield rank, part, cut


def compare_tensors(
    label: str, expected: Any, actual: Any, tolerance: float, scale: float = 1.0
) -> None:
    """Raise if two tensors differ by more than rounding, or one is None.

    Args:
        label: names them in the error.
        expected, actual: of plain PyTorch and of the compiled program.
        tolerance: of their largest element.
        scale: what counts as the largest if all are smaller; 1 at least.
    """
    if (expected is None) != (actual is None):
        raise Difference(f"{label} is {actual}, and in plain PyTorch {expected}")
    if expected is None:
        return
    expected, actual = expected.detach(), actual.detach()
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        types = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (actual, expected)]
        raise Difference(f"{label} is {', not '.join(types)}")
    wide_expected, wide_actual = expected.double(), actual.double()
    finite = wide_expected[wide_expected.isfinite()]
    largest = max(1.0, scale, float(finite.abs().max()) if finite.numel() else 1.0)
    limit = tolerance * largest
    if not torch.allclose(wide_actual, wide_expected, rtol=0, atol=limit, equal_nan=True):
        error = float((wide_expected - wide_actual).abs().max())
        difference = f"{error:.3g}, of {largest:.3g}"
        raise Difference(f"{label} differs by {difference}: {actual} not {expected}")


@contextmanager
def quiet() -> Iterator[None]:
    """One thread, and no warnings of torch's about what blocks do on purpose."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def main(first: int, last: int) -> int:
    """Check the programs of seeds; print findings, and how many there were of each result."""
    tally: Counter[str] = Counter()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)  # traces make cycles by the million
    with quiet():
        for seed in range(first, last):
            try:
                result = check(program_of(seed))
            except Exception as error:
                result = "FINDING"
                print(f"seed {seed}: {type(error).__name__}: {str(error)[:600]}", flush=True)
                if not isinstance(error, Difference):
                    traceback.print_exc(limit=-6)
            tally[result] += 1
            if result.startswith("refused"):
                print(f"seed {seed}: {result}", flush=True)
    for result, count in tally.most_common():
        print(f"{count:5} {result}")
    return tally["FINDING"]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
