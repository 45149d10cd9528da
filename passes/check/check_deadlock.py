"""Refuse scheduled programs that would wait for each other for ever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...ir.alike.alike_programs import AlikePrograms, alike_programs_of
from ...ir.attributes import Stream
from ...ir.ops import Op, Recv, Send, Wait, batch_of
from ...ir.ops.module import Channel, Module
from ...ir.phases import Phase
from ...ir.text.diagnostics import Diagnostic, IRError, error
from ...ir.verify.communication import EventKind, Progress
from ...ir.verify.message_matching import Message
from ..base import Pass
from ..placement.fabrics import is_by_stream


@dataclass(frozen=True)
class CheckDeadlock(Pass):
    """Run the programs' communication on paper, and refuse programs that cannot come to their end.

    The model is that of `ir/verify/communication.py`: waits block their rank, sends complete
    together with their receives, streams are queues, and a slot takes a message once the last one
    is freed. A step is run again and again, so a slot that is never freed is refused as well.

    A device may run its queues side by side, or as one. So if gathers and reductions have streams
    of their own, the programs must come to their end both with these streams and with one stream
    for all collectives. If messages are on devices, the programs must also come to their end when
    every host waits for its device at each op.

    Refused, for instance, as each rank waits for the other to receive::

        program @0(%x: f32[4]) {                  program @1(%x: f32[4]) {
          %d = send(%x) {chan = 0, ...}             %d = send(%x) {chan = 1, ...}
          wait(%d)                                  wait(%d)
          %r = recv() {chan = 1, ...}               %r = recv() {chan = 0, ...}
          ...                                       ...

    Refused on devices, for instance. The call of rank 0 may wait for the receive, which is on the
    device already, and the message of the receive depends on the result of the call::

        program @0(%x: f32[4]) {                  program @1() {
          %r = recv() {chan = 1, ...}               %q = recv() {chan = 0, ...}
          %h = call(%x) {fn = @a.f}                 %h = wait(%q)
          %d = send(%h) {chan = 0, ...}             %s = send(%h) {chan = 1, ...}
          ...                                       ...
    """

    name: ClassVar[str] = "check-deadlock"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)

    def run(self, module: Module) -> bool:
        alike = alike_programs_of(module)
        if alike is not None and _comes_to_its_end(module, alike):
            return False
        for progress in _runs(module):
            if problems := list(_slots(module, progress)):
                raise IRError(*problems)
            if not progress.run():
                raise _explain(progress)
        return False


def _runs(module: Module, alike: AlikePrograms | None = None) -> Iterator[Progress]:
    """The runs that have to come to their end, of all programs or of those that stand for them."""
    yield Progress(module, alike=alike)
    if any(channel.traffic is not None for channel in module.channels.values()):
        yield Progress(module, one_queue=True, alike=alike)
    on_devices = frozenset(id_ for id_, channel in module.channels.items() if is_by_stream(channel))
    if on_devices:
        yield Progress(module, on_devices=on_devices, alike=alike)


def _comes_to_its_end(module: Module, alike: AlikePrograms) -> bool:
    """True if the programs that stand for others show that all of them come to their end."""
    if any(batch_of(op) is not None for program in alike.representatives for op in program.ops):
        return False
    try:
        runs = _runs(module, alike)
        return all(not any(_slots(module, progress)) and progress.run() for progress in runs)
    except IRError:
        return False


def _slots(module: Module, progress: Progress) -> Iterator[Diagnostic]:
    """The slots that differ at the two ends of a message, do not exist, or are never freed."""
    for message in progress.messages.values():
        channel = module.channels[message.chan]
        if channel.collective:
            continue
        for rank, recv in message.ends.items():
            if isinstance(recv, Recv):
                yield from _slot(channel, message, rank, recv, progress)


def _slot(
    channel: Channel, message: Message, rank: int, recv: Recv, progress: Progress
) -> Iterator[Diagnostic]:
    """The problem with the slot of a receive, if any."""
    program = progress.programs[rank]
    unlike = (
        (source, send)
        for part in (message.unit if recv.batch is None else (message,))
        for source, send in part.ends.items()
        if isinstance(send, Send) and send.slot != recv.slot
    )
    for source, send in unlike:
        note = Diagnostic("the other end is here", send, progress.programs[source])
        yield Diagnostic(
            f"the two ends of {message} have different slots", recv, program, notes=(note,)
        )
        return
    if recv.slot is None:
        return
    if channel.slots is not None and not 0 <= recv.slot < channel.slots:
        yield Diagnostic(
            f"channel {channel.id} has no slot {recv.slot}, only 0..{channel.slots - 1}",
            recv,
            program,
        )
    elif message not in progress.freed:
        yield Diagnostic(
            f"slot {recv.slot} of channel {channel.id} is never freed after this, "
            "so no later message can use it",
            recv,
            program,
            help="free the value that its wait gives, after its last use",
        )


@dataclass(frozen=True, slots=True)
class _Reason:
    """One reason why a message is not complete, and the message that causes it, if any."""

    message: str
    rank: int
    op: Op
    cause: Message | None
    is_of_device: bool = False


def _explain(progress: Progress) -> IRError:
    """The error that shows which ops wait for each other."""
    message: Message | None = next(m for m in progress.messages.values() if not m.done)
    seen: dict[int, int] = {}
    steps: list[_Reason] = []
    while message is not None and id(message) not in seen:
        seen[id(message)] = len(steps)
        steps.append(_why(progress, message))
        message = steps[-1].cause
    if message is None:
        last = steps[-1]
        return error(last.message, op=last.op, program=progress.programs[last.rank])
    circle = steps[seen[id(message)] :]
    ranks = list(dict.fromkeys(step.rank for step in circle))
    who = " and ".join(f"rank {rank}" for rank in ranks)
    return error(
        f"deadlock: {who} would wait for each other for ever"
        if len(ranks) > 1
        else f"deadlock: {who} would wait for itself for ever",
        help=_remedy(circle),
        notes=tuple(
            Diagnostic(step.message, step.op, progress.programs[step.rank]) for step in circle
        ),
    )


def _remedy(circle: Sequence[_Reason]) -> str:
    if any(step.op.stream is Stream.MESSAGE for step in circle):
        return _ONE_BY_ONE
    return _IN_TURN if any(step.is_of_device for step in circle) else _EARLY


_EARLY = "post receives before waits that their senders depend on, and wait as late as possible"
_IN_TURN = (
    "a call of the host may wait for all that is on its device: post the messages of devices in "
    "one order on all ranks, and none before its turn, as `overlap` does"
)
_ONE_BY_ONE = (
    "this transport does the messages of a rank one after the other: let batch-messages put them "
    "into one order on all ranks, and those that cross into one batch"
)


def _why(progress: Progress, message: Message) -> _Reason:
    """The obstacle to a message that is not complete when no rank can go on."""
    steps = (step for part in message.unit if (step := _obstacle(progress, part)) is not None)
    obstacle = next(steps, None)
    assert obstacle is not None, "a message with no reason to wait is complete"
    return obstacle


def _obstacle(progress: Progress, message: Message) -> _Reason | None:
    """The obstacle to a message itself; None if it waits at most for others of its batch."""
    for rank, op in message.ends.items():
        if not progress.posted(message, rank):
            return _stays(
                progress,
                rank,
                f"does not come to {op.opcode} {message.seq} of channel {message.chan}",
            )
    previous = message.previous
    if previous is not None and not previous.freed:
        rank, recv = next((r, op) for r, op in previous.ends.items() if isinstance(op, Recv))
        return _stays(
            progress,
            rank,
            f"does not free slot {recv.slot} of channel {message.chan} for {message}",
        )
    for rank, op in message.ends.items():
        stream = progress.stream_of(op)
        head = None if stream is None else progress.head(rank, stream)
        if stream is not None and head is not None and head not in message.unit:
            return _Reason(
                f"on rank {rank}, {message} is behind {head} on stream {stream.value}",
                rank,
                op,
                head,
            )
    return None


def _stays(progress: Progress, rank: int, consequence: str) -> _Reason:
    event = progress.blocked(rank)
    if event is None:
        op = progress.programs[rank].ops[-1]
        return _Reason(f"rank {rank} {consequence}", rank, op, None)
    kind, cause, op = event
    if kind is EventKind.DEVICE and not isinstance(op, Wait):
        why = f"the host of rank {rank} may wait here for its device, where {cause} is under way"
        return _Reason(f"{why}, and so it {consequence}", rank, op, cause, is_of_device=True)
    return _Reason(f"rank {rank} waits here for {cause}, and so {consequence}", rank, op, cause)
