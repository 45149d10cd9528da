"""The few calls of a collective communication library that the ports need, behind one protocol.

Everything is a number: pointers, counts, element types, streams. NCCL is one such library, by two
bindings; a library with the same semantics needs no more than to implement `Library`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...ir.attributes import ReduceOp
from ...ir.types import DType
from ..errors import TransportError

SUCCESS, IN_PROGRESS = 0, 7

CODES: dict[DType, int] = {
    DType.I8: 0,
    DType.U8: 1,
    DType.I32: 2,
    DType.U32: 3,
    DType.I64: 4,
    DType.U64: 5,
    DType.F16: 6,
    DType.F32: 7,
    DType.F64: 8,
    DType.BF16: 9,
    DType.BOOL: 1,
}
"""`ncclDataType_t`; booleans travel as bytes."""

BYTES = 1
"""The element type of messages, which are moved and not looked into."""

REDUCTIONS: dict[ReduceOp, int] = {
    ReduceOp.SUM: 0,
    ReduceOp.PROD: 1,
    ReduceOp.MAX: 2,
    ReduceOp.MIN: 3,
    ReduceOp.AVG: 4,
}
"""`ncclRedOp_t`."""


class CommunicationError(TransportError):
    """The library has reported an error, or does not get ready."""


class Library(Protocol):
    """A collective communication library. Every call may raise `CommunicationError`.

    A communicator is what `connect` returns. Its calls are made by one thread.

    Attributes:
        name: in messages.
    """

    name: str

    def version(self) -> str:
        """Of the library itself."""

    def unique_id(self) -> bytes:
        """What the members of a new communicator have in common; one of them makes it."""

    def connect(self, size: int, unique: bytes, rank: int) -> Any:
        """Begin to join a new communicator; all its members do.

        Args:
            rank: this member's number in it.
        """

    def is_ready(self, comm: Any) -> bool:
        """Whether a communicator has been joined."""

    def send(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: int) -> None:
        """Send bytes to member `peer`."""

    def recv(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: int) -> None:
        """Receive bytes from member `peer`."""

    def all_reduce(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        """Reduce `count` elements; each member gets the result."""

    def reduce_scatter(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        """Reduce; each member gets its part, of `count` elements."""

    def all_gather(self, source: int, target: int, nbytes: int, comm: Any, stream: int) -> None:
        """Each member gets the `nbytes` bytes of all, in their order."""

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, comm: Any, stream: int
    ) -> None:
        """Each member gets the bytes of member `root`."""

    def exchange(
        self, messages: Sequence[tuple[int, int, int, int]], comm: Any, stream: int
    ) -> None:
        """Send to and receive from several members at once.

        Args:
            messages: for each member its number, the pointers to what it gets and to what comes
                from it, and the bytes of each.
        """

    def error(self, comm: Any) -> str | None:
        """What has gone wrong with a communicator since, if anything has."""

    def abort(self, comm: Any) -> None:
        """Break off what is under way, and give the communicator up."""

    def destroy(self, comm: Any) -> None:
        """Give a communicator up that has nothing under way."""


Binding = Callable[[bool], Library]
"""Makes the library by one of its bindings; the argument is whether `connect` may return early.

Raises `ImportError` where the binding, or the library behind it, is not installed.
"""

BINDINGS = ("nccl4py", "cupy")
"""In the order in which they are tried."""


def load(binding: str | None = None, nonblocking: bool = False) -> Library:
    """The library, by the first binding that is installed, or by that of a name.

    The bindings are not imported before: most machines have neither.

    Raises:
        TransportError: none is installed; the message says what to install.
    """
    problems = []
    for name in BINDINGS if binding is None else (binding,):
        if name not in BINDINGS:
            raise TransportError(
                f"there is no binding of NCCL called '{name}'; known are {', '.join(BINDINGS)}"
            )
        try:
            module = importlib.import_module(f"{__package__}.{name}_binding")
            make: Binding = module.make
            return make(nonblocking)
        except (ImportError, RuntimeError, OSError) as error:
            problems.append(f"  {name}: {error}")
    raise TransportError(
        "tensors on GPUs travel by NCCL, and no binding of it can be loaded:\n"
        + "\n".join(problems)
        + "\nInstall one (pip install 'cg[cuda]'), or keep the step on the CPU by CG_DEVICE=cpu"
    )
