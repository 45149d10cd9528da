"""Bind a program that a rank drives, and that its device does in one go.

Its hosts exchange no announcements. Each puts its part on its streams when the record of an
execution has come, and the parts meet there. So whoever has begun must go through with it: what the
program waits for, earlier executions, it waits for first.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NoReturn

import torch

from ....ir.attributes import Effect
from ....ir.module import Function, FunctionKind
from ....ir.ops import Alloc, Call, Op, Return
from ....ir.types import TensorType
from ...base import Body, Port
from ...driven.ticket_locks import STREAMS, Tickets
from ...dtypes import TORCH_DTYPES
from ...program.code import Code
from ...program.instruction_info import KEEP
from ...program.instructions import Instruction
from ...program.linked import LinkedProgram
from ..base import Device
from ..ports import StreamPort
from .binder import DeviceBinder
from .capture import WARM_UPS, Segment
from .segments import cut

Gates = dict[int, list[Instruction]]


class DeviceOnlyBinder(DeviceBinder):
    """Binds one program; see `Binder`.

    Attributes:
        acquires: how many instructions at the program's begin wait for earlier executions.
        is_distrusted: whether calls make zeros instead of what their methods make, and nothing is
            replayed: only the messages are real, which the other ranks wait for.
    """

    def __init__(self, linked: LinkedProgram, tickets: Tickets, *, device: Device) -> None:
        super().__init__(linked, tickets, device=device)
        self.acquires = 0
        self.is_distrusted = False
        self._acquires: list[Instruction] = []
        self._releases: list[Instruction] = []
        self._ran = 0

    def bind(self) -> Code:
        """Bind the program.

        Raises:
            BindError: besides what every binder raises, an op of the program needs its host.
        """
        for op in self._program.ops:
            if op.graph != 0 and not isinstance(op, Alloc | Return):
                self._refuse(op)
        code = super().bind()
        self.acquires = len(self._acquires)
        cut(code, self)
        code.instructions[:] = [
            self._guarded(each) if isinstance(each, Segment) else each for each in code.instructions
        ]
        code.put_first([*self._acquires, self._make_room, *self._land_inputs(code)])
        self._at = max(len(self._program.ops) - 1, 0)
        for instruction in (self._join, *self._releases):
            self._emit(instruction, KEEP)
        return code

    def forget(self) -> None:
        """Drop what was captured: its messages are no more."""
        self._ran = 0
        for segment in self.segments:
            segment.forget()

    def _refuse(self, op: Op) -> NoReturn:
        self._fail(
            op,
            f"`{op.opcode}` needs its host, and the messages of the step are part of graphs",
            "in a graph that one rank drives they are so only if devices can do everything",
        )

    def _issue(self, op: Op, port: Port) -> None:
        if not isinstance(port, StreamPort):
            self._refuse(op)
        super()._issue(op, port)

    def _bind_call(self, op: Call) -> None:
        function = self._module.functions[op.fn.name]
        if (
            function.kind is FunctionKind.OPAQUE
            or op.key is not None
            or function.effect not in (Effect.PURE, Effect.READ)
        ):
            self._refuse(op)
        super()._bind_call(op)

    def _adapted(self, body: Body, function: Function) -> Body:
        """A body that makes zeros where its actor is not what was traced."""
        adapted = super()._adapted(body, function)
        shapes = [
            (type_.shape, TORCH_DTYPES[type_.dtype]) if isinstance(type_, TensorType) else None
            for type_ in function.outputs
        ]
        target = self.device.torch_device

        def run(*inputs: Any) -> Any:
            if not self.is_distrusted:
                return adapted(*inputs)
            return tuple(
                None if each is None else torch.zeros(each[0], dtype=each[1], device=target)
                for each in shapes
            )

        return run

    def _guarded(self, segment: Segment) -> Instruction:
        """A segment, which is not replayed either in that case."""

        def run() -> bool:
            if not self.is_distrusted:
                return segment()
            segment.run()
            return True

        return run

    def _make_locks(self) -> tuple[Gates, Gates]:
        """None among the ops: they are all at the program's begin and end."""
        acquires, releases = super()._make_locks()
        assert self._tickets is not None, "several executions may be in flight"
        acquire, release = self._tickets.acquire_and_release(STREAMS)
        self._acquires = [*chain.from_iterable(acquires.values()), acquire]
        self._releases = [*chain.from_iterable(releases.values()), release]
        return {}, {}

    def _make_room(self) -> bool:
        """Ahead of the first capture: a graph takes memory that nobody else holds."""
        if self._ran == WARM_UPS:
            self.device.give_back()
        self._ran += 1
        return True

    def _join(self) -> bool:
        self.order.join()
        return True
