"""Derive a tensor parallel plan from a model: pairs of projections whose results need no exchange.

A projection that leads to one other alone is cut along its outputs, and the other one along its
inputs, as in https://arxiv.org/abs/1909.08053. Which leads to which is read off the traced graph
of the model's forward, and the rules of layouts say whether the graph can be cut so.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ....ir.types import Mesh
from ...errors import TraceError
from ...graph.layouts.cases import LayoutError
from ...graph.layouts.propagation.joints import propagate_joint
from ...graph.projections import Projection, Projections, find_projections
from ...method.joint import Wanted, trace_call
from ...method.joint_graph import Joint
from ...values.actor_state import collect
from ...values.interface import TracedCall
from ...values.pieces import lay_out
from ...values.plan import Parts, Sharding, ShardingPlan, cut, whole
from ...values.specs import Static, TensorSpec, Tree

ROWS, LENGTH = 8, 8
"""The rows and tokens of the text on which a model is traced if no inputs are given.

A model of sounds takes a row for each codebook, so one row is too few.
"""


def generic(path: str) -> str:
    """A path with `*` for each number in it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", path)


@dataclass(frozen=True)
class _PlanGroup:
    """Weights that are cut together.

    Attributes:
        words: they, in words.
        shardings: by path.
        counts: the numbers that the ranks must divide.
    """

    words: str
    shardings: Mapping[str, Sharding]
    counts: tuple[int, ...] = ()


def derive(
    model: nn.Module, axes: tuple[str, ...], example: Mapping[str, Any] | None
) -> tuple[dict[str, Sharding], tuple[str, ...]]:
    """Derive how the parameters of a model are cut.

    Args:
        model: it may be on the meta device.
        axes: of the mesh; keys and values are cut along the first, all else along all of them.
        example: inputs by name; None: a text.

    Returns:
        Shardings by the paths of parameters, with `*` for numbers, and lines that say what is
        whole, and why.

    Raises:
        ValueError: the model cannot be traced on the inputs.
    """
    model = _without_memory(model)
    joint = _traced(model, example)
    projections = _projections(joint)
    reasons: list[str] = []
    groups = [*_pairs(projections, axes, reasons), *_vocabulary(model, projections, axes)]
    shardings: dict[str, Sharding] = {}
    counts: tuple[int, ...] = ()
    for group in groups:
        joined = shardings | dict(group.shardings)
        refusal = _refusal(model, joint, joined, axes, counts + group.counts)
        if refusal is None:
            shardings, counts = joined, counts + group.counts
        else:
            reasons.append(f"{group.words}: {refusal}")
    return shardings, tuple(reasons)


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU whose parameters are memory that nobody touches."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


class _Logits(nn.Module):
    """An actor that has a model and gives the first tensor of its output."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def run(self, *values: Any) -> torch.Tensor:
        output = self.model(**dict(zip(self.names, values, strict=True)))
        leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _traced(model: nn.Module, example: Mapping[str, Any] | None) -> Joint:
    if example is None:
        example = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64), "use_cache": False}
    actor = _Logits(model, tuple(example))
    leaves, spec = pytree.tree_flatten((tuple(example.values()), {}))
    signature = Tree(
        tuple(
            TensorSpec(v.dtype, tuple(v.shape), False) if isinstance(v, torch.Tensor) else Static(v)
            for v in leaves
        ),
        spec,
    )
    name = type(model).__name__
    host = torch.device("cpu")
    call = TracedCall(name, actor.run, collect(actor), signature, host, None, None, is_of_mesh=True)
    try:
        return trace_call(call, Wanted((0,), ()))
    except TraceError as error:
        raise ValueError(
            f"no plan can be derived for {name}, since its forward cannot be traced: {error}"
        ) from error


def _projections(joint: Joint) -> Projections:
    paths = {
        node: generic(tensor.path.removeprefix("model."))
        for node, tensor in joint.state
        if isinstance(tensor.tensor, nn.Parameter)
    }
    forward = [node for node in joint.graph.nodes if node.name in joint.forward]
    forward = [*(node for node, _ in joint.state if node not in forward), *forward]
    return find_projections(forward, paths, [joint.outputs[0]])


def _pairs(
    projections: Projections, axes: tuple[str, ...], reasons: list[str]
) -> Iterator[_PlanGroup]:
    """The projections that lead to one other alone, with that one."""
    for last in projections.of.values():
        reached = {source: projections.leads_to(source) for source in last.sources}
        is_stream = any(s in projections.tables and len(r) > 1 for s, r in reached.items())
        firsts = [
            projections.of[source]
            for source, leads in reached.items()
            if leads == {last.path} and source in projections.of and source not in projections.ends
        ]
        if is_stream or not firsts:
            continue
        uneven = next((first for first in firsts if len(set(first.blocks)) > 1), None)
        if uneven is not None:
            sizes = ", ".join(map(str, uneven.blocks))
            reasons.append(
                f"{_layer(uneven.path)}, {_layer(last.path)}: the result of the first is split "
                f"into unequal parts of {sizes}"
            )
            continue
        yield _pair(sorted(firsts, key=lambda first: first.path), last, axes)


def _pair(firsts: list[Projection], last: Projection, axes: tuple[str, ...]) -> _PlanGroup:
    shardings: dict[str, Sharding] = {}
    most = max((first.parts or 0 for first in firsts), default=0)
    counts = []
    for first in firsts:
        parts = first.parts
        if parts == 1:
            continue  # one head of keys, which all ranks use
        used = axes[:1] if parts and parts < most else axes
        shardings |= _outputs(first, used, _parts(first, used, most, axes))
        counts += [parts] if parts else []
    shardings[last.path] = cut(1 - last.outputs, *axes)
    words = ", ".join([*(_layer(first.path) for first in firsts), _layer(last.path)])
    return _PlanGroup(words, shardings, tuple(counts))


def _parts(
    first: Projection, used: tuple[str, ...], most: int, axes: tuple[str, ...]
) -> tuple[Parts, ...]:
    if first.parts is None:
        return ()
    if first.parts < most:
        remedy = (
            f"make two axes of '{axes[0]}', such as cg.mesh(kv={first.parts}, rep=...), and give "
            'cg.plans.derived(model, axis=("kv", "rep"))'
        )
        return (Parts(used, first.parts, "heads of keys and values", remedy),)
    return (
        Parts(used, first.parts, "heads", "use an axis whose size divides the number of heads"),
    )


def _outputs(
    first: Projection, axes: tuple[str, ...], parts: tuple[Parts, ...] = ()
) -> dict[str, Sharding]:
    """The shardings of a weight and a bias that are cut along outputs."""
    blocks = max(len(first.blocks), 1)
    shardings = {first.path: Sharding(cut(first.outputs, *axes, blocks=blocks).cuts, parts)}
    if first.bias is not None:
        shardings[first.bias] = Sharding(cut(0, *axes, blocks=blocks).cuts, parts)
    return shardings


def _vocabulary(
    model: nn.Module, projections: Projections, axes: tuple[str, ...]
) -> Iterator[_PlanGroup]:
    """Projections that make logits, and tables with as many rows."""
    shapes = {generic(name): p.shape for name, p in model.named_parameters()}
    heads = [
        p
        for p in projections.of.values()
        if p.path in projections.ends
        and (p.path in projections.tables or not projections.leads_to(p.path))
    ]
    for head in heads:
        rows = shapes[head.path][head.outputs]
        yield _PlanGroup(_layer(head.path), _outputs(head, axes))
        for table in sorted(projections.tables - {head.path}):
            if shapes[table][0] == rows:
                yield _PlanGroup(_layer(table), {table: cut(0, *axes)})


def _layer(path: str) -> str:
    return path.rpartition(".")[0]


def _refusal(
    model: nn.Module,
    joint: Joint,
    shardings: Mapping[str, Sharding],
    axes: tuple[str, ...],
    counts: tuple[int, ...],
) -> str | None:
    """Why the graph cannot be cut so among as few ranks as can be; None if it can."""
    divisor = math.gcd(*counts) or 2
    if divisor == 1:
        return f"no number of ranks divides {', '.join(map(str, sorted(set(counts))))} heads"
    size = next(n for n in range(2, divisor + 1) if divisor % n == 0)
    sizes = (size, *(1 for _ in axes[1:]))
    mesh = Mesh(tuple(range(size)), "derived", tuple(zip(axes, sizes, strict=True)))
    plan = ShardingPlan.of({f"*{path}": sharding for path, sharding in shardings.items()})
    try:
        laid_out = lay_out(_Logits(model, ()), plan, whole, mesh)
        state = {tensor.path: tensor.layout for tensor in laid_out if tensor.layout is not None}
        propagate_joint(joint, mesh, state, [None] * len(joint.inputs))
    except LayoutError as error:
        return str(error).splitlines()[0]
    except ValueError as error:
        return str(error)
    return None
