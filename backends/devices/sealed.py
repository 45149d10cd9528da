"""Binds a sealed program: one that a rank drives, and that its device does in one go.

Its hosts exchange no announcements. Each puts its part on its streams when the record of an
execution has come, and the parts meet there. So whoever has begun must go through with it: what the
program waits for, earlier executions, it waits for first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from ..binder import Code
from ..instructions import Instruction
from ..linked import LinkedProgram
from ..steps import KEEP
from ..turnstiles import STREAMS, Tickets
from .base import Device
from .binder import DeviceBinder
from .capture import WARM_UPS, Segment
from .cut import cut
from .hosted import put_first

Gates = dict[int, list[Instruction]]


class SealedBinder(DeviceBinder):
    """Binds one program; see `Binder`.

    Attributes:
        gates: how many instructions at the program's begin wait for earlier executions.
        segments: the parts of the program that are captured, in order.
    """

    def __init__(
        self,
        linked: LinkedProgram,
        execution: Callable[[], int],
        tickets: Tickets | None = None,
        *,
        device: Device,
    ) -> None:
        super().__init__(linked, execution, tickets, device=device)
        self.segments: tuple[Segment, ...] = ()
        self._linked = linked
        self.gates = 0
        self._gates: list[Instruction] = []
        self._passages: list[Instruction] = []
        self._ran = 0

    def bind(self) -> Code:
        """See `Binder`."""
        code = super().bind()
        self.gates = len(self._gates)
        self.segments = cut(code, self._linked, self)
        put_first(code, [*self._gates, self._make_room, *self._first(code)])
        self._at = max(len(self._program.ops) - 1, 0)
        for instruction in (self._join, *self._passages):
            self._emit(instruction, KEEP)
        return code

    def forget(self) -> None:
        """Drop what was captured: its messages are no more."""
        self._ran = 0
        for segment in self.segments:
            segment.forget()

    def _make_gates(self) -> tuple[Gates, Gates]:
        """None among the ops: they are all at the program's begin and end."""
        gates, passages = super()._make_gates()
        assert self._tickets is not None, "several executions may be in flight"
        gate, passage = self._tickets.gate(STREAMS)
        self._gates = [*chain.from_iterable(gates.values()), gate]
        self._passages = [*chain.from_iterable(passages.values()), passage]
        return {}, {}

    def _make_room(self) -> bool:
        """Ahead of the first capture: a graph takes memory that nobody else holds."""
        if self._ran == WARM_UPS:
            self.device.give_back()
        self._ran += 1
        return True

    def _join(self) -> bool:
        self.flow.join()
        return True
