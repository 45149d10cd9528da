"""The fake device: a `Device` of the host's memory and threads, as strict as the worst real one.

The compute stream is the calling thread, and all others are threads of their own (`queues`).
Torch's operators on the device compute in the host's memory (`kernels`), so values are right. Where
the stream of tails is the current one, values are NaN until its thread has computed them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...ir.attributes import Stream
from ...ir.pipeline.device_speed import DeviceSpeed
from ...ir.types import DType
from ..device import Device, Fabric
from . import torch_backend
from .host_memory import DEVICE_INDEX, KIND, on_host
from .op_recorder import RecordingMode, ReplayMemory
from .queues import FakeEvent, FakeQueue, FakeTimer

FABRIC = Fabric("fake", frozenset(DType) - {DType.I16, DType.U16})


class FakeGraph:
    """The work that was recorded while the device was capturing.

    Attributes:
        replays: how often it was replayed.
    """

    def __init__(self, work: Sequence[Callable[[], None]], before: Callable[[], None]) -> None:
        self.work = tuple(work)
        self.replays = 0
        self._before = before

    def replay(self) -> None:
        """Put it on the current stream."""
        self._before()
        self.replays += 1
        for work in self.work:
            work()


class _OnQueue:
    """Takes torch's operators as work of a stream, and records it while the device is capturing."""

    def __init__(self, queue: FakeQueue) -> None:
        self.queue = queue

    def append(self, step: Callable[[], object], /) -> None:
        def work() -> None:
            with torch.no_grad():
                step()

        self.queue.put("torch", work)


class _Fresh(ReplayMemory):
    """Memory that is given out once."""

    def blank(self, like: torch.Tensor) -> torch.Tensor:
        host = torch.empty_like(like, device="cpu")
        return host.fill_(float("nan")) if host.is_floating_point() else host

    def by_address(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class FakeDevice:
    """A `Device` on the host; each process has one, and tests with ranks in threads several.

    A driver may let the host wait until the device has done all that it has to do, receives of
    messages included: when it loads a kernel, makes a graph or launches a large one, takes memory
    or pins it. Which call does depends on what came before. A strict device does so in all of them:
    ahead of each operation that torch puts on the device outside of graphs, each capture and each
    end of one, each replay, new streams, host buffers, and when a communicator is joined.

    Args:
        index: the device's number in messages.
        delay: seconds that side streams wait ahead of all that they do.
        strict: whether it waits as described.
        patience: seconds after which a wait of a stream raises TimeoutError; None for never.

    Attributes:
        sessions, synchronized, given_back: how often these were asked for.
        current: a stream to be torch's current one outside of sessions, for tests.
        events: all that were made by `event`.
        failure: the error of a device that has failed, in words; else None.
    """

    def __init__(
        self,
        index: int = 0,
        delay: float = 0.0,
        strict: bool = True,
        patience: float | None = None,
    ) -> None:
        torch_backend.register()
        self.kind = KIND
        self.index = index
        self.torch_device = torch.device(KIND, DEVICE_INDEX)
        self.fabric: Fabric | None = FABRIC
        self.speed = DeviceSpeed()
        self.delay = delay
        self.strict = strict
        self.patience = patience
        self.sessions = 0
        self.synchronized = 0
        self.given_back = 0
        self.recording: list[Callable[[], None]] | None = None
        self.recorded_of: list[Any] = []
        self.before: list[frozenset[int]] = []
        self.base: FakeQueue | None = None
        self.pools: dict[FakeQueue, ReplayMemory] = {}
        self.graphs: dict[FakeQueue, WeakSet[FakeGraph]] = {}
        self.queues: dict[Stream, FakeQueue] = {}
        self.events: list[FakeEvent] = []
        self.current: FakeQueue | None = None
        self.failure: str | None = None
        self._depth = 0
        self._raw: dict[int, FakeQueue] = {}

    def fail(self, text: str) -> None:
        """Fail: the device does no work after this, and every call raises an error."""
        self.failure = text

    def check(self) -> None:
        """Raise the error of a device that has failed."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def before_work(self) -> None:
        """Wait for all that the device has to do, as a driver may; see the class."""
        if self.strict and self.recording is None:
            for queue in tuple(self.queues.values()):
                queue.drain()

    def stream(self, kind: Stream) -> FakeQueue:
        """The stream of a kind; always the same one."""
        queue = self.queues.get(kind)
        if queue is None:
            self.before_work()
            queue = self.queues[kind] = FakeQueue(kind.value, kind is Stream.COMPUTE, self)
            queue.delay = self.delay * (5 if kind is Stream.TAIL else 1)
            self._raw[id(queue)] = queue
        return queue

    def has(self, kind: Stream) -> bool:
        """True if the stream of a kind has been asked for."""
        return kind in self.queues

    def by_raw(self, raw: int) -> FakeQueue:
        """The stream of a handle."""
        return self._raw[raw]

    def event(self) -> FakeEvent:
        """A new event."""
        event = FakeEvent(self.patience, self.check)
        self.events.append(event)
        return event

    def timer(self) -> FakeTimer:
        """A new event that notes when its queue passes it."""
        return FakeTimer(self.patience)

    def elapsed(self, start: FakeTimer, end: FakeTimer) -> float:
        """Milliseconds from one timer to another, both of which have passed."""
        return (end.at - start.at) * 1e3

    def give_back(self) -> None:
        """Wait as `synchronize` does; there is no memory to give back."""
        self.given_back += 1
        self.before_work()

    def raw(self, queue: FakeQueue) -> int:
        """The stream's handle for the library."""
        return id(queue)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Inside the `with` block, this thread computes on the compute stream of this device."""
        self.sessions += 1
        before, self._depth = self.current, self._depth + 1
        if before is not None and self._depth == 1:
            begin = self.event()
            begin.record(before)
            self.stream(Stream.COMPUTE).wait_event(begin)
        previous_device = torch_backend.use(self)
        try:
            yield
        finally:
            torch_backend.use(previous_device)
            self._depth -= 1
            if before is not None and self._depth == 0:
                end = self.event()
                end.record(self.stream(Stream.COMPUTE))
                before.wait_event(end)

    def on(self, queue: FakeQueue) -> contextlib.AbstractContextManager[Any]:
        """Inside the `with` block, torch computes on another stream."""
        if queue.inline or self.recording is not None:
            return contextlib.nullcontext()
        return RecordingMode(_OnQueue(queue), _Fresh())

    def caller(self) -> FakeQueue:
        """The stream of the caller."""
        return self.stream(Stream.COMPUTE) if self.current is None else self.current

    def keep(self, tensors: Sequence[torch.Tensor], queue: FakeQueue) -> None:
        """Do nothing: the work on a stream refers to its tensors."""

    def seed(self, seed: int) -> None:
        """Seed the generator, which is the host's."""
        torch.default_generator.manual_seed(seed)

    def random_state(self) -> torch.Tensor:
        """The state of the host's generator."""
        return torch.default_generator.get_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set the state of the host's generator."""
        torch.default_generator.set_state(state)

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory of the shape and type of `like`."""
        self.before_work()
        return torch.empty_like(like, device="cpu")

    def copy(self, source: torch.Tensor, target: torch.Tensor, queue: FakeQueue) -> None:
        """Put a copy on a stream."""
        host_source, host_target = on_host(source), on_host(target)

        def work() -> None:
            with torch.no_grad():
                host_target.copy_(host_source)

        queue.put("copy", work)

    def capture(self, work: Callable[[], None], queue: FakeQueue) -> FakeGraph:
        """Record what `work` puts on a stream, and on those that join it, as a graph."""
        self.before_work()
        queue.synchronize()  # to give out memory of the pool fills it with NaN
        if self.begins_pool(queue):
            self.pools[queue] = ReplayMemory()
        self.recording, self.recorded_of, self.before, self.base = [], [], [], queue
        for stream in self.queues.values():
            stream.nodes = () if stream is queue else None
        try:
            with _disable_current_modes(), RecordingMode(_OnQueue(queue), self.pools[queue]):
                work()
            graph = FakeGraph(self.recording, self.before_work)
        finally:
            self.recording = self.base = None
        self.before_work()
        for comm in self.recorded_of:
            comm.graphs.add(graph)
        self.graphs.setdefault(queue, WeakSet()).add(graph)
        return graph

    def begins_pool(self, queue: FakeQueue) -> bool:
        """True if the next graph of a stream is the first of its pool."""
        return not self.graphs.get(queue)

    def note(self, queue: FakeQueue) -> None:
        """Make a node of the graph that is being captured, behind those of a stream."""
        nodes = queue.nodes or ()
        self.before.append(frozenset(nodes).union(*(self.before[node] for node in nodes)))
        queue.nodes = (len(self.before) - 1,)

    def nodes(self, queue: FakeQueue) -> tuple[int, ...] | None:
        """The nodes that the next work on a stream depends on in the capture in progress."""
        return None if self.recording is None else queue.nodes

    def follow_alone(self, queue: FakeQueue, event: FakeEvent, nodes: tuple[int, ...]) -> None:
        """Let the next captured work on a stream depend on an event alone."""
        implied = frozenset(nodes).union(*(self.before[node] for node in nodes))
        assert implied.issuperset(queue.nodes or ()), "an edge of the graph is lost"
        queue.wait_event(event)
        queue.nodes = nodes

    def synchronize(self) -> None:
        """Block the host until the device has nothing to do."""
        self.synchronized += 1
        for queue in tuple(self.queues.values()):
            queue.synchronize()


def make(index: int) -> Device:
    """The fake device of this process, which is told of all work that torch puts there."""
    device: Any = FakeDevice(index)
    torch_backend.use_for_process(device)
    return device  # type: ignore[no-any-return]
