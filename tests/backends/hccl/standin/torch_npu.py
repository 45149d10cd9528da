"""A stand-in for torch_npu: `torch.npu` over host memory, with the mock's streams and events.

Tensors "on the NPU" are the host's: what makes a tensor for the device gives one of the CPU. The
operations of torch run where they are called, as work on the current stream; all other streams are
threads of the mock. As in torch_npu, what is put on streams goes through a queue first, which is
drained when somebody asks for a raw stream, or waits.
"""

from __future__ import annotations

import ctypes
import os
import threading
import types
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from cg.backends.fake.op_recorder import RecordingMode, ReplayMemory

COUNT = int(os.environ.get("MOCK_NPUS", "8"))
"""How many devices the machine pretends to have."""

_library = ctypes.CDLL(os.environ["HCCL_SO_PATH"])
for _name in ("mockStreamCreate", "mockEventCreate"):
    getattr(_library, _name).restype = ctypes.c_void_p
for _name in ("mockEventRecord", "mockStreamWaitEvent"):
    getattr(_library, _name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
for _name in ("mockStreamSynchronize", "mockEventQuery", "mockEventSynchronize"):
    getattr(_library, _name).argtypes = [ctypes.c_void_p]

tasks: list[tuple[Any, tuple[Any, ...]]] = []
drained = 0


def _drain() -> None:
    global drained
    drained += 1
    while tasks:
        call, arguments = tasks.pop(0)
        _checked(call(*arguments))


def _checked(error: int) -> int:
    if error:
        raise RuntimeError(f"the device has failed: synchronize stream, error code is {error}")
    return error


def _capturing() -> NPUGraph | None:
    """The graph that this thread captures, if it does; other threads go on as ever."""
    return getattr(_thread, "graph", None)


def _not_while_capturing() -> None:
    if _capturing() is not None:
        raise RuntimeError("the host cannot wait for what is only captured")


class Stream:
    """A stream; the current one is the host itself, once what was put on it before is done."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self._raw = _library.mockStreamCreate()
        _streams.append(self)

    @property
    def npu_stream(self) -> int:
        """The raw stream; asking for it drains the queue."""
        graph = _capturing()
        if graph is not None:
            return graph.branch(self)._raw  # type: ignore[no-any-return]
        _drain()
        return self._raw  # type: ignore[no-any-return]

    def is_capturing(self) -> bool:
        return _capturing() is not None

    def wait_event(self, event: Event) -> None:
        graph = _capturing()
        if graph is not None:
            branch = graph.branch(self)
            graph.steps.append(lambda: branch.wait_event(event))
        elif self is _state["current"]:
            event.synchronize()
        else:
            tasks.append((_library.mockStreamWaitEvent, (self._raw, event.raw)))

    def synchronize(self) -> None:
        _not_while_capturing()
        _drain()
        _checked(_library.mockStreamSynchronize(self._raw))


class Event:
    """An event."""

    def __init__(self, **_: Any) -> None:
        self.raw = _library.mockEventCreate()

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or _state["current"]
        graph = _capturing()
        if graph is not None:
            branch = graph.branch(stream)
            graph.steps.append(lambda: self.record(branch))
        else:
            tasks.append((_library.mockEventRecord, (self.raw, stream._raw)))

    def query(self) -> bool:
        _not_while_capturing()
        _drain()
        found = _library.mockEventQuery(self.raw)
        if found < 0:
            raise RuntimeError("the device has failed: query event")
        return bool(found)

    def synchronize(self) -> None:
        _not_while_capturing()
        _drain()
        _checked(_library.mockEventSynchronize(self.raw))


class _Steps(list[Any]):
    """The work of a graph, in order; the operations that the mock keeps stand in between."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = _library.mockCaptured()

    def append(self, step: Any) -> None:
        self.catch_up()
        super().append(step)

    def catch_up(self) -> None:
        first, last = self.kept, _library.mockCaptured()
        self.kept = last
        if last > first:
            super().append(lambda: (_drain(), _library.mockReplay(first, last)))


class NPUGraph:
    """The work that was put on streams while it was captured; nothing of that has run."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if os.environ.get("MOCK_NPU_GRAPHS") == "0":
            raise RuntimeError("this device captures no graphs")
        _drain()
        self.steps = _Steps()
        self._branches: dict[Stream, Stream] = {}
        self._recording = RecordingMode(self.steps, _pool)
        _thread.graph = self
        _library.mockCaptureBegin()
        self._recording.__enter__()

    def branch(self, stream: Stream) -> Stream:
        """Where a graph does what was put on a stream: not behind what else is on that stream."""
        if stream is _state["current"]:
            return stream
        if stream not in self._branches:
            self._branches[stream] = Stream()
        return self._branches[stream]

    def capture_end(self) -> None:
        self._recording.__exit__(None, None, None)
        _library.mockCaptureEnd()
        self.steps.catch_up()
        _thread.graph = None

    def replay(self) -> None:
        for step in self.steps:
            step()


class _Generator:
    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)


def _current_stream(device: Any = None) -> Stream:
    return _state["current"]  # type: ignore[no-any-return]


def _set_stream(stream: Stream) -> None:
    stream.synchronize()
    _state["current"] = stream


def _synchronize(device: Any = None) -> None:
    for stream in tuple(_streams):
        stream.synchronize()


def _set_device(index: int) -> None:
    if not 0 <= index < COUNT:
        raise RuntimeError(f"there is no NPU {index}")


_thread = threading.local()
_pool = ReplayMemory()
_streams: list[Stream] = []
_state: dict[str, Any] = {}
_state["current"] = Stream()


def _make_module() -> types.ModuleType:
    module: Any = types.ModuleType("torch.npu")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = module.manual_seed = lambda seed: None
    module._lazy_init = lambda: None
    module.device_count = lambda: COUNT
    module.current_device = lambda: 0
    module.get_device_name = lambda device=None: "Ascend910B"
    module.set_device = _set_device
    module.Stream, module.Event, module.NPUGraph = Stream, Event, NPUGraph
    module.current_stream, module.set_stream = _current_stream, _set_stream
    module.synchronize = _synchronize
    module.empty_cache = lambda: None
    module.graph_pool_handle = lambda: (0, 0)
    module.default_generators = tuple(_Generator() for _ in range(COUNT))
    module.get_rng_state = lambda device=None: torch.default_generator.get_state()
    module.set_rng_state = lambda state, device=None: torch.default_generator.set_state(state)
    module.memory_allocated = module.max_memory_allocated = lambda device=None: 0
    module.reset_peak_memory_stats = lambda device=None: None
    return module  # type: ignore[no-any-return]


def _on_host(make: Any) -> Any:
    def run(*arguments: Any, device: Any = None, pin_memory: Any = None, **options: Any) -> Any:
        return make(*arguments, device="cpu", **options)

    return run


_registrations = torch.library.Library("aten", "IMPL", "PrivateUse1")


def _install() -> None:
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", _make_module())
    aten = torch.ops.aten
    _registrations.impl("empty.memory_format", _on_host(aten.empty.memory_format))
    _registrations.impl("empty_strided", _on_host(aten.empty_strided.default))
    empty = torch.empty

    def without_pinning(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return empty(*arguments, **options)

    torch.empty = without_pinning
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment, method-assign]
    _fake_on_host()
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: COUNT
    accelerator.current_accelerator = lambda check_available=False: torch.device("npu")
    accelerator.current_stream = _current_stream
    accelerator.set_device_index = _set_device


def _fake_on_host() -> None:
    """Fake tensors are where the real ones are."""
    make: Any = FakeTensor.__new__

    def new(cls: Any, mode: Any, meta: Any, device: Any, *arguments: Any, **options: Any) -> Any:
        here = torch.device("cpu") if device.type == "npu" else device
        return make(cls, mode, meta, here, *arguments, **options)

    FakeTensor.__new__ = staticmethod(new)  # type: ignore[method-assign, assignment]


def _autoload() -> None:
    """The entry point that torch calls when it is imported; importing this module did it all."""


_install()
