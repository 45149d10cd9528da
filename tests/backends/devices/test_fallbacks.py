"""A part of a program that cannot be captured runs as it is, and says so once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cg.backends.devices.programs.capture import STATES, WARM_UPS, CapturedSegment
from cg.backends.devices.programs.executable import DeviceExecutable
from cg.backends.errors import RemoteError
from cg.backends.failures.fallbacks import Fallbacks, Refusal
from cg.backends.program.linked import LinkedProgram
from cg.backends.streams.library import CommunicationError
from cg.ir.text.parser import parse_module
from cg.launch.api.dumps import Dump
from cg.passes.lower.capture import Capture
from cg.passes.manager.manager import PassManager
from tests.backends.devices.patience import loose_device

from ..conformance import check
from ..conformance_cases import pipeline
from .ranks import ThreadWorld, bound, on_ranks, pause

X = torch.ones(4)

PROGRAM = """
module @s phase=scheduled world=1 {
  function @a.f(TYPE) -> (f32[4]) {actor = a, effect = read}
  program @0(%x: TYPE) {
    %h = call(%x) {fn = @a.f, graph = 0} : f32[4]
    %g = call(%x) {fn = @a.f, graph = 0} : f32[4]
    return(%h, %g)
  }
}
"""


class Body:
    """A function of an actor, as it is traced."""

    def __init__(self, rebinds: bool = False, trains: bool = False) -> None:
        self.rebinds = rebinds
        self.parameters = [torch.nn.Parameter(X.clone())] if trains else []
        self.new_gradients: dict[int, torch.Tensor] = {}
        self.broken = False
        self.locate = lambda traceback: None

    def graph_and_lines(self) -> tuple[None, dict[Any, Any]]:
        return None, {}

    def __call__(self, x: Any) -> Sequence[torch.Tensor]:
        return self.run(x)

    def run(self, x: Any) -> Sequence[torch.Tensor]:
        if self.broken:
            raise ValueError("the method itself")
        return ((x if isinstance(x, torch.Tensor) else X) * 2,)

    def state(self) -> Sequence[torch.Tensor]:
        return self.parameters

    def trained(self) -> Sequence[torch.Tensor]:
        return self.parameters


class Told:
    """The lines about the program of one rank."""

    def __init__(self, body: Body, type_: str = "f32[4]") -> None:
        self.module = parse_module(PROGRAM.replace("TYPE", type_))
        self.lines: list[str] = []
        self.fallbacks = Fallbacks(self.module, 0, self.lines.append)
        self.device = loose_device()
        self.warned: list[str] = []
        linked = LinkedProgram(self.module, 0, {"a.f": body}, fallbacks=self.fallbacks)
        self.executable = self._listen(lambda: DeviceExecutable(linked, self.device))

    @property
    def segment(self) -> CapturedSegment:
        (segment,) = self.executable.segments
        return segment

    def run(self, *inputs: Any, times: int = 1) -> None:
        for _ in range(times):
            found = self._listen(lambda: self.executable.run(inputs or (X,), pause))
            assert [each.tolist() for each in found] == [[2.0] * 4] * 2

    def check(self, reason: str, remedy: str) -> None:
        """It has been told once, everywhere."""
        assert self.segment.replays == 0 or self.segment.reason is not None
        (said,) = self.fallbacks.reasons.values()
        assert reason in said
        assert self.segment.reason == said
        assert self.lines == [f"rank 0: graph 0 is put on op by op: {said}\n"]
        (warned,) = self.warned
        assert warned.startswith("rank 0 puts graph 0 of 's' (ops 0 to 1 of 3) on its device op")
        assert said in warned
        assert remedy in warned

    def _listen(self, do: Callable[[], Any]) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = do()
        assert all(each.category is RuntimeWarning for each in caught)
        self.warned += [str(each.message) for each in caught]
        return found


def refuse(error: Exception, work: Callable[[], None], _queue: object) -> Any:
    raise error


def test_what_is_captured_says_nothing() -> None:
    told = Told(Body())
    told.run(times=WARM_UPS + 2)
    assert (told.segment.replays, told.warned, told.lines) == (2, [], [])
    assert told.fallbacks.reasons == {}


@pytest.mark.parametrize("kind", [RuntimeError, CommunicationError])
def test_a_capture_that_fails(kind: type[Exception]) -> None:
    told = Told(Body())
    told.device.capture = partial(refuse, kind("operation\n  not permitted"))  # type: ignore[method-assign]
    told.run(times=WARM_UPS)
    assert told.fallbacks.reasons == {}
    told.run(times=3)
    told.check("it cannot be captured: operation not permitted", "can be @cg.opaque")


def test_buffers_that_are_replaced() -> None:
    told = Told(Body(rebinds=True))
    told.check("it replaces buffers of an actor by new tensors", "copy_()")
    told.run(times=WARM_UPS + 1)
    told.check("it replaces buffers of an actor by new tensors", "copy_()")


def test_gradients_that_are_others_each_time() -> None:
    body = Body(trains=True)
    told = Told(body)
    kept = []
    for _ in range(WARM_UPS + STATES + 2):
        kept.append(body.parameters[0].grad)  # so that none takes the place of another
        body.parameters[0].grad = torch.zeros(4)
        told.run()
    told.check("its parameters or gradients are other tensors each time", "set .grad to None")


def test_a_value_that_is_no_tensor() -> None:
    told = Told(Body(), "object")
    told.run("text", times=WARM_UPS + 2)
    told.check("it reads a value of type str, which is no tensor", "Let the value be a tensor")


def test_what_fails_as_it_is_too_is_captured_once_it_works() -> None:
    body = Body()
    told = Told(body)
    told.run(times=WARM_UPS)
    body.broken = True
    capture, error = told.device.capture, CommunicationError("the line is down")
    told.device.capture = partial(refuse, error)  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="the method itself"):
        told.run()
    told.executable.reset()
    body.broken, told.device.capture = False, capture  # type: ignore[method-assign]
    told.run(times=WARM_UPS + 1)
    assert (told.segment.replays, told.segment.reason, told.warned) == (1, None, [])


def test_a_message_that_cannot_be_captured() -> None:
    """The capture ends, what was captured before is kept until graphs are dropped, values come."""
    case = pipeline("p", 2, 2)
    expected = case.expected()

    def play(world: ThreadWorld) -> tuple[str | None, int, int]:
        module = case.module()
        for id_, channel in module.channels.items():
            module.channels[id_] = replace(channel, via="fake")
        PassManager((Capture("fake+fake"),)).run(module)
        executable = bound(world, module)
        library, device = world.library, world.device
        put, comms = library.put, list[Any]()

        def fail_at_second(*arguments: Any) -> None:
            if device.recording is not None and device.recorded_of:
                comms.extend(device.recorded_of)
                raise CommunicationError("no more is captured")
            put(*arguments)

        library.put = fail_at_second
        for i in range(WARM_UPS + 2):
            at = i % len(expected)
            outputs = executable.run(case.inputs(at)[world.rank], pause)
            check(outputs, expected[at][world.rank], f"execution {i}, rank {world.rank}")
            world.barrier()
        (segment,) = executable.segments
        held = sum(len(comm.graphs) for comm in set(comms))
        executable.drop_graphs()
        return segment.reason, held, sum(len(comm.graphs) for comm in set(comms))

    with pytest.warns(RuntimeWarning, match="no more is captured"):
        found = on_ranks(2, play)
    says = "it cannot be captured: the edge from rank 0 to rank 1: no more is captured"
    assert found == [(says, 1, 0)] * 2


def test_executions_in_flight_tell_once() -> None:
    told = Told(Body())
    one, another = (Refusal(reason, "Do something.") for reason in ("one", "another"))
    with pytest.warns(RuntimeWarning, match=r"does not replay it: one\. .* Do something\."):
        told.fallbacks.warn(0, one)
    told.fallbacks.warn(0, another)
    assert len(told.lines) == 1
    assert told.fallbacks.reasons == {0: "one"}


def test_no_step_ends_for_a_file(tmp_path: Any) -> None:
    (tmp_path / "file").touch()
    dump = Dump(tmp_path / "file", "step")
    fallbacks = Fallbacks(Told(Body()).module, 0, partial(dump.append, "graphs.txt"))
    fallbacks.note(0, "too small")
    assert fallbacks.reasons == {0: "too small"}
