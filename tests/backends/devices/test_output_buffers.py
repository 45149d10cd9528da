"""Outputs that a graph lends are not written over before all streams have read them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from cg.backends.devices.programs.capture import WARM_UPS
from cg.backends.devices.programs.executable import DeviceExecutable
from cg.backends.devices.programs.instance import hand_over
from cg.backends.fake.device import FakeDevice
from cg.backends.fake.queues import FakeQueue
from cg.backends.program.linked import LinkedProgram
from cg.ir.text.parser import parse_module
from tests.backends.devices.patience import PATIENCE, loose_device

from .ranks import pause

PROGRAM = """
module @s phase=scheduled world=1 {
  function @a.f(f32[4]) -> (f32[4]) {actor = a, effect = read}
  program @0(%x: f32[4]) {
    %h = call(%x) {fn = @a.f, graph = 0} : f32[4]
    return(%h)
  }
}
"""


class LateQueue(FakeQueue):
    """A stream of the caller's that is behind: it reads when somebody waits for it, or at last."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__("late", False, device)
        self.values: list[float] = []
        self._go = threading.Event()

    def put(self, what: str, work: Callable[[], None], comm: Any = None) -> None:
        super().put(what, work, comm)
        if "read" in self.log and what.startswith("record"):
            self._go.set()

    def read(self, tensor: torch.Tensor) -> None:
        """Put a read of the tensor's memory on the stream, which does not hold the tensor."""
        memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())

        def work() -> None:
            assert self._go.wait(PATIENCE)
            self.values += list(memory)

        self.put("read", work)

    def end(self) -> list[float]:
        """The values that it has read, now at the latest."""
        self._go.set()
        self.synchronize()
        return self.values


class Program:
    """A program that doubles, on a device, called from several streams."""

    def __init__(self) -> None:
        self.device = loose_device()
        bodies = {"a.f": lambda x: (x * 2,)}
        linked = LinkedProgram(parse_module(PROGRAM), 0, bodies)
        self.executable = DeviceExecutable(linked, self.device)
        self.late = LateQueue(self.device)
        self.other = FakeQueue("other", False, self.device)
        self._x = torch.zeros(4)  # always at the same place, so that there is one graph

    def __call__(self, value: float, stream: FakeQueue) -> torch.Tensor:
        self.device.current = stream
        self._x.fill_(value)
        (output,) = self.executable.run((self._x,), pause)
        return output  # type: ignore[no-any-return]


def test_a_stream_that_has_dropped_an_output_still_reads_it() -> None:
    program = Program()
    for _ in range(WARM_UPS):
        program(0.0, program.late)
    output = program(1.0, program.late)
    program.late.read(output)
    del output
    assert program(5.0, program.other).tolist() == [10.0] * 4
    assert program.late.end() == [2.0] * 4
    assert program.executable.segments[0].captures == 1, "the same memory was to be used again"


def test_a_stream_that_a_result_was_delivered_to_reads_it() -> None:
    program = Program()
    for _ in range(WARM_UPS):
        program(0.0, program.other)
    output = program(1.0, program.other)
    loans = [loan for _, loan in program.executable.segments[0].lent]
    program.device.current = program.late
    with program.device.session():
        hand_over(program.device, [output], loans)  # type: ignore[arg-type]
    program.late.read(output)
    del output
    assert program(5.0, program.other).tolist() == [10.0] * 4
    assert program.late.end() == [2.0] * 4
    assert program.executable.segments[0].captures == 1, "the same memory was to be used again"


def test_one_stream_is_waited_for_once() -> None:
    program = Program()
    for _ in range(WARM_UPS + 1):
        program(0.0, program.other)
    program.other.log.clear()
    program(1.0, program.other)
    assert [entry.split()[0] for entry in program.other.log] == ["record", "wait"]


def test_what_was_lent_is_recorded_on_its_streams() -> None:
    """When its graph is dropped, the allocator does not give the memory away too early."""
    program = Program()
    kept: list[int] = []
    program.device.keep = lambda tensors, _: kept.extend(t.data_ptr() for t in tensors)  # type: ignore[method-assign]
    for _ in range(WARM_UPS):
        program(0.0, program.other)
    kept.clear()
    output = program(1.0, program.other)
    assert kept == [output.data_ptr()] * 2  # the alias, which does nothing, and the graph's own
