"""An accelerator whose capture fails, over a stub in the place of torch's module."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch

from cg.backends.devices.accelerator import Accelerator
from cg.ir.attributes import Stream


class Stub:
    """A module of torch for a kind of device, and its graph; `end` says how captures end."""

    Event = Stream = lambda *_, **__: Stub()
    raw = 7

    def __init__(self) -> None:
        self.end: list[Exception | None] = []
        self.ended = 0
        self.pools: list[Any] = []
        self.graphs = WeakSet[Graph]()
        self.handles = 0

    def CUDAGraph(self) -> Any:  # noqa: N802
        graph = Graph(self)
        self.graphs.add(graph)
        return graph

    def graph_pool_handle(self) -> Any:
        self.handles += 1
        return (0, self.handles)

    def get_device_name(self, index: int) -> str:
        return "a device"

    def set_device(self, index: int) -> None: ...

    def set_stream(self, stream: Any) -> None: ...

    def current_stream(self, index: int) -> Any: ...

    def synchronize(self) -> None: ...


class Graph:
    def __init__(self, module: Stub) -> None:
        self.module = module

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.module.pools.append(pool)

    def capture_end(self) -> None:
        self.module.ended += 1
        error = self.module.end.pop(0) if self.module.end else None
        if error is not None:
            raise error


class Ended:
    """Tells the allocator, which may know."""

    def __init__(self, knows: bool = False) -> None:
        self.pools: list[Any] = []
        self.knows = knows

    def __call__(self, index: int, pool: Any) -> None:
        if self.knows:
            raise RuntimeError("not recording to this pool")
        self.pools.append(pool)


def device_of(
    monkeypatch: pytest.MonkeyPatch, end_pool: Callable[[int, Any], None]
) -> tuple[Accelerator, Stub]:
    module = Stub()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    return Accelerator("cuda", 0, None, "raw", "CUDAGraph", end_pool=end_pool), module


def boom() -> None:
    raise ValueError("a call in the capture")


def nothing() -> None: ...


def test_a_capture_that_can_be_ended_leaves_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Ended()
    device, module = device_of(monkeypatch, told)
    queue = device.stream(Stream.COMPUTE)
    kept = device.capture(nothing, queue)
    with pytest.raises(ValueError, match="a call in the capture"):
        device.capture(boom, queue)
    another = device.capture(nothing, queue)
    assert (module.ended, module.pools, told.pools) == (3, [(0, 1)] * 3, [])
    assert not device.begins_pool(queue)
    del kept, another
    gc.collect()
    assert device.begins_pool(queue)


@pytest.mark.parametrize("work", [boom, nothing])
def test_a_broken_capture_gives_up_the_pool(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]
) -> None:
    told = Ended()
    device, module = device_of(monkeypatch, told)
    queue = device.stream(Stream.COMPUTE)
    kept = device.capture(nothing, queue)
    module.end = [RuntimeError("the capture is broken")] * 2
    with pytest.raises((ValueError, RuntimeError)):
        device.capture(work, queue)
    module.end = []
    assert device.begins_pool(queue)
    another = device.capture(nothing, queue)
    assert told.pools == [(0, 1)]
    assert module.pools == [(0, 1), (0, 1), (0, 2)]
    del kept, another
    gc.collect()
    assert len(module.graphs) == 1


def test_a_graph_that_cannot_be_made_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    device, module = device_of(monkeypatch, Ended(knows=True))
    queue = device.stream(Stream.COMPUTE)
    module.end = [RuntimeError("out of memory"), RuntimeError("no capture")]
    with pytest.raises(RuntimeError, match="out of memory"):
        device.capture(nothing, queue)
    gc.collect()
    assert len(module.graphs) == 0


class Broken(Stub):
    """A module, a stream and an event of a device that fails in a session."""

    Event = Stream = lambda *_, **__: Broken()
    fails = False

    def current_stream(self, index: int) -> Any:
        return self

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any) -> None:
        if Broken.fails:
            raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize("raised", [True, False])
def test_a_session_that_ends_by_an_error_does_not_hide_it(
    raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: Broken())
    monkeypatch.setattr(Broken, "fails", False)
    device = Accelerator("cuda", 0, None, "raw", "CUDAGraph")

    def run() -> None:
        with device.session():
            Broken.fails = True
            if raised:
                raise ValueError("of a method")

    with pytest.raises(ValueError if raised else RuntimeError) as error:
        run()
    assert error.value.__context__ is None
