"""Lay out an actor's method with its derivative, run it on all ranks, and compare with eager."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cg.ir.layout import Layout
from cg.ir.types import Mesh
from cg.tracer.graph.layouts.change import DEFAULT, Change
from cg.tracer.graph.layouts.propagation.joints import propagate_joint
from cg.tracer.graph.layouts.propagation.partition import partition
from cg.tracer.method.joint import Wanted
from cg.tracer.method.joint_graph import Joint
from cg.tracer.method.twice import settled
from cg.tracer.values.actor_state import collect
from cg.tracer.values.interface import TracedCall
from cg.tracer.values.pieces import lay_out
from cg.tracer.values.plan import ShardingPlan, whole

from ..function_tools import signature
from ..written_dropout import WrittenDropout
from .simulation import Run, layout, run


def joint_of(actor: nn.Module, method: str, inputs: tuple[int, ...], *args: Any) -> Joint:
    """The joint graph of a method with one result, and the cotangents of some inputs."""
    call = TracedCall(
        f"actor.{method}",
        getattr(actor, method),
        collect(actor, ()),
        signature(*args),
        torch.device("cpu"),
        None,
        None,
        is_of_mesh=True,
    )
    return settled(call, Wanted((0,), inputs))[1]


def layouts_of(
    actor: nn.Module, plan: Mapping[str, str] | ShardingPlan, place: Mesh
) -> dict[str, Layout]:
    """The layouts of parameters: of the first pattern that fits."""
    if isinstance(plan, ShardingPlan):
        laid_out = lay_out(actor, plan, whole, place)
        return {each.path: each.layout for each in laid_out if each.layout is not None}
    found = {}
    for name, _ in actor.named_parameters():
        for pattern, text in plan.items():
            if fnmatch.fnmatch(name, pattern):
                found[name] = layout(text)
                break
    return found


def compare(
    actor: nn.Module,
    method: str,
    plan: Mapping[str, str] | ShardingPlan,
    place: Mesh,
    args: Sequence[torch.Tensor],
    given: Sequence[str],
    *,
    tolerance: float,
    allowed: frozenset[Change] = DEFAULT,
    attention: str | None = None,
    sequence: Sequence[str] = (),
) -> Run:
    """Forward and backward on all ranks equal eager: results, gradients of inputs and state."""
    wanted = tuple(i for i, value in enumerate(args) if value.is_floating_point())
    joint = joint_of(actor, method, wanted, *(value.detach() for value in args))
    state = layouts_of(actor, plan, place)
    propagation = propagate_joint(
        *(joint, place, state, [layout(text) for text in given]),
        allowed=allowed,
        attention=attention,
        sequence=sequence,
    )
    cut = partition(propagation)
    sources = [value.detach().clone().requires_grad_(i in wanted) for i, value in enumerate(args)]
    torch.manual_seed(5)
    with WrittenDropout():
        result = getattr(actor, method)(*sources)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randint(-2, 3, result.shape, generator=generator).to(result)
    result.backward(cotangent)
    values = {propagation.copies[n]: s.tensor.detach() for n, s in joint.state}
    values |= {propagation.copies[n]: v.detach() for n, v in zip(joint.inputs, args, strict=True)}
    values |= {propagation.copies[n]: cotangent for n in joint.cotangents}
    torch.manual_seed(5)
    found = run(cut, propagation, joint.owner, values)
    expected = [result.detach(), *(sources[i].grad for i in wanted)]
    expected += [state.tensor.grad for state, _ in joint.state_grads]
    first = len(joint.outputs) + len(joint.rebinds)
    made = [found[0], *found[first : first + len(expected) - 1]]
    for mine, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    return Run(propagation, cut, joint)
