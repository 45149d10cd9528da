"""Replace ops that write in place by ops that make a new tensor.

An op cannot write in place to a value that is transferred first. If an op has made the value, and
no view of it is taken, nothing else sees the write, so the op can make a new tensor instead. Writes
to state stay.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx

from ..autodiff.subgraphs import memory_of, written_in_place
from .expansions import fake_mode_of

_ATEN = torch.ops.aten


def without_writes(graph: fx.Graph) -> None:
    """Replace the writes of a graph that can be replaced; the graph is changed in place."""
    state = {memory_of(node) for node in graph.nodes if node.op == "placeholder"}
    for node in list(graph.nodes):
        if node.target is _ATEN.native_batch_norm.default:
            _give_statistics(node, state)
            continue
        written = written_in_place(node)
        if written is not None and node.target not in _VIEWS and memory_of(node) in state:
            node.replace_all_uses_with(written)  # the result is the state itself
            continue
        view = _VIEWS.get(node.target)
        form = view or other_form(node.target)
        first = node.args[0] if node.args else None
        if form is None or not isinstance(first, fx.Node):
            continue
        if view is None and not _is_own(first, node):
            continue
        node.target = form
        result = node if view is not None else _as_written(node, first)
        _read_instead(first, result)


def _give_statistics(node: fx.Node, state: Collection[int | None]) -> None:
    """Let a batch norm give new running statistics that are no state, instead of writing to them.

    The norm of an instance repeats its statistics for each row of the batch, so ranks have parts.
    """
    arguments = dict(zip(_STATISTICS, node.args[3:6], strict=True))
    running = [arguments["running_mean"], arguments["running_var"]]
    if not arguments["training"] or not all(isinstance(value, fx.Node) for value in running):
        return
    values = [value for value in running if isinstance(value, fx.Node)]
    if any(memory_of(value) in state or not _is_own(value, node) for value in values):
        return
    node.target = _ATEN._native_batch_norm_legit_functional.default
    node.meta["val"] = (*node.meta["val"], *(value.meta["val"] for value in values))
    for index, value in enumerate(values, 3):
        with node.graph.inserting_after(node):
            item = node.graph.call_function(operator.getitem, (node, index))
        item.meta["val"] = value.meta["val"]
        _read_instead(value, item)


def _read_instead(written: fx.Node, result: fx.Node) -> None:
    """Let nodes behind a result read it instead of the value that was written to."""
    passed = False
    for user in list(result.graph.nodes):
        if passed and written in user.all_input_nodes:
            user.replace_input_with(written, result)
        passed = passed or user is result


def _as_written(node: fx.Node, first: fx.Node) -> fx.Node:
    """The result of an op in the element type of the operand that it wrote to in place.

    In place, an op keeps its operand's type. As a new tensor, a product with float64 is of float64,
    and a comparison of booleans.
    """
    fake: torch.Tensor = first.meta["val"]
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    assert callable(node.target)
    with fake_mode_of([fake]):
        result = node.target(*args, **kwargs)
    if result.dtype == fake.dtype:
        return node
    with node.graph.inserting_after(node):
        cast = node.graph.call_function(_ATEN._to_copy.default, (node,), {"dtype": fake.dtype})
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    cast.meta.update(node.meta)
    node.meta["val"] = result
    return cast


def read_later(made: Iterable[fx.Node], place: fx.Node) -> None:
    """Let nodes behind a place read the results of mutable ops, instead of their operands.

    Args:
        made: nodes in front of the place, some of which write in place.
        place: the node behind which others read the results.
    """
    for node in made:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            continue
        written, following = node.args[0], place.next
        assert isinstance(written, fx.Node)
        while following.op != "root":
            following.replace_input_with(written, node)
            following = following.next


_STATISTICS = ("running_mean", "running_var", "training")
"""Arguments of a batch norm, behind the input and the scales."""

_VIEWS: Mapping[object, torch._ops.OpOverload] = {
    _ATEN.transpose_.default: _ATEN.transpose.int,
    _ATEN.t_.default: _ATEN.t.default,
    _ATEN.squeeze_.dim: _ATEN.squeeze.dim,
    _ATEN.unsqueeze_.default: _ATEN.unsqueeze.default,
}
"""The views that ops take in place: these write no memory, but change sizes and strides."""


def other_form(target: object) -> torch._ops.OpOverload | None:
    """The op that makes a new tensor as `target` would write it in place.

    None if `target` writes nothing, or draws random numbers, or has no such form.
    """
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("_") or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    packet = getattr(_ATEN, name.removesuffix("_"), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    names = packet.overloads()  # type: ignore[no-untyped-call]
    forms = (getattr(packet, overload) for overload in names)
    return next((form for form in forms if _takes(form) == _takes(target)), None)


def _takes(target: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """The names and types of an op's arguments."""
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]


def _is_own(node: fx.Node, writer: fx.Node) -> bool:
    """True if an op has made a value, and nothing in front of a writer refers to its memory."""
    target = node.target
    users = [user for user in node.users if user < writer]
    if target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        # A caller of unsafe_split promises to treat its results as tensors of their own.
        is_split = source.target is _ATEN.unsafe_split.Tensor
        return is_split and not any(_takes_view(user, node) for user in users)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if any(returned.alias_info is not None for returned in target._schema.returns):
        return False
    if len(target._schema.returns) != 1 or target is _ATEN._unsafe_view.default:
        return False
    return not any(_takes_view(user, node) for user in users)


def _takes_view(user: fx.Node, node: fx.Node) -> bool:
    """True if a user gives a view of the node; an op that writes to it in place does not count."""
    target = user.target
    if not isinstance(target, torch._ops.OpOverload):
        return user.op != "output"
    if target is _ATEN._unsafe_view.default:
        return True
    aliased = any(
        r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns
    )
    return aliased and user.args[:1] == (node,)
