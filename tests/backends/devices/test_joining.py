"""Communicators whose other members do not come, and calls that return before they are done."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cg.backends.device import Device
from cg.backends.fake.library import FakeLibrary
from cg.backends.nccl.library import load
from cg.backends.nccl.pool import NcclPool
from cg.backends.streams.library import CommunicationError, Library, RawMessage
from cg.ir.ops.module import Channel
from tests.backends.devices.patience import loose_device

EDGE = Channel(0, (0, 1))
SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7
PATIENCE = 120.0


class Alone:
    """A world of which the other ranks have said what they had to, and then stand still."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ended = threading.Event()

    def allgather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def end_job(self, message: str) -> None:
        self.said.append(message)
        self.ended.set()


class Hasty(NcclPool):
    """One that does not wait long."""

    connect_seconds = 0.05


def pool_of(world: Alone, library: Library, kind: type[NcclPool] = Hasty) -> NcclPool:
    device: Device = loose_device()
    there: Any = world
    return kind(there, device, library)


# -- a library whose calls block --------------------------------------------------------------


class Blocking(FakeLibrary):
    """One whose calls return when the job is at its end."""

    def __init__(self, world: Alone, blocks: str) -> None:
        super().__init__(loose_device())
        self.world = world
        self.blocks = blocks

    def block(self, call: str) -> Any:
        if call == self.blocks:
            assert self.world.ended.wait(PATIENCE), "nobody ends the wait"
            raise CommunicationError("interrupted")

    def connect(self, *_: Any) -> Any:
        self.block("connect")
        return object()

    def send(self, *_: Any) -> None:
        self.block("send")


@pytest.mark.parametrize(
    ("call", "what"),
    [("connect", "joined"), ("send", "carried the first messages of")],
)
def test_a_call_that_waits_for_a_rank_ends_the_job(call: str, what: str) -> None:
    world = Alone()
    with pytest.raises(CommunicationError, match="interrupted"):
        pool_of(world, Blocking(world, call)).join([EDGE])
    assert world.said == [
        f"fake has not {what} the edge from rank 0 to rank 1 within 0.05 s; look at the other "
        "ranks' output, and at that of NCCL with NCCL_DEBUG=INFO"
    ]


def test_the_job_goes_on_where_ranks_come(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[threading.Timer] = []

    class Noted(threading.Timer):
        def start(self) -> None:
            timers.append(self)
            super().start()

    monkeypatch.setattr("cg.backends.streams.pool.Timer", Noted)
    world = Alone()
    pool_of(world, Blocking(world, "nothing"), NcclPool).join([EDGE])
    assert len(timers) == 2
    assert all(timer.interval == NcclPool.connect_seconds for timer in timers)
    for timer in timers:
        timer.join(PATIENCE)
        assert not timer.is_alive()
    assert not world.said


# -- one whose calls return before they are done ----------------------------------------------


class Low(ModuleType):
    """The part of nccl4py's low-level bindings that is used; communicators are lists of states."""

    class NCCLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("nccl.bindings.nccl")
        self.states: list[int] = []
        self.calls: list[str] = []
        self.UniqueId = SimpleNamespace(from_buffer=bytes)
        self.Config = SimpleNamespace

    def get_unique_id(self) -> bytes:
        return b"key"

    def get_version(self) -> int:
        return 22809

    def comm_init_rank_config(self, size: int, key: bytes, rank: int, config: Any) -> object:
        self.calls.append(f"init, blocking={config.blocking}")
        return object()

    def comm_get_async_error(self, comm: object) -> int:
        self.calls.append("look")
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def comm_abort(self, comm: object) -> None:
        self.calls.append("abort")

    def get_error_string(self, state: int) -> str:
        return f"state {state}"

    def get_last_error(self, comm: object) -> str:
        return "by the other one"

    def group_start(self) -> None:
        self.calls.append("start")

    def group_end(self) -> None:
        self.calls.append("end")

    def send(self, *_: Any) -> None:
        self.calls.append("send")

    def recv(self, *_: Any) -> None:
        self.calls.append("recv")

    def all_reduce(self, *_: Any) -> None:
        self.calls.append("all_reduce")

    reduce_scatter = all_gather = broadcast = all_reduce


@pytest.fixture
def low(monkeypatch: pytest.MonkeyPatch) -> Low:
    made = Low()
    package, inner = ModuleType("nccl"), ModuleType("nccl.bindings")
    package.bindings, inner.nccl = inner, made  # type: ignore[attr-defined]
    for name, module in {"nccl": package, "nccl.bindings": inner, made.__name__: made}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


CALLS = {
    "send": lambda library: library.send(0, 4, 1, None, 0),
    "recv": lambda library: library.recv(0, 4, 1, None, 0),
    "all_reduce": lambda library: library.all_reduce(0, 0, 1, 7, 0, None, 0),
    "reduce_scatter": lambda library: library.reduce_scatter(0, 0, 1, 7, 0, None, 0),
    "all_gather": lambda library: library.all_gather(0, 0, 4, None, 0),
    "broadcast": lambda library: library.broadcast(0, 0, 4, 0, None, 0),
    "batch": lambda library: library.batch([RawMessage(True, 1, 0, 4)], None, 0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_next_call_is_made_when_one_is_done(low: Low, call: Any) -> None:
    low.states = [IN_PROGRESS] * 150 + [SUCCESS]
    call(load(nonblocking=True))
    assert low.calls.count("look") == 151
    assert low.calls[-151:] == ["look"] * 151


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_blocks_needs_no_look(low: Low, call: Any) -> None:
    call(load())
    assert "look" not in low.calls


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_error_of_a_call_that_has_returned_is_raised(low: Low, call: Any) -> None:
    low.states = [IN_PROGRESS, REMOTE_ERROR]
    with pytest.raises(CommunicationError, match="state 6 by the other one"):
        call(load(nonblocking=True))


def test_a_call_has_a_deadline(low: Low, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load(nonblocking=True)
    monkeypatch.setattr("cg.backends.nccl.library.CALL_SECONDS", 0.05)
    low.states = [IN_PROGRESS]
    with pytest.raises(CommunicationError, match=r"not put its work on the device within 0\.05 s"):
        library.send(0, 4, 1, None, 0)


@pytest.mark.parametrize("nonblocking", [False, True])
def test_how_a_communicator_is_joined(low: Low, nonblocking: bool) -> None:
    low.states = [IN_PROGRESS, SUCCESS]
    library = load(nonblocking)
    comm = library.connect(2, b"key", 0)
    assert low.calls == [f"init, blocking={int(not nonblocking)}"]
    assert [library.is_ready(comm) for _ in range(2)] == [False, True]


def test_joining_without_blocking_obeys_the_deadline(low: Low) -> None:
    """The communicator is given up, and the job can go on: all its ranks have an error."""
    low.states = [IN_PROGRESS]
    world = Alone()
    with pytest.raises(CommunicationError, match="has not joined the edge from rank 0 to rank 1"):
        pool_of(world, load(nonblocking=True)).join([EDGE])
    assert low.calls[-1] == "abort"
    assert not world.said


def test_an_error_while_ranks_are_joined(low: Low) -> None:
    low.states = [IN_PROGRESS, REMOTE_ERROR]
    with pytest.raises(CommunicationError, match="state 6 by the other one"):
        pool_of(Alone(), load(nonblocking=True)).join([EDGE])
