"""Protocols of the run time: the world, communicators and their ports.

The binder (`program/binder.py`) asks for a `Port` for every communication op of a rank's program,
once, and the engine (`program/engine.py`) then only calls it. A transport is a `Communicator`:
something that makes ports. It never sees the IR's programs, so a third party can add one by
implementing this file's protocols and registering it by name (`transports/registry.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, fx

from ..ir.location import Location
from ..ir.ops import Collective, Recv, Send
from ..ir.ops.module import Channel
from ..ir.types import ValueType
from .device import Device
from .poison import Poison

T = TypeVar("T")


class Port(Protocol):
    """One communication op of one rank, bound to its buffers, used once per execution.

    The calls come in this order: `start` or `fail`, `poll` until it is true, `take`, `release`.
    None of them blocks. `take` and `release` are left out where the op makes no value (`send`,
    `barrier`). An execution that fails leaves its ports where they are; the communicator's
    `reset` makes them ready for `start` again.

    Where the op has a `slot`, what `take` returns may live in that slot until `release`. Where it
    has none, the value is the receiver's own and outlives `release`. A port may do more than that:
    see `ReleasingPort`, `PeekingPort` and `CopyingPort`.
    """

    def start(self, value: Any) -> None:
        """Issue the op with the operand's value (None where it has no operand).

        The operand of a `recv`, if it has one, is the tensor to receive into, and `take` returns
        it. Until `poll` has returned true, `value` must not be changed.
        """

    def fail(self, poison: Poison) -> None:
        """Issue the op with an error in place of its operand.

        The error takes the place of the expected message: on the receiver, or on every rank of a
        collective's group, `take` raises the poison.
        """

    def poll(self) -> bool:
        """Return whether the op is complete; makes progress on it if that is needed."""

    def take(self) -> Any:
        """The value that the op made (None for a unit).

        Raises:
            Poison: another rank has failed to make it.
            TransportError: it cannot be read.
        """

    def release(self) -> None:
        """Let the port's buffer be overwritten by a later execution or message."""


@runtime_checkable
class ReleasingPort(Protocol):
    """A port that says whether `release` has to be called; for any other port it has to."""

    @property
    def needs_release(self) -> bool:
        """True if the port holds a buffer until `release`, which therefore has to be called."""


@runtime_checkable
class PeekingPort(Protocol):
    """The port of a `recv` that sees an error before its program comes to it."""

    def peek_error(self) -> Poison | None:
        """The poison that has come in place of the message, without taking it, if one has."""


@runtime_checkable
class CopyingPort(Protocol):
    """The port of a `send` whose operand may change before `poll` has returned true."""

    def copy_on_start(self) -> None:
        """Let `start` copy what it does not send at once; called when the program is bound."""


class Communicator(Protocol):
    """A transport: makes the ports of a rank's communication ops.

    All ranks make the same channels in the same order, so the constructor of a communicator may
    communicate; making a port may not.
    """

    def send_port(self, op: Send, channel: Channel, type_: ValueType) -> Port:
        """The port of a `send` whose operand has type `type_`."""

    def recv_port(self, op: Recv, channel: Channel, type_: ValueType) -> Port:
        """The port of a `recv` whose future holds a value of type `type_`."""

    def collective_port(
        self,
        op: Collective,
        channel: Channel,
        operand: ValueType | None,
        result: ValueType,
    ) -> Port:
        """The port of a collective; `operand` is None where this rank contributes nothing."""

    def progress(self) -> None:
        """Move on whatever is pending (called while the rank waits; cheap)."""

    def reset(self) -> None:
        """Forget every message in flight, after a failed execution.

        Every rank calls it between two barriers of the world.
        """

    def close(self) -> None:
        """Give back buffers and handles; idempotent."""


class Pause(Protocol):
    """The pause of a rank between two fruitless polls of one instruction."""

    def __call__(self, polls: int, /) -> None:
        """Give way after `polls` fruitless polls in a row (1, 2, ...).

        It may return at once, yield the core, or block for a bounded time until something may
        have arrived; the engine then polls again and checks its deadline. An exception of it
        (the failure of another rank, for one) ends the execution and reaches the caller unchanged.
        """


class World(Protocol):
    """All ranks of the job, one of which is this process, as backends and tracers see them.

    Every method that talks to other ranks is collective: all ranks call it in the same order.
    Each has a deadline and raises `TimeoutError` past it, naming the ranks that are missing.
    """

    @property
    def rank(self) -> int:
        """This process's rank; 0 in a virtual world."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def is_virtual(self) -> bool:
        """Return whether this process plays every rank."""

    @property
    def nodes(self) -> Sequence[int]:
        """For each rank the number of the machine that it runs on."""

    @property
    def device(self) -> Device | None:
        """The accelerator that holds the tensors of this process's rank; None if the host does."""

    def plays(self, rank: int) -> bool:
        """Return whether this process holds the actors of `rank`."""

    def broadcast(self, value: T | None, root: int) -> T:
        """Give the (picklable) value of rank `root` to every rank."""

    def allgather(self, value: T) -> list[T]:
        """The (picklable) values of all ranks, by rank."""

    def barrier(self) -> None:
        """Wait until every rank has come here."""

    def end_job(self, message: str) -> None:
        """End all ranks after a failure from which this one cannot recover; not collective."""


Body = Callable[..., Sequence[Any]]
"""The Python of a function of the module: takes its inputs, returns its outputs in a sequence.

It runs under `torch.no_grad()`. A body that needs autograd enables it for itself, and returns
values that are detached from the graph.
"""


@runtime_checkable
class StatefulBody(Protocol):
    """A body that names the tensors of its actor that it works on.

    A device graph is valid only as long as these tensors lie in the same memory.

    Attributes:
        state: returns the parameters and buffers that it works on.
        trained: returns the parameters whose `.grad` it changes.
    """

    def __call__(self, *inputs: Any) -> Sequence[Any]: ...
    @property
    def state(self) -> Callable[[], Sequence[Tensor]]: ...
    @property
    def trained(self) -> Callable[[], Sequence[Tensor]]: ...


@runtime_checkable
class GraphBody(StatefulBody, Protocol):
    """The body of a traced function, with its fx graph.

    Attributes:
        run: the function that a call runs.
        locate: finds the user's line behind a traceback through the body, or None.
        rebinds: whether it puts new tensors in the place of buffers.
        new_gradients: memory for the `.grad` of parameters that have none, by the parameter's `id`.
            A caller fills this mapping for the time of a call; the body allocates all other
            gradients itself.
    """

    @property
    def run(self) -> Body: ...
    @property
    def locate(self) -> Callable[[TracebackType | None], Location | None]: ...
    def graph_and_lines(self) -> tuple[fx.Graph, Mapping[fx.Node, Location]]:
        """The fx graph that it runs, and the user's line of each node, where it is known."""

    @property
    def rebinds(self) -> bool: ...
    @property
    def new_gradients(self) -> dict[int, Tensor]: ...


Boxed = Callable[[list[Any]], Sequence[Any]]
"""A call that takes its inputs in a list and empties it, so each input goes after its last use."""


@runtime_checkable
class BoxedBody(Protocol):
    """A body that lets go of each input after its last use.

    A call by arguments cannot do that: its caller holds them until it returns.
    """

    @property
    def run_boxed(self) -> Boxed: ...


CommunicatorFactory = Callable[[World, Sequence[Channel]], Communicator]
"""Makes this process's communicator for the channels of a plan that it is to serve.

All ranks call it in the same order, with the channels in ascending order of id. These include
channels in which this rank has no part, so a factory may communicate through the world.
"""
