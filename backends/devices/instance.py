"""One of the executions of a graph that may be in flight at a time, on a rank with a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..instance import Instance
from ..instructions import Instruction
from ..steps import Role
from .base import Device, Queue


class Delivery:
    """Hands the result of an execution over to the stream of whoever asks for it.

    Args:
        device: where the result is made.
        caller: the stream that goes on behind the execution already.
        tensors: the result's.
    """

    def __init__(self, device: Device, caller: Queue, tensors: Sequence[Tensor]) -> None:
        self._device = device
        self._caller = caller
        self._tensors = tensors

    def __call__(self) -> None:
        """Let the current stream go on behind the execution."""
        if self._device.caller() != self._caller:
            with self._device.session():
                self._device.keep(self._tensors)


class DeviceInstance(Instance):
    """See `Instance`; the program runs on the rank's device.

    An execution has ended when all its work has been put on streams. What it returns is there for
    whatever its receiver puts on a stream behind `delivery`.

    Args:
        arguments: as `Instance` takes them.
        device: of this rank.
        watch: called with the number of each execution that has been put on the device.
    """

    def __init__(self, *arguments: Any, device: Device, watch: Callable[[int], None]) -> None:
        super().__init__(*arguments)
        self._device = device
        self._watch = watch
        self._polls: dict[Instruction | None, Callable[[], bool]] = {}
        for instruction, step in zip(self._code.instructions, self._code.steps, strict=True):
            if step.role is Role.AWAIT and step.port is not None:
                self._polls[instruction] = step.port.poll
            elif step.role is Role.KEEP:
                self._polls[instruction] = instruction

    def advance(self) -> bool:
        """See `Instance`; the device is only asked for if there is something to put on it."""
        poll = self._polls.get(self.pending)
        if poll is not None and not (poll() or poll()):
            for move_on in self._progress:
                move_on()
            return False
        with self._device.session():
            return super().advance()

    def _end(self) -> None:
        if self.on_end is not None:
            outputs = self._get_outputs(self._registers)
            tensors = [value for value in outputs if isinstance(value, Tensor)]
            self._device.keep(tensors)
            self.delivery = Delivery(self._device, self._device.caller(), tensors)
        execution = self.execution
        super()._end()
        self._watch(execution)
