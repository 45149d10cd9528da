"""Replace ops that write in place by ops that make a new tensor.

An op cannot write in place to a value that is transferred first. If an op of the graph has made the
value, the write can make a new tensor instead. A write to a slice of the value makes a new slice,
and a new value with it; what is read behind the write is read of these. Writes to state stay, and
so do writes to values of which other kinds of views are taken.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from ...method.node_memory import memory_of
from ..autodiff.subgraphs import written_in_place
from .expansions import fake_mode_of

_ATEN = torch.ops.aten


def without_writes(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Replace the writes of a graph that can be replaced; the graph is changed in place.

    Returns:
        The nodes that are new, each with the node that wrote.
    """
    new: dict[fx.Node, fx.Node] = {}
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
            views = _slices(first, node)
            if views:
                node.target = form
                result = _as_written(node, first)
                new |= dict.fromkeys(_scatter(result, views), node)
            continue
        node.target = form
        result = node if view is not None else _as_written(node, first)
        _replace_behind(result, {first: result})
    return new


def _slices(part: fx.Node, writer: fx.Node) -> list[fx.Node]:
    """The slices of slices from a part to the value that has it; empty if a write has to stay."""
    slices: list[fx.Node] = []
    while part.target in _SLICES:
        slices.append(part)
        parent = part.args[0]
        assert isinstance(parent, fx.Node)
        part = parent
    if not slices or not _makes_tensor(part):
        return []
    return slices if all(view.target in _SLICES for view in _views(part, writer)) else []


def _views(value: fx.Node, writer: fx.Node) -> list[fx.Node]:
    """All views of a value in front of a writer, and views of these, in order."""
    users = sorted(user for user in value.users if user < writer and _takes_view(user, value))
    return [view for user in users for view in (user, *_views(user, writer))]


def _scatter(part: fx.Node, slices: Sequence[fx.Node]) -> list[fx.Node]:
    """Make the value whose part is a new one, and let what is behind read it and its slices.

    Args:
        part: the new part.
        slices: the slices of which it is one, the smallest first.

    Returns:
        The new nodes.
    """
    graph, new, result = part.graph, [], part
    for view in slices:
        whole, *where = view.args
        assert isinstance(whole, fx.Node)
        op = _SLICES[view.target]
        if op is None:
            continue
        with graph.inserting_after(result):
            result = graph.call_function(op, (whole, result, *where), dict(view.kwargs))
        result.meta["val"] = whole.meta["val"]
        new.append(result)
    value = slices[-1].args[0]
    assert isinstance(value, fx.Node)
    again, last = {value: result}, result
    for view in sorted(_views(value, part)):
        source = view.args[0]
        assert isinstance(source, fx.Node)
        assert callable(view.target)
        with graph.inserting_after(last):
            arguments = (again[source], *view.args[1:])
            last = graph.call_function(view.target, arguments, dict(view.kwargs))
        last.meta["val"] = view.meta["val"]
        again[view] = last
        new.append(last)
    # The result of the write is the slice, which later writes may change, too.
    _replace_behind(last, {**again, part: again[slices[0]]})
    for view in reversed(new):
        if not view.users and view.target in _SLICES:
            graph.erase_node(view)
    return [node for node in new if node.users]


def _replace_behind(place: fx.Node, new: Mapping[fx.Node, fx.Node]) -> None:
    """Let nodes behind a place take new nodes in the place of others."""
    is_behind = False
    for user in list(place.graph.nodes):
        for old in user.all_input_nodes if is_behind else ():
            if old in new:
                user.replace_input_with(old, new[old])
        is_behind = is_behind or user is place


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
        _replace_behind(item, {value: item})


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


def read_later(nodes: Iterable[fx.Node], place: fx.Node) -> None:
    """Let nodes behind a place read the results of mutable ops, instead of their operands.

    Args:
        nodes: nodes in front of the place, some of which write in place.
        place: the node behind which others read the results.
    """
    for node in nodes:
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


_SLICES: Mapping[object, torch._ops.OpOverload | None] = {
    _ATEN.slice.Tensor: _ATEN.slice_scatter.default,
    _ATEN.select.int: _ATEN.select_scatter.default,
    _ATEN.alias.default: None,
    _ATEN.detach.default: None,
}
"""The op that gives a tensor with another slice, for each kind of slice; None: it is the slice."""


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
    return _makes_tensor(node) and not any(_takes_view(user, node) for user in users)


def _makes_tensor(node: fx.Node) -> bool:
    """True if an op makes one tensor, with memory of its own."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target is _ATEN._unsafe_view.default:
        return False
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is None


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
