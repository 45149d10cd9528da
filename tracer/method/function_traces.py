"""Traces of the torch functions that a step calls itself, of this start and of earlier ones.

Such a function runs no code of the user. So its name, its arguments and torch's settings say all
about its graph, and nothing has to be compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from ..torch_settings import settings_now
from ..values.interface import TracedCall
from .joint import Wanted
from .joint_graph import Joint
from .purity.function_log import Unlike, torch_settings
from .stored.function_names import name_of
from .stored.plain_text import Damaged, Json, NotStorable, encoded
from .stored_traces import TraceStore, joint_text, leaf_json, read_joint
from .twice import settled


def trace_function(
    call: TracedCall,
    wanted: Wanted | None,
    store: TraceStore | None,
    pieces: Callable[[Joint], Json],
) -> tuple[TracedCall, Joint]:
    """Trace a call of a torch function, or take the trace of an earlier start.

    Args:
        call: the call.
        wanted: the derivative to trace as well, if any.
        store: has the traces of earlier starts, and keeps new ones; None: there are none.
        pieces: gives the JSON of what a trace was cut into, when that is done.

    Raises:
        TraceError, UsesGradients: as in `settled`.
    """
    if store is None:
        return settled(call, wanted)
    try:
        key = _key(call, wanted)
    except (NotStorable, Unlike):
        return settled(call, wanted)

    def again(error: Damaged) -> Joint:
        store.leave_out(call.shown, f"damaged: {error}")
        return settled(call, wanted)[1]

    for text in store.read(key):
        try:
            joint = read_joint(text, call, wanted, again, partial(store.mend, call.shown))
        except Damaged as error:
            store.leave_out(call.shown, f"damaged: {error}")
            continue
        store.take(call.shown)
        return call, joint.relocated(lambda _: call.loc)
    call, traced = settled(call, wanted)
    store.keep(key, lambda: joint_text(traced, pieces(traced), is_compared=False))
    return call, traced


def _key(call: TracedCall, wanted: Wanted | None) -> str:
    """All that the graph of a torch function depends on, but for torch itself.

    Raises:
        NotStorable: no other process could have the same key.
        Unlike: dispatch modes or hooks of the user are on.
    """
    torch_settings(0)
    parts = [
        name_of(call.function),
        encoded(call.signature.spec),
        list(map(leaf_json, call.signature.leaves)),
        str(call.device),
        call.is_of_mesh,
        None if wanted is None else [wanted.outputs, wanted.inputs],
        list(map(encoded, settings_now())),
    ]
    return json.dumps(parts)
