"""Holds a compiled step against its own Python, run eagerly: the definition of what it means."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten

import cg
from cg.backends.base import World
from cg.backends.virtual.world import VirtualExecutable, VirtualWorld
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Module
from cg.ir.phases import Phase
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module
from cg.ir.verify.verifier import verify
from cg.launch.api.compiled import Compiled
from cg.launch.api.lowered import Lowered
from cg.launch.world.world import use_world
from cg.passes.base import Pass
from cg.passes.check.check_deadlock import CheckDeadlock
from cg.passes.manager.manager import PassManager, PassReport
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.manager.registry import parse_switches
from cg.tracer.record.actors.actors import ActorHandle

from .actors import KINDS, Node
from .recipes import Recipe
from .steps import inputs, make_step, without_microbatches
from .traces import SharedTraces

BASIC = ("gpipe", "1f1b", "auto")
"""Schedules that apply to every pipeline."""


@dataclass
class Pool:
    """Instances that many steps use one after another, so that their methods are traced once."""

    instances: Sequence[Node]
    traces: SharedTraces

    @staticmethod
    def make() -> Pool:
        return Pool([Node(kind) for kind in range(KINDS)], SharedTraces())

    def place(self, recipe: Recipe, world: World) -> list[Any]:
        """Handles as `Node.on` makes them, for instances that are as good as new."""
        fresh = [Node(kind) for kind in range(len(recipe.ranks))]
        for instance, new in zip(self.instances, fresh, strict=False):
            instance.load_state_dict(new.state_dict())
            instance.zero_grad(set_to_none=True)
            instance.log.clear()
        return [
            ActorHandle(f"node{kind}", rank, Node, world, self.instances[kind])
            for kind, rank in enumerate(recipe.ranks)
        ]


def new_actors(recipe: Recipe) -> list[Any]:
    """Actors of the current world, as a user makes them."""
    return [Node.on(rank)(kind) for kind, rank in enumerate(recipe.ranks)]


def check(recipe: Recipe, pool: Pool | None = None) -> str:
    """Compare all ways to run a recipe; return how it was compiled.

    A schedule may refuse a step whose microbatches wait for each other, since they cannot overlap.
    Then gpipe may do; if not, the same step must compile without its microbatches.

    Args:
        pool: actors to use, and their traces; None to make actors as a user does.
    """
    world = VirtualWorld(recipe.world)
    with use_world(world), _tracing_with(pool):
        try:
            _check_all(recipe, recipe.schedule, world, pool)
            return recipe.schedule
        except IRError as error:
            _expect_refusal(error, not recipe.must_overlap)
        except ValueError as error:
            _expect_misfit(error, recipe)
        try:
            _check_all(recipe, "gpipe", world, pool)
            return "gpipe, where the schedule has refused"
        except IRError as error:
            _expect_refusal(error, recipe.writes_in_microbatches)
        _check_all(without_microbatches(recipe), recipe.schedule, world, pool)
        return "no microbatches, where gpipe has refused"


@contextmanager
def _tracing_with(pool: Pool | None) -> Iterator[None]:
    if pool is None:
        yield
        return
    with mock.patch("cg.launch.api.step_function.Functions", return_value=pool.traces):
        yield


def _expect_refusal(error: IRError, allowed: bool) -> None:
    """Return if a schedule may refuse the step, and has done so."""
    if not allowed or "cannot run this step" not in str(error):
        raise error


def _expect_misfit(error: ValueError, recipe: Recipe) -> None:
    """Return if a schedule says that it is for other pipelines; the two basic ones fit all."""
    if recipe.schedule in BASIC or f"schedule '{recipe.schedule}'" not in str(error):
        raise error


def _check_all(recipe: Recipe, schedule: str, world: VirtualWorld, pool: Pool | None) -> None:
    eager_actors = new_actors(recipe)
    actors = new_actors(recipe) if pool is None else pool.place(recipe, world)
    lowered = lower(recipe, actors)
    compiled = lowered.compile(schedule=cg.schedules.by_name(schedule), passes=recipe.passes)
    check_phases(lowered, compiled, schedule, recipe.passes)

    eager = make_step(recipe, eager_actors)
    given = inputs(0)
    expected, actual = eager(*given), compiled(*given)
    compare("the virtual world", expected, actual)
    check_sharing("the virtual world", given, expected, actual)
    compare_states("the virtual world", eager_actors, actors)

    expected = eager(*inputs(1))
    for rank, result in _shuffled(lowered, compiled, recipe):
        compare(f"rank {rank} of the shuffled world", expected, result)
    compare_states("the shuffled world", eager_actors, actors)


def lower(recipe: Recipe, actors: Sequence[Any]) -> Lowered:
    """Trace the step of a recipe, through the public names."""
    place = [None if at is None else cg.on(*at) for at in (recipe.inputs, recipe.outputs)]
    step = cg.trace(inputs=place[0], outputs=place[1])(make_step(recipe, actors))
    x, k, _ = inputs(0)
    return step.lower(x, k, cg.object)


def check_phases(lowered: Lowered, compiled: Compiled, schedule: str, passes: str) -> None:
    """Compile again; after each pass, the text reads back, and the module is valid."""
    phases = set()

    def after(pass_: Pass | None, module: Module, report: PassReport | None) -> None:
        phases.add(module.phase)
        if report is None or report.changed:
            assert parse_module(format_module(module)) == module
            verify(module)

    module = clone(lowered.trace.module)
    assert module == lowered.trace.module
    after(None, module, None)
    pipeline = default_pipeline(cg.schedules.by_name(schedule), parse_switches(passes))
    PassManager(pipeline, check=True, on_pass=after).run(module)
    assert phases == set(Phase)
    assert module == compiled.module
    CheckDeadlock().run(module)


def _shuffled(lowered: Lowered, compiled: Compiled, recipe: Recipe) -> list[tuple[int | None, Any]]:
    """The results of each rank when ranks take turns at random and freed memory is poisoned."""
    trace, module = lowered.trace, compiled.module
    executable = VirtualExecutable(
        module, trace.bodies, trace.constants, poison=True, shuffle=recipe.shuffle
    )
    names = [value.name for value in trace.module.program.params]
    given = dict(zip(names, inputs(1), strict=True))
    per_rank = [[given[value.name] for value in p.params] for p in module.programs]
    results = executable.run(per_rank, execution=1)
    return [
        (program.rank, trace.outputs.rebuild(result))
        for program, result in zip(module.programs, results, strict=True)
        if program.outputs
    ]


def compare(what: str, expected: Any, actual: Any) -> None:
    """Hold a pytree against the eager one."""
    wanted, structure = tree_flatten(expected)
    found, other = tree_flatten(actual)
    assert structure == other, f"{what} returns {other}, eager Python {structure}"
    for index, (one, two) in enumerate(zip(wanted, found, strict=True)):
        assert same(one, two), f"{what}: result {index} is\n{two}\nand in eager Python\n{one}"


def check_sharing(what: str, given: Any, expected: Any, actual: Any) -> None:
    """No two results share memory, with one another or with the arguments, unless they do eagerly.

    A write to one would otherwise be seen in the other.
    """
    wanted, found = (_memory(tree_flatten((given, tree))[0]) for tree in (expected, actual))
    for i, j in itertools.combinations(range(len(found)), 2):
        if found[i] is not None and found[i] == found[j]:
            assert wanted[i] == wanted[j], f"{what}: values {i} and {j} share memory"


def _memory(leaves: list[Any]) -> list[int | None]:
    return [
        leaf.untyped_storage().data_ptr() if isinstance(leaf, torch.Tensor) else None
        for leaf in leaves
    ]


def same(one: Any, two: Any) -> bool:
    """Equal, or tensors that differ by rounding."""
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(same, one, two))
    if not isinstance(one, torch.Tensor):
        return bool(one == two)
    if one.dtype is not two.dtype or one.shape != two.shape:
        return False
    # One of them may be on a device.
    return torch.allclose(one.detach().cpu(), two.detach().cpu(), rtol=1e-9, atol=1e-11)


def compare_states(what: str, eager: Sequence[Any], actors: Sequence[Any]) -> None:
    """Hold the actors of this process against the eager ones: state, gradients, effects."""
    for one, two in zip(eager, actors, strict=True):
        if two.is_local:
            _compare_state(f"{what}: {two.name}", one.local, two.local)


def _compare_state(what: str, one: Node, two: Node) -> None:
    for name, wanted in one.state_dict().items():
        found = two.state_dict()[name]
        assert same(wanted, found), f"{what}.{name} is\n{found}\nand in eager Python\n{wanted}"
    for name, parameter in one.named_parameters():
        wanted, found = parameter.grad, two.get_parameter(name).grad
        assert (wanted is None) == (found is None), f"{what}.{name}.grad: {found}, not {wanted}"
        if wanted is not None:
            assert same(wanted, found), f"{what}.{name}.grad is\n{found}\nand eagerly\n{wanted}"
    done, should = [entry[0] for entry in two.log], [entry[0] for entry in one.log]
    assert done == should, f"{what} has done {done}, and in eager Python {should}"
    for wanted, found in zip(one.log, two.log, strict=True):
        assert same(wanted, found), f"{what}: effect\n{found}\nand in eager Python\n{wanted}"
