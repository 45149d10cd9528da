"""An accelerator by way of torch's module for its kind, such as `torch.cuda`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch

from ...ir.attributes import Stream
from ...ir.pipeline.device_speed import DeviceSpeed
from ..device import DeviceGraph, DeviceQueue, Event, Fabric
from .cuda_driver import DriverNodes


class Accelerator:
    """A device whose module of torch has streams, events and graphs.

    It implements `Device`, which describes the methods.

    Args:
        kind, index: which device.
        fabric: what joins it to others of its kind; None if nothing does.
        handle: the attribute of torch's streams that holds the raw stream.
        graph: the name of the class of graphs in the module.
        current: returns the raw handle of a device's current stream, where torch tells it faster
            than the stream itself.
        end_pool: tells torch's allocator that a capture to a pool of a device has ended; raises
            RuntimeError if the allocator knows that already. None where torch has no such call.
        capture_nodes: reads and sets the nodes that captured work depends on; None where the
            device has no such calls.
    """

    def __init__(
        self,
        kind: str,
        index: int,
        fabric: Fabric | None,
        handle: str,
        graph: str,
        current: Callable[[int], int] | None = None,
        end_pool: Callable[[int, Any], None] | None = None,
        capture_nodes: DriverNodes | None = None,
    ) -> None:
        self.kind = kind
        self.index = index
        self.torch_device = torch.device(kind, index)
        self.fabric = fabric
        self._module: Any = torch.get_device_module(kind)
        self.speed = DeviceSpeed.named(self._module.get_device_name(index))
        self._handle = handle
        self._graph_class: Callable[[], Any] = getattr(self._module, graph)
        self._current_handle = current
        self._current: Any = None
        self._streams: dict[Stream, Any] = {}
        self._callers: list[Any] = []
        self._pools: dict[int, Any] = {}
        self._end_pool = end_pool
        self._capture_nodes = capture_nodes
        self._broken: list[Any] = []
        self._graphs: dict[int, WeakSet[Any]] = {}
        self._begin = self._module.Event()
        self._end = self._module.Event()
        self._module.set_device(index)
        self._compute: Any = self.stream(Stream.COMPUTE)

    def stream(self, kind: Stream) -> DeviceQueue:
        stream = self._streams.get(kind)
        if stream is None:
            # Work that others wait for has priority: a copy must not queue behind a product.
            priority = 0 if kind is Stream.COMPUTE else -1
            stream = self._streams[kind] = self._module.Stream(self.torch_device, priority=priority)
        return stream  # type: ignore[no-any-return]

    def has(self, kind: Stream) -> bool:
        return kind in self._streams

    def event(self) -> Event:
        return self._module.Event()  # type: ignore[no-any-return]

    def timer(self) -> Event:
        return self._module.Event(enable_timing=True)  # type: ignore[no-any-return]

    def elapsed(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))

    def raw(self, queue: DeviceQueue) -> int:
        return int(getattr(queue, self._handle))

    def session(self) -> AbstractContextManager[None]:
        return self

    def __enter__(self) -> None:
        if self._callers:
            self._callers.append(self._callers[-1])
            return
        module, compute = self._module, self._compute
        before = self._find_current()
        self._begin.record(before)
        compute.wait_event(self._begin)
        self._callers.append(before)
        module.set_stream(compute)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        before = self._callers.pop()
        if self._callers:
            return
        # After an error the device may have failed; its own error must not hide the first one.
        with nullcontext() if kind is None else suppress(RuntimeError):
            self._end.record(self._compute)
            self._module.set_stream(before)
            before.wait_event(self._end)

    @contextmanager
    def on(self, queue: DeviceQueue) -> Iterator[None]:
        before = self._find_current()
        self._module.set_stream(queue)
        try:
            yield
        finally:
            self._module.set_stream(before)

    def caller(self) -> DeviceQueue:
        if self._callers:
            return self._callers[-1]  # type: ignore[no-any-return]
        return self._find_current()  # type: ignore[no-any-return]

    def _find_current(self) -> Any:
        """Torch's current stream; the same object as before while the stream is the same."""
        handle, current = self._current_handle, self._current
        if handle is None:
            return self._module.current_stream(self.index)
        if current is None or getattr(current, self._handle) != handle(self.index):
            current = self._current = self._module.current_stream(self.index)
        return current

    def keep(self, tensors: Sequence[torch.Tensor], queue: DeviceQueue) -> None:
        for tensor in tensors:
            tensor.record_stream(queue)  # type: ignore[arg-type]

    def seed(self, seed: int) -> None:
        self._module.default_generators[self.index].manual_seed(seed)

    def random_state(self) -> torch.Tensor:
        return self._module.get_rng_state(self.torch_device)  # type: ignore[no-any-return]

    def set_random_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state, self.torch_device)

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def copy(self, source: torch.Tensor, target: torch.Tensor, queue: DeviceQueue) -> None:
        with self.on(queue):
            target.copy_(source, non_blocking=True)

    def capture(self, work: Callable[[], object], queue: DeviceQueue) -> DeviceGraph:
        """Record what `work` puts on a stream, and on those that join it, as a graph.

        Other threads may query events meanwhile, as the watchdog does: only this thread is
        restricted to what a capture allows.
        """
        module, raw = self._module, self.raw(queue)
        # The stream, not the device: messages on other streams need not have arrived yet.
        queue.synchronize()
        if self.begins_pool(queue):
            self._pools[raw] = module.graph_pool_handle()
        graph = self._graph_class()
        with self.on(queue):
            graph.capture_begin(pool=self._pools[raw], capture_error_mode="thread_local")
            try:
                work()
                with warnings.catch_warnings():
                    # A rehearsal leaves messages out, so its graph may be empty.
                    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                    graph.capture_end()
            except BaseException:
                self._end_failed(graph, raw)
                raise
        self._graphs.setdefault(raw, WeakSet()).add(graph)
        return graph  # type: ignore[no-any-return]

    def begins_pool(self, queue: DeviceQueue) -> bool:
        # A pool and its memory go with the last graph that uses the pool.
        raw = self.raw(queue)
        return not self._graphs.get(raw) or raw not in self._pools

    def _end_failed(self, graph: Any, raw: int) -> None:
        """End a capture that an error has interrupted, if it has not ended yet.

        The error may have broken the capture. Torch's allocator then believes that the capture goes
        on: it gives the pool to no other capture, holds back memory that several streams have used,
        and may ask the graph for its nodes. So the graph is kept alive.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            pool = self._pools.pop(raw)
            try:
                if self._end_pool is not None:
                    self._end_pool(self.index, pool)
            except RuntimeError:
                return  # it knows: the capture has ended, and only its graph could not be made
            self._broken.append(graph)

    def nodes(self, queue: DeviceQueue) -> tuple[int, ...] | None:
        capture_nodes = self._capture_nodes
        return None if capture_nodes is None else capture_nodes.of(self.raw(queue))

    def follow_alone(self, queue: DeviceQueue, event: Event, nodes: tuple[int, ...]) -> None:
        assert self._capture_nodes is not None
        self._capture_nodes.replace(self.raw(queue), nodes)

    def give_back(self) -> None:
        self.synchronize()
        self._module.empty_cache()

    def synchronize(self) -> None:
        self._module.synchronize()
