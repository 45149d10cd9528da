"""What a rank with a device says when it ends the job; the device and the job are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cg.backends.devices.programs.executable import DeviceExecutable
from cg.launch.runtime.device_runtime import DeviceRuntime


class Ended(Exception):
    """The job has ended, with this message."""


class Never:
    """An event that the device does not pass."""

    def query(self) -> bool:
        return False


def end_job(message: str) -> None:
    raise Ended(message)


def runtime(ahead: Any, **attributes: Any) -> DeviceRuntime:
    """One that has bound a program without calls, whose device has `ahead` behind all it has."""
    made = object.__new__(DeviceRuntime)
    executable = object.__new__(DeviceExecutable)
    executable.cold = {}
    executable.work = SimpleNamespace(name="step 'it' (plan 01)")  # type: ignore[assignment]
    given: dict[str, Any] = {
        "_ahead": ahead,
        "_executable": executable,
        "_watchdog": object(),
        "_timeout": 0.01,
        "_streams": [SimpleNamespace(logs="the library's own log")],
        "_world": SimpleNamespace(end_job=end_job),
        "_control": SimpleNamespace(flight_record=lambda: "  rank 0 is somewhere"),
        **attributes,
    }
    for name, value in given.items():
        setattr(made, name, value)
    return made


def test_what_is_ahead_of_a_failed_step_and_does_not_end() -> None:
    with pytest.raises(Ended) as ended:
        runtime(Never())._end_what_is_ahead()
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

    runtime(Passed())._end_what_is_ahead()
    assert asked == [error]
