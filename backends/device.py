"""The protocols that the run time needs of an accelerator; a rank on the host has none.

Work is put on streams, which are queues: what is on one runs in order, what is on two may overlap.
An event is a mark in a queue that other queues, or the host, wait for. Whoever implements these
protocols says nowhere else what kind of device it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..ir.attributes import Stream
from ..ir.types import DType


@dataclass(frozen=True)
class Fabric:
    """The transport that joins devices of a kind.

    Attributes:
        name: of its communicator, as in `cg.via(x, name)`.
        reduces: the element types that its reductions take.
        rendezvous: whether it does the messages of a rank one after the other, each when its other
            end has come, so that they need one order on all ranks.
    """

    name: str
    reduces: frozenset[DType]
    rendezvous: bool = False


class Event(Protocol):
    """A mark in a queue; recording it again moves it. Until then, and before the first time, it
    counts as passed."""

    def record(self, stream: Any, /) -> None:
        """Put the mark behind all that is on the stream now."""

    def query(self) -> bool:
        """True if the queue has passed it."""

    def synchronize(self) -> None:
        """Block the host until it has."""


class Queue(Protocol):
    """A stream of the device."""

    def wait_event(self, event: Any, /) -> None:
        """Let all that is put on the stream from now on wait for the event."""

    def synchronize(self) -> None:
        """Block the host until the stream is empty."""


class Graph(Protocol):
    """Work that was captured, to be put on a stream as a whole."""

    def replay(self) -> None:
        """Put it on the current stream."""


class Device(Protocol):
    """One accelerator, as one rank uses it.

    Attributes:
        kind: torch's word for it, as in `torch.device(kind, index)`.
        index: which of its kind.
        torch_device: the device as torch names it.
        fabric: what joins it to others of its kind; None where nothing does.
    """

    kind: str
    index: int
    torch_device: torch.device
    fabric: Fabric | None

    def stream(self, kind: Stream) -> Queue:
        """The stream of a kind; always the same one."""

    def has(self, kind: Stream) -> bool:
        """True if the stream of a kind has been asked for."""

    def event(self) -> Event:
        """A new event."""

    def timer(self) -> Event:
        """A new event that notes when its queue passes it; see `elapsed`."""

    def elapsed(self, start: Event, end: Event) -> float:
        """Milliseconds from one such event to another, both passed."""

    def raw(self, queue: Queue) -> int:
        """The stream as the device's own libraries take it."""

    def session(self) -> AbstractContextManager[None]:
        """Inside, the compute stream is torch's current one.

        It begins behind what is on the caller's stream, and the caller's stream goes on behind it,
        without blocking the host. Inside of another session it changes nothing.
        """

    def on(self, queue: Queue) -> AbstractContextManager[None]:
        """Inside a session: the stream is torch's current one in place of the compute stream."""

    def caller(self) -> Queue:
        """The stream of whoever calls: torch's current one; inside a session, that from before."""

    def keep(self, tensors: Sequence[torch.Tensor], queue: Queue) -> None:
        """A stream will use these tensors of another one.

        Their memory is then not used again before that stream has come to where they are dropped.
        """

    def seed(self, seed: int) -> None:
        """Seed torch's generator of this device."""

    def random_state(self) -> torch.Tensor:
        """The state of that generator."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Put the generator back."""

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory of the shape and type of `like` that the device can copy to by itself."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, queue: Queue) -> None:
        """Put a copy on a stream, between the device and a `host_buffer`; neither is kept alive."""

    def capture(self, work: Callable[[], None], queue: Queue) -> Graph:
        """Record what `work` puts on a stream, and on those that join it, as a graph.

        Nothing of it runs. The graph is to be replayed on that stream. All graphs of a stream that
        there are share one pool of memory.
        """

    def begins_pool(self, queue: Queue) -> bool:
        """True if the next graph of a stream is the first of its pool, to which no other writes.

        Graphs captured later leave alone what somebody holds of the pool by then.
        """

    def nodes(self, queue: Queue) -> tuple[Any, ...] | None:
        """What the next work on a stream stands behind in the graph that is being captured.

        None if the stream is not captured, and where the device cannot tell.
        """

    def follow_alone(self, queue: Queue, event: Event, nodes: tuple[Any, ...]) -> None:
        """Let the next work on a stream that is captured stand behind an event, and nothing else.

        Args:
            nodes: `nodes` of the stream on which the event was recorded, at that moment. What the
                stream has stood behind must come before them.
        """

    def give_back(self) -> None:
        """Give memory that nobody uses back, for graphs to take; blocks as `synchronize` does."""

    def synchronize(self) -> None:
        """Block the host until the device has nothing to do."""
