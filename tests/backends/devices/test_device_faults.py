"""A device that has failed: what is said of the methods that may have done it, and of the cause."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 (its usual name)

import cg
from cg.backends.devices.programs.capture import WARM_UPS
from cg.backends.devices.programs.executable import DeviceExecutable
from cg.backends.devices.programs.watchdog import Watchdog, fault_of
from cg.backends.errors import Failure, RemoteError
from cg.backends.failures.device_faults import DeviceFault, fault_in, index_uses
from cg.backends.program.linked import LinkedProgram
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.single_rank_world import SingleRankWorld
from cg.launch.world.world import use_world

from .patience import ASSERTED, loose_device
from .ranks import pause

WORDS, WIDTH, CLASSES = 11, 4, 7
IDS = torch.arange(6) % CLASSES


@cg.actor
class Model(torch.nn.Module):
    """Rows of a table, and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(WORDS, WIDTH)
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def look(self, x: torch.Tensor) -> torch.Tensor:
        for device in FAILING:
            device.fail(ASSERTED)
            device.check()
        return x.clone()

    def loss(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(x)
        return F.cross_entropy(logits, ids)


FAILING: list[Any] = []
"""The devices that fail while `look` runs, and that it learns that of."""


def line_of(method: Callable[..., Any], part: str) -> str:
    """The place of a line of a method, as errors name it."""
    lines, first = inspect.getsourcelines(method)
    number = next(i for i, line in enumerate(lines, first) if part in line)
    return f"{__file__}:{number}"


class Bound:
    """A step on a fake device that a watchdog looks at when it is told to."""

    def __init__(self) -> None:
        self.device: Any = loose_device()
        self.ended: list[str] = []
        with use_world(SingleRankWorld(self.device)):
            model = Model.on(0)()

            @cg.trace
            def step(ids: torch.Tensor) -> Any:
                x = model.scale(model.embed(ids) + model.embed(ids))
                seen = model.look(x)
                loss = model.loss(x, ids)
                cg.backward(loss)
                return loss, seen

            lowered = step.lower(IDS)
            self.bodies: dict[str, Any] = dict(lowered.trace.bodies)
            module = lowered.compile().module
        linked = LinkedProgram(module, 0, self.bodies, lowered.trace.constants)
        self.executable = DeviceExecutable(linked, self.device)
        self.dog = Watchdog(self.device, None, list, pytest.fail, end=self.ended.append)

    def run(self) -> None:
        self.executable.run([IDS], pause)

    def put(self) -> None:
        """Put an execution on the device, which is not seen to pass it."""
        self.run()
        self.dog.watch(self.executable.work, self.executable.execution)

    def fault(self) -> str:
        """What the watchdog says of the device's failure."""
        with pytest.raises(DeviceFault) as fault:
            self.dog.look()
        return str(fault.value)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bound]:
    monkeypatch.setattr("cg.backends.devices.programs.watchdog.INTERVAL", 1000.0)
    FAILING.clear()
    bound = Bound()
    yield bound
    bound.dog.close()


EMBED = partial(line_of, Model.embed, "self.table")
LOSS = partial(line_of, Model.loss, "cross_entropy")


def test_methods_that_use_indices_are_named_with_their_lines(bound: Bound) -> None:
    bound.put()
    bound.device.fail(ASSERTED)
    fault = bound.fault()
    head, cause, *_ = fault.split("\n")
    assert head.startswith("the device has failed in execution 0 of step 'step' (plan ")
    assert head.endswith(
        "or behind it, and cannot be used any more: CUDA error: device-side assert triggered"
    )
    assert "an index is out of range" in cause
    assert "a target of cross entropy beyond the number of classes" in cause
    method = line_of(Model.embed, "def embed")
    called = rf"^  model\d+\.embed \({re.escape(method)}\), called at {re.escape(__file__)}:\d+"
    assert len(re.findall(called, fault, re.MULTILINE)) == 1
    assert f"    an embedding at {EMBED()}, in embed: it takes 0 to {WORDS - 1}\n" in fault
    targets = f"targets of cross entropy at {LOSS()}, in loss: it takes 0 to {CLASSES - 1}\n"
    assert f"    {targets}" in fault
    assert fault.index(EMBED()) < fault.index(LOSS())
    assert ".scale" not in fault
    assert re.search(r"opaque methods, whose ops are not known: model\d+\.look", fault)
    assert "with CG_DEVICE=cpu" in fault
    assert "Search for" not in fault
    assert len(fault.splitlines()) < 12


def test_the_oldest_execution_that_has_not_passed_is_named(bound: Bound) -> None:
    bound.put()
    assert bound.dog.look() is None
    bound.put()
    bound.put()
    bound.device.fail(ASSERTED)
    assert "failed in execution 1 of step 'step'" in bound.fault()


def test_a_device_that_fails_with_nothing_watched_on_it_is_found(bound: Bound) -> None:
    bound.put()
    assert bound.dog.look() is None
    bound.device.fail("CUDA error: unspecified launch failure")
    expected = "the device has failed, and cannot be used any more: CUDA error: unspecified launch"
    assert bound.fault().startswith(expected)


def test_what_the_host_comes_upon_while_it_puts_an_execution_there(bound: Bound) -> None:
    """The method that learns of it is not said to be the cause; what it has not begun is not."""
    FAILING.append(bound.device)
    with pytest.raises(RemoteError) as error:
        bound.run()
    assert error.value.method == "look"
    assert fault_in(error.value) is not None
    bound.dog.end_if_failed(error.value, bound.executable.work)
    (told,) = bound.ended
    assert told.startswith("the device has failed in execution 0 of step 'step' (plan ")
    assert "or behind it" not in told
    assert EMBED() in told
    assert LOSS() not in told


def test_all_of_a_captured_step_may_have_done_it(bound: Bound) -> None:
    for _ in range(WARM_UPS + 1):
        bound.put()
    bound.device.fail(ASSERTED)
    fault = bound.fault()
    assert EMBED() in fault
    assert LOSS() in fault


def test_an_error_that_comes_up_in_the_callers_program(bound: Bound) -> None:
    error = RuntimeError(ASSERTED)
    assert fault_of(error) is None, "nothing of cg is on the device"
    bound.put()
    fault = fault_of(error)
    assert fault is not None
    assert EMBED() in str(fault)
    outer = ValueError("no batch")
    outer.__context__ = error
    assert fault_of(outer) is not None
    invalid = ASSERTED.replace("device-side assert triggered", "invalid argument")
    assert fault_of(RuntimeError(invalid)) is None, "torch's advice is no failure"
    assert fault_of(ValueError("device-side assert triggered")) is None


def test_an_error_of_another_ranks_device_is_none_of_this_one(bound: Bound) -> None:
    bound.put()
    failure = Failure("RuntimeError", ASSERTED, rank=1, op="call")
    assert fault_of(RemoteError(failure)) is None


def test_a_fused_method_has_its_lines_too(bound: Bound) -> None:
    def eager(module: Any, examples: Any) -> Any:
        return lambda inputs: module(*inputs)

    loss, *_ = (body for name, body in bound.bodies.items() if ".loss" in name and index_uses(body))
    fused = loss.refit(eager)
    assert [str(use) for use in index_uses(fused)] == [str(use) for use in index_uses(loss)]
    assert [use.words for use in index_uses(fused)] == ["targets of cross entropy"]


@cg.actor
class Indexing:
    """Uses indices by each function that torch has for it."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        rows = x[at]
        columns = x.index_select(1, at)
        both = x[at, at]
        near = x.gather(1, at[:, None])
        put = x.clone()
        put[at] = 1.0
        added = x.index_add(0, at, rows).scatter(1, at[:, None], 0.0)
        return rows.sum() + columns.sum() + both.sum() + near.sum() + put.sum() + added.sum()


def test_sizes_of_what_is_indexed() -> None:
    with use_world(VirtualWorld(1)):
        actor = Indexing.on(0)()
        step = cg.trace(lambda x, at: actor.forward(x, at))
        lowered = step.lower(torch.ones(3, 5), torch.zeros(3, dtype=torch.int64))
        (body,) = lowered.trace.bodies.values()
    told = [f"{use.words} {use.sizes}" for use in index_uses(body)]
    assert told == [
        "indexing (3,)",
        "index_select (5,)",
        "indexing (3, 5)",
        "gather (5,)",
        "assignment to indices (3,)",
        "index_add (3,)",
        "scatter (5,)",
    ]
    assert "indexing at " in str(index_uses(body)[2])
    assert str(index_uses(body)[2]).endswith(": it takes 0 to 2 and 0 to 4")
