"""The protocols of an accelerator, as the run time uses it; a rank on the host has none.

Work is put on streams, which are queues: work on one stream runs in order, work on two may overlap.
An event is a mark in a queue that other queues, or the host, wait for. The run time sees a device
through these protocols alone, whatever its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..ir.attributes import Stream
from ..ir.pipeline.device_speed import DeviceSpeed
from ..ir.types import DType


@dataclass(frozen=True)
class Fabric:
    """The transport that joins devices of a kind.

    Attributes:
        name: the name of its communicator, as in `cg.via(x, name)`.
        reduces: the element types that its reductions take.
        rendezvous: whether it carries the messages of a rank one after the other, each when its
            other end has come, so that messages need one order on all ranks.
    """

    name: str
    reduces: frozenset[DType]
    rendezvous: bool = False


class Event(Protocol):
    """A mark in a queue; recording it again moves it. Before the first time it counts as passed."""

    def record(self, stream: Any, /) -> None:
        """Put the mark behind all work that is on the stream now."""

    def query(self) -> bool:
        """True if the queue has passed it."""

    def synchronize(self) -> None:
        """Block the host until the queue has passed it."""


class DeviceQueue(Protocol):
    """A stream of the device."""

    def wait_event(self, event: Any, /) -> None:
        """Let all later work on the stream wait for the event."""

    def synchronize(self) -> None:
        """Block the host until the stream is empty."""


class DeviceGraph(Protocol):
    """Work that the device has recorded, and replays on a stream as a whole."""

    def replay(self) -> None:
        """Put it on the current stream."""


class Device(Protocol):
    """One accelerator, as one rank uses it.

    Attributes:
        kind: torch's word for it, as in `torch.device(kind, index)`.
        index: its number among the devices of its kind.
        torch_device: the device as torch names it.
        fabric: the transport that joins it to others of its kind; None where there is none.
        speed: what is assumed of it, where nothing is measured.
    """

    kind: str
    index: int
    torch_device: torch.device
    fabric: Fabric | None
    speed: DeviceSpeed

    def stream(self, kind: Stream) -> DeviceQueue:
        """The stream of a kind; always the same one."""

    def has(self, kind: Stream) -> bool:
        """True if the stream of a kind has been asked for."""

    def event(self) -> Event:
        """A new event."""

    def timer(self) -> Event:
        """A new event that notes when its queue passes it; see `elapsed`."""

    def elapsed(self, start: Event, end: Event) -> float:
        """Milliseconds from one timer to another, both passed."""

    def raw(self, queue: DeviceQueue) -> int:
        """The stream as the device's own libraries take it."""

    def session(self) -> AbstractContextManager[None]:
        """A context in which the compute stream is torch's current one.

        Its work runs after the work on the caller's stream, and before the later work of that
        stream; the host is not blocked. Inside another session it changes nothing.
        """

    def on(self, queue: DeviceQueue) -> AbstractContextManager[None]:
        """A context inside a session, in which `queue` is torch's current stream."""

    def caller(self) -> DeviceQueue:
        """The caller's stream: torch's current one, or, inside a session, the one before it."""

    def keep(self, tensors: Sequence[torch.Tensor], queue: DeviceQueue) -> None:
        """Keep in mind that a stream will use tensors of another stream.

        Their memory is then not used again before that stream has passed the point at which they
        are dropped.
        """

    def seed(self, seed: int) -> None:
        """Seed torch's generator of this device."""

    def random_state(self) -> torch.Tensor:
        """The state of that generator."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set the state of that generator."""

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory of the shape and type of `like` that the device can copy to and from."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, queue: DeviceQueue) -> None:
        """Put a copy on a stream, between the device and a `host_buffer`; neither is kept alive."""

    def capture(self, work: Callable[[], None], queue: DeviceQueue) -> DeviceGraph:
        """Record what `work` puts on a stream, and on those that join it, as a graph.

        None of the work runs. The graph is to be replayed on that stream. All graphs of a stream
        share one pool of memory.
        """

    def begins_pool(self, queue: DeviceQueue) -> bool:
        """True if the next graph of a stream is the first of its pool, where no other writes.

        Graphs that are captured later do not write to memory of the pool that is in use by then.
        """

    def nodes(self, queue: DeviceQueue) -> tuple[Any, ...] | None:
        """The nodes that the next work on a stream waits for, in the graph that is being captured.

        None if the stream is not captured, or the device cannot tell.
        """

    def follow_alone(self, queue: DeviceQueue, event: Event, nodes: tuple[Any, ...]) -> None:
        """Let the next work on a stream that is captured wait for an event, and nothing else.

        Args:
            nodes: `nodes` of the stream on which the event was recorded, at that moment. The nodes
                that `queue` waits for now must come before them.
        """

    def give_back(self) -> None:
        """Give back unused memory, for graphs to take; blocks as `synchronize` does."""

    def synchronize(self) -> None:
        """Block the host until the device has nothing to do."""
