"""Messages of a rank with a device that ends the job; the device and the job are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cg.backends.devices.programs.executable import DeviceExecutable
from cg.ir.attributes import Stream
from cg.ir.ops.module import Module, Program
from cg.ir.phases import Phase
from cg.launch.runtime.device_session import DeviceSession


class Ended(Exception):
    """The job has ended, with this message."""


class Never:
    """An event that the device does not pass."""

    def query(self) -> bool:
        return False


def end_job(message: str) -> None:
    raise Ended(message)


class Device:
    """A device that has `ahead` behind all that it was given."""

    def __init__(self, ahead: Any) -> None:
        self.event = lambda: ahead

    def stream(self, kind: Stream) -> None:
        """One that nothing is put on."""


def session(ahead: Any) -> DeviceSession:
    """That of a rank whose program has no calls, and whose device has `ahead` behind all it has."""
    executable = object.__new__(DeviceExecutable)
    executable.program, executable.module = Program("it"), Module("it", Phase.SCHEDULED, 1)
    executable.work = SimpleNamespace(name="step 'it' (plan 01)")  # type: ignore[assignment]
    executable.segments = ()
    control = SimpleNamespace(flight_record=lambda: "  rank 0 is somewhere")
    stream = SimpleNamespace(
        logs="the library's own log", faults=list, hold=lambda _: None, break_off=lambda: None
    )
    made = DeviceSession(
        SimpleNamespace(end_job=end_job, device=Device(ahead)),  # type: ignore[arg-type]
        SimpleNamespace(control=control),  # type: ignore[arg-type]
        [stream],  # type: ignore[list-item]
        executable,
        0.01,
    )
    made.close()
    return made


def test_what_is_ahead_of_a_failed_step_and_does_not_end() -> None:
    with pytest.raises(Ended) as ended:
        session(Never()).break_off()
    message = str(ended.value)
    assert (
        "an execution of step 'it' (plan 01) has failed, and the device has not ended what was "
        "ahead of it within 0.01 s\nHere is where the host of every rank is in step 'it' (plan 01)"
    ) in message
    assert "\n  rank 0 is somewhere\n" in message
    assert (
        "look at the output of the other ranks and at the library's own log for the same message"
    ) in message


@pytest.mark.parametrize("error", [None, RuntimeError("device-side assert")])
def test_what_is_over_or_has_failed_is_not_waited_for(error: Exception | None) -> None:
    asked: list[Exception | None] = []

    class Passed:
        def query(self) -> bool:
            asked.append(error)
            if error is not None:
                raise error
            return True

    session(Passed()).break_off()
    assert asked == [error]
