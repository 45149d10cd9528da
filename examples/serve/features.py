"""Switches of the server, for ablations: each is on or off, and counts what it has changed.

`-name` switches off a feature that is on by default, and `+name` switches one on that is off. If
the counter of a switch does not move, a run has measured nothing, and `benchmarks/serving` refuses
it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Features:
    """A field for each switch, whose comment says what its counter counts.

    The counter of a switch at its default may stand still.
    """

    thr_cap: bool = True  # threads beyond the share of a rank's cores
    affinity: bool = True  # cores that a rank may use beyond its share
    cmd_budget: bool = True  # commands beyond the budget that one step has taken
    flat_evts: bool = True  # events sent as objects of JSON
    batch_send: bool = True  # frames that would have shared one
    fill_tgt: bool = True  # decodes that did not wait for a first token in flight
    fast_cnt: bool = True  # tokens counted one by one
    async_stream: bool = True  # threads that carry a stream
    async_sched: bool = True  # decodes that waited for the one before
    groups: bool = True  # groups that there could be, beside the one
    carry: bool = True  # tokens that went through the driver
    variants: bool = True  # rows of padding beyond those of the buckets
    prefix: bool = True  # tokens that were not looked up
    chunk: bool = True  # tokens beyond the length of a chunk
    warm: bool = True  # executions that were to be warmed
    gc_freeze: bool = True  # collections of the oldest generation, on rank 0
    fast_sse: bool = True  # chunks formatted by json.dumps
    overlap: bool = True  # the pass was left out
    capture: bool = True  # the pass was left out
    queue_ipc: bool = False  # frames that a feeder thread pickled
    shm_ring: bool = False  # frames that went through shared memory
    inproc: bool = False  # frames that stayed in the process
    stream_interval: bool = False  # tokens held back for a later chunk
    stream_tok: bool = False  # events beyond those that the same tokens would have shared
    uvloop: bool = False  # event loops that are uvloop's
    kv256: bool = False  # tokens of a block beyond the usual ones
    clamp: bool = False  # ids that the graph has clamped to the vocabulary
    debug_bounds: bool = False  # executions whose ids, positions and blocks the graph has checked
    changes: Counter[str] = field(default_factory=Counter, compare=False)  # by a switch's name


DEFAULTS = {switch.name: switch.default for switch in fields(Features) if switch.name != "changes"}


def parse(text: str) -> Features:
    """Read switches such as `-prefix,+inproc`, with commas or spaces between them.

    Raises:
        ValueError: an unknown name, a switch that is at that position already, or one named twice.
    """
    chosen: dict[str, bool] = {}
    for token in text.replace(",", " ").split():
        sign, name = token[0], token[1:]
        if sign not in "+-" or name not in DEFAULTS:
            there = ", ".join(DEFAULTS)
            raise ValueError(f"no feature {token!r}: write -name or +name of {there}")
        if name in chosen or (sign == "+") == DEFAULTS[name]:
            raise ValueError(f"{token!r} switches nothing: it is so already, or named twice")
        chosen[name] = sign == "+"
    return Features(**chosen)
