"""Replace ops that write in place to values of their own by ops that make a new tensor.

An op cannot write in place to a value that is transferred first. Nobody sees the difference where
the value has been made by an op, and no view of it is taken. Writes to state stay.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from ..autodiff.subgraphs import memory_of, written_in_place
from .expansions import fake_mode_of

_ATEN = torch.ops.aten


def without_writes(graph: fx.Graph) -> None:
    """Replace them where there is another form, in place."""
    state = {memory_of(node) for node in graph.nodes if node.op == "placeholder"}
    for node in list(graph.nodes):
        written = written_in_place(node)
        if written is not None and node.target not in _VIEWS and memory_of(node) in state:
            node.replace_all_uses_with(written)  # it is the state itself, where it lives
            continue
        view = _VIEWS.get(node.target)
        form = view or other_form(node.target)
        first = node.args[0] if node.args else None
        if form is None or not isinstance(first, fx.Node):
            continue
        if view is None and not _is_own(first):
            continue
        node.target = form
        result = node if view is not None else _as_written(node, first)
        passed = False
        for user in list(graph.nodes):
            if passed and first in user.all_input_nodes:
                user.replace_input_with(first, result)
            passed = passed or user is result


def _as_written(node: fx.Node, first: fx.Node) -> fx.Node:
    """The result of an op with the element type that it would have had in place of its operand.

    A product with float64 is one, and a comparison is of booleans, but in place neither is.
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
    """Let what follows a place read what ops before it have written, from the ops' results."""
    for node in made:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            continue
        written, following = node.args[0], place.next
        assert isinstance(written, fx.Node)
        while following.op != "root":
            following.replace_input_with(written, node)
            following = following.next


_VIEWS: Mapping[object, torch._ops.OpOverload] = {
    _ATEN.transpose_.default: _ATEN.transpose.int,
    _ATEN.t_.default: _ATEN.t.default,
    _ATEN.squeeze_.dim: _ATEN.squeeze.dim,
    _ATEN.unsqueeze_.default: _ATEN.unsqueeze.default,
}
"""Forms of ops that write no memory in place: they change how a tensor regards its own."""


def other_form(target: object) -> torch._ops.OpOverload | None:
    """The op that computes the same as one that writes in place, if that draws nothing."""
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


def _is_own(node: fx.Node) -> bool:
    """True if an op has made a value, and nothing else refers to its memory."""
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        is_split = source.target is _ATEN.unsafe_split.Tensor  # its caller is to write to no other
        return is_split and not any(_takes_view(user, node) for user in node.users)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if any(returned.alias_info is not None for returned in target._schema.returns):
        return False
    if len(target._schema.returns) != 1 or target is _ATEN._unsafe_view.default:
        return False
    return not any(_takes_view(user, node) for user in node.users)


def _takes_view(user: fx.Node, node: fx.Node) -> bool:
    """True if a user's result shares memory with what it takes, other than by writing to it."""
    target = user.target
    if not isinstance(target, torch._ops.OpOverload):
        return user.op != "output"
    if target is _ATEN._unsafe_view.default:
        return True
    aliased = any(
        r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns
    )
    return aliased and user.args[:1] == (node,)
