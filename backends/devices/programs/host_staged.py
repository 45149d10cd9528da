"""Binds a program whose tensors are on a device and whose messages all go by the host.

Work runs on torch's current stream, and the host waits for each message that it receives as it
does without a device. So errors can travel in messages, and several executions of a graph may be in
flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....ir.module import Function, FunctionKind
from ....ir.ops import Call, Collective, Op, Recv, Send, Value
from ....ir.types import FutureType, TensorType
from ...base import Body, Port
from ...driven.ticket_locks import Tickets
from ...program import instructions
from ...program.binder import Binder
from ...program.code import Code
from ...program.instruction_info import KEEP
from ...program.linked import LinkedProgram
from ...program.random import seeded_on
from ...program.type_checks import checked
from ..base import Device, Queue
from ..staging import Copies, StagedPort


class HostedBinder(Binder):
    """Binds one program to a device; see `Binder`.

    Args:
        device: of this rank.

    Attributes:
        copies: between the device and its host, for messages.
    """

    def __init__(
        self,
        linked: LinkedProgram,
        tickets: Tickets | None = None,
        *,
        device: Device,
    ) -> None:
        there = {name: landed(value, device) for name, value in linked.constants.items()}
        linked = replace(linked, constants=there)
        super().__init__(linked, tickets, target=device.torch_device)
        self.device = device
        self.copies = Copies(device)
        self._code.progress.append(self.copies.move_on)

    def bind(self) -> Code:
        """See `Binder`; first of all the inputs come to the device."""
        code = super().bind()
        code.put_first(self._first(code) if self._lands_inputs else [])
        return code

    _lands_inputs = True

    def _first(self, code: Code) -> list[instructions.Instruction]:
        """What brings the inputs to the device."""
        land = partial(landed, device=self.device)
        return [
            instructions.apply(code.registers, register, register, land)
            for register, value in enumerate(self._program.params)
            if isinstance(value.type, TensorType)
        ]

    def _adapted(self, body: Body, function: Function) -> Body:
        """An opaque method makes its tensors on the device, whatever it says of devices."""
        if function.kind is not FunctionKind.OPAQUE:
            return body
        return checked(_on_device(body, function, self.device), function)

    def _seeded(self, body: Body, key: int) -> Body:
        return seeded_on(self.device, super()._seeded(body, key), self._seed, key, self._execution)

    def _bind_call(self, op: Call) -> None:
        if self._module.functions[op.fn.name].kind is FunctionKind.OPAQUE:
            self._emit(self.copies.move_on, KEEP)  # nothing looks after messages while it runs
        super()._bind_call(op)

    def _issue(self, op: Op, port: Port) -> None:
        operand = _carried(op.operands[0]) if op.operands else None
        result = _carried(op.result)
        sends = operand if isinstance(operand, TensorType) else None
        receives = result if isinstance(result, TensorType) else None
        if (sends or receives) is not None and isinstance(op, Recv) and op.operands:
            self._fail(op, "a transport of the host cannot receive into a device's buffer")
        if sends is None and not isinstance(op, Recv):
            # It would overtake those that are still copied.
            self._emit(self.copies.move_on, KEEP, self._at)
        if sends is not None or receives is not None:
            port = self._staged(op, port, sends, receives)
        super()._issue(op, port)

    def _staged(
        self, op: Op, port: Port, sends: TensorType | None, receives: TensorType | None
    ) -> StagedPort:
        assert isinstance(op, Send | Recv | Collective), "nothing else has a port"
        assert op.chan is not None, "a program's messages have channels"
        slot = op.slot if isinstance(op, Recv) else None
        landing = None if receives is None else self.copies.landing(op.chan, slot, receives)
        changes = sends is not None and self._may_change(op.operands[0])
        return StagedPort(port, self.copies, sends, landing, self._producers(op), changes)

    def _producers(self, op: Op) -> Sequence[Queue]:
        """The streams that an op's operand may have been made on."""
        return (self.copies.compute,)


def landed(value: Any, device: Device) -> Any:
    """A value for work on the device: a tensor is brought there, unless it is there.

    Its memory may be written to as soon as this returns. That of pinned memory the device reads
    later, when it comes to it, so it reads a copy; torch keeps that until then.
    """
    if isinstance(value, Tensor) and value.device != device.torch_device:
        if value.is_pinned():
            value = torch.empty_like(value, pin_memory=True).copy_(value)
        return value.to(device.torch_device, non_blocking=True)
    return value


def _carried(value: Value) -> object:
    return value.type.value if isinstance(value.type, FutureType) else value.type


def _on_device(body: Body, function: Function, device: Device) -> Body:
    """A body with the device as torch's default, and tensors that it returns brought there."""
    target = device.torch_device
    tensors = [isinstance(type_, TensorType) for type_ in function.outputs]

    def run(*inputs: Any) -> Any:
        with target:
            outputs = body(*inputs)
        if True not in tensors or len(outputs) != len(tensors):
            return outputs
        return tuple(
            value.to(target) if moves and isinstance(value, torch.Tensor) else value
            for value, moves in zip(outputs, tensors, strict=True)
        )

    return run
