"""Run one rank's program on its device; the host puts work on streams and goes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from ...base import Pause
from ...device import Device
from ...program.executor import Executable
from ...program.linked import LinkedProgram
from .binder import DeviceBinder, landed
from .capture import WARM_UPS
from .pending_work import PendingWork
from .segments import cut, set_aside
from .tail import follow_tails


class DeviceExecutable(Executable):
    """A program that is bound to a device; see `Executable`.

    When `run` returns, the work of the program is on streams, and the caller's stream goes on
    behind it. So whatever the caller puts on its stream can use the results.

    Args:
        device: of this rank.

    Attributes:
        segments: the parts of the program that are captured, in order.
        work: what it puts on the device, for the watchdog.
    """

    def __init__(self, linked: LinkedProgram, device: Device) -> None:
        binder = DeviceBinder(linked, device=device)
        code = binder.bind()
        if any(op.graph is not None for op in linked.program.ops):
            cut(code, binder)
        self._looks_after = binder.has_host_sends and bool(binder.messages)
        if self._looks_after:
            set_aside(code, binder)
        self.segments = binder.segments
        super().__init__(linked, code)
        self._device = device
        self._order = binder.order
        self._copies = binder.copies
        self._ran = 0
        self.work = PendingWork(
            self.program,
            self.module,
            binder.messages,
            self.segments,
            self.position,
            linked.bodies,
        )
        device.synchronize()  # constants are there for all streams

    def run(
        self,
        inputs: Sequence[Any],
        pause: Pause,
        execution: int | None = None,
        checked: bool = False,
    ) -> tuple[Any, ...]:
        """Put one execution on the device's streams; see `Executable.run`."""
        device, order = self._device, self._order
        if self.segments and self._ran == WARM_UPS:
            # A graph has a pool of its own, which gets no memory of other pools during a capture.
            device.give_back()
        self._ran += 1
        with device.session():
            follow_tails(device, (order.compute,))
            landed_inputs = [landed(value, device) for value in inputs]
            if not self.segments:
                order.fork()
            with self._copies.looked_after() if self._looks_after else nullcontext():
                outputs = super().run(landed_inputs, pause, execution, checked)
            order.join()
            returned = [value for value in outputs if isinstance(value, Tensor)]
            device.keep(returned, device.caller())
            for segment in self.segments:
                for _, loan in segment.lent:
                    loan.hand_to_caller(device)
        return outputs

    def look_after_messages(self) -> None:
        """Move messages of hosts on, if the host is in a call that may wait for the device.

        Another thread calls it while the host does not get on.
        """
        looking = self._copies.looking
        if self._looks_after and looking.acquire(blocking=False):
            try:
                self._engine.move_on()
            finally:
                looking.release()

    def reset(self) -> None:
        """Forget the execution in progress and the graphs, whose messages are gone."""
        super().reset()
        self._copies.forget()
        self._ran = 0
        self.drop_graphs()

    def drop_graphs(self) -> None:
        """Drop the captured graphs; idempotent."""
        for segment in self.segments:
            segment.forget()
