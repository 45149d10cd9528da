"""Put the messages of all ranks into one order, and batch messages that cross."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from ...ir.ops import Op, Recv, Send, batch_of
from ...ir.ops.module import Module, Program
from ...ir.phases import Phase
from ...ir.text.diagnostics import error
from ..base import Pass
from ..placement.fabrics import one_by_one
from .message_order import message_order


@dataclass(frozen=True)
class BatchMessages(Pass):
    """Order the messages of transports that do a rank's messages one after the other.

    With such a transport, a message blocks those behind it until its other end is posted. So all
    ranks keep to one order. Two messages that cross, such as an activation of a pipeline and a
    gradient that comes back, become a *batch*: one operation at both ends, in which neither waits
    for the other. Sends and receives are put off until those before them have been posted, and no
    other op moves. Without this pass, `check-deadlock` refuses programs in which messages cross.

    Programs that come to their end with sends and receives on a stream each cannot deadlock after
    this pass. In the order, a message is behind all messages that its ranks wait for before they
    post it. Suppose that no rank can go on, and take the first message that is not complete. All
    messages ahead of it on its streams are complete. So a rank has not posted it, and is blocked in
    a wait for a later message. Its post was put off past that wait by a message ahead of it in the
    order, which is posted behind the wait, and so comes behind the awaited message in the order.
    This is a contradiction.

    With `rendezvous=hccl`:

    Before::

        channel 0 {ranks = {0..1}, via = hccl}
        channel 1 {ranks = {1,0}, via = hccl}
        program @0(%x: f32[2]) {
          %y.recv = recv() {chan = 1, peer = 1, seq = 0} : future<f32[2]>
          %x.send = send(%x) {chan = 0, peer = 1, seq = 0} : future<unit>
          %y = wait(%y.recv) : f32[2]
          ...

    After::

          %x.send = send(%x) {batch = 0, chan = 0, peer = 1, seq = 0} : future<unit>
          %y.recv = recv() {batch = 0, chan = 1, peer = 1, seq = 0} : future<f32[2]>
          %y = wait(%y.recv) : f32[2]
          ...

    Attributes:
        rendezvous: as in `Fabrics`.
        batches: whether to make batches; without them, messages only get an order. Driven graphs
            have none, as an error may take the place of one message of a batch.
    """

    rendezvous: str = ""
    batches: bool = True

    name: ClassVar[str] = "batch-messages"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)
    optional: ClassVar[bool] = True

    def run(self, module: Module) -> bool:
        chosen = one_by_one(module, self.rendezvous)
        if not chosen or _is_batched(module):
            return False
        for program in module.programs:
            _refuse_planned(program, chosen)
        order = message_order(module, chosen, self.batches)
        if order is None:
            return False  # check-deadlock shows which ops wait for each other
        batches = [unit for unit in order if len(unit) > 1]
        numbers = {key: number for number, unit in enumerate(batches) for key in unit}
        places = {key: place for place, unit in enumerate(order) for key in unit}
        changed = False
        for program in module.programs:
            ends = [op for op in program.ops if isinstance(op, Send | Recv) and op.chan in chosen]
            for op in ends:
                op.batch = numbers.get((op.chan, op.seq))
            # In a batch the send comes first, behind the op that makes its operand.
            ends.sort(key=lambda op: (places[op.chan, op.seq], isinstance(op, Recv)))
            changed = _reorder(program, ends) or changed
        return changed or bool(batches)


def _is_batched(module: Module) -> bool:
    return any(batch_of(op) is not None for program in module.programs for op in program.ops)


def _refuse_planned(program: Program, chosen: Collection[int]) -> None:
    ends = (op for op in program.ops if isinstance(op, Send | Recv) and op.chan in chosen)
    for op in ends:
        if op.stream is not None or op.slot is not None:
            raise error(
                "batch-messages cannot move messages whose streams or buffers are planned",
                op=op,
                program=program,
                help="run batch-messages before assign-streams and plan-buffers",
            )


def _reorder(program: Program, line: Sequence[Op]) -> bool:
    """Post the messages of `line` in its order, each as early as the order allows."""
    moving = set(line)
    units = (list(unit) for _, unit in groupby(line, _unit))
    unit = next(units, [])
    seen: set[Op] = set()
    ops: list[Op] = []
    for op in program.ops:
        if op not in moving:
            ops.append(op)
            continue
        seen.add(op)
        while unit and seen.issuperset(unit):
            ops += unit
            unit = next(units, [])
    changed = any(a is not b for a, b in zip(ops, program.ops, strict=True))
    program.ops[:] = ops
    return changed


def _unit(op: Op) -> object:
    """A key that only ops of the same batch share."""
    batch = batch_of(op)
    return op if batch is None else batch
