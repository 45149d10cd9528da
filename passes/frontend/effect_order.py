"""Find the ops that must keep their order, by their values and their effects on state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from ...ir.attributes import Effect
from ...ir.ops import Call, Op, Value
from ...ir.ops.module import Function

State: TypeAlias = tuple[str, object]
"""A state that an effect touches: that of an actor, or that two actors share; one bucket of an
actor's gradients; or the state of a rank, for barriers or outside of actors."""


def effect_of(op: Op, functions: Mapping[str, Function]) -> Effect:
    """The effect of an op: that of a call's function, WRITE if it synchronizes, else PURE."""
    if isinstance(op, Call):
        return functions[op.fn.name].effect
    return Effect.WRITE if op.synchronizes else Effect.PURE


@dataclass(slots=True)
class _History:
    """The ops that have touched a state, by index.

    Attributes:
        write: the last write.
        update: the last update since that write.
        reads: the reads since the last write or update.
        accumulates: the ops that have worked on gradients since the last write.
    """

    write: int | None = None
    update: int | None = None
    reads: list[int] = field(default_factory=list)
    accumulates: list[int] = field(default_factory=list)


def dependencies(ops: Sequence[Op], functions: Mapping[str, Function]) -> list[tuple[int, ...]]:
    """For each op the indices of earlier ops that it has to follow, ascending.

    An op follows the makers of its operands. It follows earlier calls on the same actor, or on
    state that its actor shares with theirs, if their effects conflict (`Effect.conflicts_with`). A
    call with an effect but no actor keeps its order with other such calls on the same ranks, and a
    barrier with all effects on its ranks. Edges that other edges imply are left out. So there are
    about as many edges as operands, and the time is nearly linear.
    """
    makers: dict[Value, int] = {}
    histories: dict[State, _History] = {}
    reducing = {f.actor for f in functions.values() if f.effect is Effect.REDUCE}
    edges: list[tuple[int, ...]] = []
    for index, op in enumerate(ops):
        before = {makers[value] for value in op.operands if value in makers}
        for state, effect in _touches(op, functions, reducing):
            history = histories.get(state)
            if history is None:
                history = histories[state] = _History()
            before.update(_follow(history, effect, index))
        edges.append(tuple(sorted(before)))
        for value in op.results:
            makers[value] = index
    return edges


def _touches(
    op: Op, functions: Mapping[str, Function], reducing: Set[str | None]
) -> list[tuple[State, Effect]]:
    """The states that an op touches, each with the effect.

    Args:
        op: the op.
        functions: the functions of its module, by name.
        reducing: the actors whose gradients are reduced.
    """
    if not isinstance(op, Call):
        if not op.synchronizes or op.place is None:
            return []
        return [(("rank", rank), Effect.WRITE) for rank in op.place.ranks]
    function = functions[op.fn.name]
    if function.effect is Effect.PURE:
        return []
    place = op.place
    ranks = place.ranks if place is not None else (None,)
    # To a barrier, every effect on its ranks counts as a read, so that these do not conflict.
    touched: list[tuple[State, Effect]] = [(("rank", rank), Effect.READ) for rank in ranks]
    if function.parameter is not None and function.effect is Effect.READ:
        # No update changes a parameter: such a read commutes with all but writes, as a sum does.
        touched += [(("actor", name), Effect.ACCUMULATE) for name, _ in function.touches]
    elif function.actor is not None:
        touched += [(("actor", name), effect) for name, effect in function.touches]
        if function.effect.is_on_gradients and function.actor in reducing:
            # For the actor's other state, a reduction counts as an accumulation does.
            effect = _on_one_state(function.effect)
            buckets = function.gradient_buckets
            touched += [(("gradients", (function.actor, bucket)), effect) for bucket in buckets]
    else:
        touched += [(("outside", rank), _on_one_state(function.effect)) for rank in ranks]
    return touched


def _on_one_state(effect: Effect) -> Effect:
    """The effect on a single bucket of gradients, which a reduction writes to."""
    return Effect.WRITE if effect is Effect.REDUCE else effect


def _follow(history: _History, effect: Effect, index: int) -> list[int]:
    """Enter an op with an effect into a state's history; return the ops that it has to follow."""
    written = [] if history.write is None else [history.write]
    if effect.is_on_gradients:
        history.accumulates.append(index)
        return written
    changed = written if history.update is None else [history.update]
    if effect is Effect.READ:
        history.reads.append(index)
        return changed
    read = history.reads or changed
    if effect is Effect.UPDATE:
        history.update, history.reads = index, []
        return read
    if history.accumulates and read is written:
        read = []
    before = history.accumulates + read
    history.write, history.update = index, None
    history.reads, history.accumulates = [], []
    return before
