"""Exceptions of NCCL's binding, over a stub in the place of the vendor's module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Lock
from types import ModuleType
from typing import Any

import pytest
import torch

from cg.backends.errors import TransportError
from cg.backends.nccl.library import load
from cg.backends.streams.groups import CommunicatorGroup, Line
from cg.backends.streams.library import CommunicationError, Library, RawMessage
from cg.backends.streams.ports import CollectivePort, StreamRecvPort, StreamSendPort
from cg.ir.attributes import Stream
from cg.ir.types import DType, TensorType

COMM = object()
MESSAGES = [RawMessage(False, 1, 0, 8), RawMessage(True, 1, 0, 8)]


class NCCLError(Exception):
    """As nccl4py has it: no RuntimeError."""


class Stub(ModuleType):
    """Calls that fail where they are named in `broken`; others are noted down."""

    def __init__(self, name: str, error: type[Exception]) -> None:
        super().__init__(name)
        self.error = error
        self.broken: set[str] = set()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*_: Any) -> int:
            self.calls.append(name)
            if name in self.broken:
                raise self.error(f"unhandled system error in {name}")
            return 0

        return call


class Bound:
    """A library over a stub, and what its calls are called there."""

    def __init__(self, library: Library, stub: Stub, comm: Any, names: dict[str, str]) -> None:
        self.library = library
        self.stub = stub
        self.comm = comm
        self.names = names

    def break_(self, *calls: str) -> None:
        self.stub.broken |= {self.names.get(call, call) for call in calls}


NAMES = {
    "abort": "comm_abort",
    "destroy": "comm_destroy",
    "error": "comm_get_async_error",
    "is_ready": "comm_get_async_error",
    "unique_id": "get_unique_id",
    "version": "get_version",
}


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Bound:
    low = Stub("nccl.bindings.nccl", NCCLError)
    low.NCCLError = NCCLError  # type: ignore[attr-defined]
    package, bindings = ModuleType("nccl"), ModuleType("nccl.bindings")
    package.bindings, bindings.nccl = bindings, low  # type: ignore[attr-defined]
    for module in (package, bindings, low):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return Bound(load(), low, COMM, NAMES)


CALLS: dict[str, tuple[Callable[[Library, Any], object], str]] = {
    "send": (lambda n, c: n.send(0, 16, 1, c, 0), "send of 16 bytes to member 1"),
    "recv": (lambda n, c: n.recv(0, 16, 1, c, 0), "receive of 16 bytes from member 1"),
    "all_reduce": (lambda n, c: n.all_reduce(0, 0, 4, 7, 0, c, 0), "all-reduce of 4 elements"),
    "reduce_scatter": (
        lambda n, c: n.reduce_scatter(0, 0, 4, 7, 0, c, 0),
        "reduce-scatter of 4 elements of type 7",
    ),
    "all_gather": (lambda n, c: n.all_gather(0, 0, 16, c, 0), "all-gather of 16 bytes"),
    "broadcast": (lambda n, c: n.broadcast(0, 0, 16, 1, c, 0), "broadcast of 16 bytes from member"),
    "group_start": (lambda n, c: n.batch(MESSAGES, c, 0), "batch of 2 messages with member 1"),
    "group_end": (lambda n, c: n.batch(MESSAGES, c, 0), "batch of 2 messages with member 1"),
    "abort": (lambda n, c: n.abort(c), "breaking off"),
    "destroy": (lambda n, c: n.destroy(c), "giving up of a communicator"),
    "unique_id": (lambda n, c: n.unique_id(), "making of a key"),
    "version": (lambda n, c: n.version(), "version"),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_says_what_has_failed(bound: Bound, call: str) -> None:
    do, says = CALLS[call]
    bound.break_(call)
    with pytest.raises(CommunicationError) as caught:
        do(bound.library, bound.comm)
    assert str(caught.value).startswith(f"NCCL's {says}"), caught.value
    assert "has failed: unhandled system error" in str(caught.value)
    assert str(caught.value).endswith("; NCCL_DEBUG=INFO says more")
    assert isinstance(caught.value.__cause__, bound.stub.error)


def test_a_communicator_that_cannot_be_asked(bound: Bound) -> None:
    assert bound.library.error(bound.comm) is None
    bound.break_("error")
    assert "unhandled system error" in str(bound.library.error(bound.comm))
    with pytest.raises(CommunicationError, match="unhandled system error"):
        bound.library.is_ready(bound.comm)


def test_a_batch_ends_its_group_and_names_the_first_failure(bound: Bound) -> None:
    bound.break_("send", "group_end")
    with pytest.raises(CommunicationError, match="unhandled system error in send"):
        bound.library.batch(MESSAGES, bound.comm, 0)
    assert bound.stub.calls[-1] == bound.names.get("group_end", "group_end")


def test_a_library_that_cannot_be_loaded(bound: Bound) -> None:
    bound.break_("version")
    with pytest.raises(
        TransportError, match=r"nccl4py cannot be loaded: NCCL.s version has failed"
    ):
        load()


def test_ports_say_whom_it_concerns(bound: Bound) -> None:
    type_ = TensorType(DType.F32, (4,))
    edge, group = (
        Line(CommunicatorGroup((2, 5), False), 0, Lock()),
        Line(CommunicatorGroup((0, 1, 2), True), 1, Lock()),
    )
    edge.comm = group.comm = bound.comm
    bound.break_("send", "recv", "all_gather")
    x, device = torch.ones(4), torch.device("cpu")

    def gather(source: int, target: int) -> None:
        bound.library.all_gather(source, target, 16, group.comm, 0)

    send = StreamSendPort(0, bound.library, edge, type_, Stream.SEND)
    recv = StreamRecvPort(0, bound.library, edge, type_, Stream.RECV, None, False, device, id)
    parts: Any = (lambda: x, lambda value, _: value, gather, lambda value: value)
    collective = CollectivePort(0, bound.library, group, Stream.COLLECTIVE, *parts)
    collective.prepare(x)
    at = "the edge from rank 2 to rank 5: NCCL's"
    for start, says in (
        (send.start, f"{at} send of 16 bytes"),
        (recv.start, f"{at} receive of 16 bytes"),
        (collective.start, r"the group \{0..2\}: NCCL's all-gather"),
    ):
        with pytest.raises(CommunicationError, match=says):
            start(x)
