"""A device of the host's memory whose side streams are threads, and a library between such devices.

The compute stream is the calling thread: what is put on it happens at once. Every other stream is a
thread that does one thing after the other, and what a graph has on it another one. So messages
really are under way while a rank goes on, and what is ordered wrongly shows as a wrong value. That
holds for torch's operations, too, where the stream of tails is the current one: what they make is
NaN until its thread has done them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any
from weakref import WeakSet

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from cg.backends.devices.base import Fabric
from cg.backends.streams.library import Message
from cg.ir.attributes import Stream
from cg.ir.types import DType

from ..recording import Pool, Recording

PATIENCE = 120.0
"""Seconds after which a wait of the compute stream is a deadlock."""

ASSERTED = (
    "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs.nvidia."
    "com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\nCUDA kernel errors "
    "might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with "
    "`TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
"""The error of torch 2.11 by whatever is asked of a device on which a kernel has asserted."""

FABRIC = Fabric("fake", frozenset(DType) - {DType.I16, DType.U16})


class FakeQueue:
    """A stream: a thread, or the caller itself (the compute stream)."""

    def __init__(self, name: str, inline: bool, device: FakeDevice) -> None:
        self.name = name
        self.device = device
        self.inline = inline
        self.log: list[str] = []
        self.delay = 0.0
        self.error: BaseException | None = None
        self.nodes: tuple[int, ...] | None = None
        self._branch: FakeQueue | None = None
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        if not inline:
            threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def branch(self) -> FakeQueue:
        """Where graphs do what was captured of this stream: not behind what else is on it.

        What they have on the stream that they are replayed on is on that stream.
        """
        if self.inline or self is self.device.base:
            return self
        if self._branch is None:
            self._branch = FakeQueue(f"{self.name} of graphs", False, self.device)
            self._branch.log, self._branch.delay = self.log, self.delay
        return self._branch

    def put(self, what: str, work: Callable[[], None], comm: FakeComm | None = None) -> None:
        """Do some work, or note it down where the device is capturing.

        Args:
            comm: whose operation it is; a communicator does one after the other.
        """
        self.device.check()
        recording = self.device.recording
        if recording is not None:
            branch = self.branch
            recording.append(lambda: branch.put(what, work, comm))
            self.device.note(self)
            return
        self.log.append(what)
        in_turn = work if comm is None else comm.in_turn(work)
        if self.inline:
            in_turn()
        else:
            self._work.put(in_turn)

    def wait_event(self, event: FakeEvent) -> None:
        if self.device.recording is not None:
            branch = self.branch
            self.device.recording.append(lambda: branch.wait_event(event))
            assert event.captured, "a graph cannot wait for what is outside of it"
            self.nodes = tuple(sorted({*(self.nodes or ()), *event.nodes}))
            return
        token = event.token
        self.put(f"wait {event.name}", lambda: _wait(token, self.name))

    def synchronize(self) -> None:
        done = threading.Event()
        self.put("synchronize", done.set)
        _wait(done, self.name)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            if self.delay:
                time.sleep(self.delay)
            try:
                work()
            except BaseException as error:  # shown by whoever waits
                self.error = error


def _wait(token: threading.Event, who: str) -> None:
    if not token.wait(PATIENCE):
        raise TimeoutError(f"stream {who} has waited {PATIENCE} s for an event")


class FakeEvent:
    """An event; recording it again moves it."""

    count = 0

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        FakeEvent.count += 1
        self.check = check
        self.name = f"e{FakeEvent.count}"
        self.token = threading.Event()
        self.token.set()
        self.captured = False
        self.nodes: tuple[int, ...] = ()

    def record(self, stream: FakeQueue) -> None:
        if stream.device.recording is not None:
            self.captured, self.nodes = True, stream.nodes or ()
            branch = stream.branch
            stream.device.recording.append(lambda: self.record(branch))
            return
        token = self.token = threading.Event()
        stream.put(f"record {self.name}", token.set)

    def query(self) -> bool:
        self.check()
        return self.token.is_set()

    def synchronize(self) -> None:
        self.check()
        _wait(self.token, "host")


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


class FakeTimer(FakeEvent):
    """An event that notes when it is passed."""

    at = 0.0

    def record(self, stream: FakeQueue) -> None:
        super().record(stream)
        stream.put(f"time {self.name}", self._note)

    def _note(self) -> None:
        self.at = time.perf_counter()


class FakeGraph:
    """The work that was noted down while the device was capturing."""

    def __init__(self, work: Sequence[Callable[[], None]]) -> None:
        self.work = tuple(work)
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for work in self.work:
            work()


class _OnQueue:
    """Takes what torch does for work of a stream, noted down where the device is capturing."""

    def __init__(self, queue: FakeQueue) -> None:
        self.queue = queue

    def append(self, step: Callable[[], object], /) -> None:
        def work() -> None:
            with torch.no_grad():
                step()

        self.queue.put("torch", work)


class _Fresh(Pool):
    """Memory that is given out once."""

    def blank(self, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(like, device="cpu")
        return made.fill_(float("nan")) if made.is_floating_point() else made

    def by_address(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class FakeDevice:
    """A `Device` on the host: its streams are queues of work, run at once or by threads."""

    def __init__(self, index: int = 0, delay: float = 0.0) -> None:
        self.kind = "cpu"
        self.index = index
        self.torch_device = torch.device("cpu")
        self.fabric: Fabric | None = FABRIC
        self.delay = delay
        self.sessions = 0
        self.synchronized = 0
        self.given_back = 0
        self.recording: list[Callable[[], None]] | None = None
        self.recorded_of: list[FakeComm] = []
        self.before: list[frozenset[int]] = []
        self.base: FakeQueue | None = None
        self.pools: dict[FakeQueue, Pool] = {}
        self.graphs: dict[FakeQueue, WeakSet[FakeGraph]] = {}
        self.queues: dict[Stream, FakeQueue] = {}
        self.events: list[FakeEvent] = []
        self.current: FakeQueue | None = None
        self.error: RuntimeError | None = None
        self._depth = 0
        self._raw: dict[int, FakeQueue] = {}

    def fail(self, text: str = ASSERTED) -> None:
        """From now on do nothing any more, and answer whatever is asked by an error."""
        self.error = RuntimeError(text)

    def check(self) -> None:
        """Raise the error of a device that has failed."""
        if self.error is not None:
            raise RuntimeError(str(self.error))

    def stream(self, kind: Stream) -> FakeQueue:
        found = self.queues.get(kind)
        if found is None:
            found = self.queues[kind] = FakeQueue(kind.value, kind is Stream.COMPUTE, self)
            found.delay = self.delay * (5 if kind is Stream.TAIL else 1)
            self._raw[id(found)] = found
        return found

    def has(self, kind: Stream) -> bool:
        return kind in self.queues

    def by_raw(self, raw: int) -> FakeQueue:
        return self._raw[raw]

    def event(self) -> FakeEvent:
        self.events.append(FakeEvent(self.check))
        return self.events[-1]

    def timer(self) -> FakeTimer:
        return FakeTimer()

    def elapsed(self, start: FakeTimer, end: FakeTimer) -> float:
        return (end.at - start.at) * 1e3

    def give_back(self) -> None:
        self.given_back += 1

    def raw(self, queue: FakeQueue) -> int:
        return id(queue)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Where a test has made a stream the current one, as accelerators have it."""
        self.sessions += 1
        before, self._depth = self.current, self._depth + 1
        if before is not None and self._depth == 1:
            begin = self.event()
            begin.record(before)
            self.stream(Stream.COMPUTE).wait_event(begin)
        try:
            yield
        finally:
            self._depth -= 1
            if before is not None and self._depth == 0:
                end = self.event()
                end.record(self.stream(Stream.COMPUTE))
                before.wait_event(end)

    def on(self, queue: FakeQueue) -> contextlib.AbstractContextManager[Any]:
        if queue.inline or self.recording is not None:
            return contextlib.nullcontext()
        return Recording(_OnQueue(queue), _Fresh())

    def caller(self) -> FakeQueue:
        return self.stream(Stream.COMPUTE) if self.current is None else self.current

    def keep(self, tensors: Sequence[torch.Tensor], queue: FakeQueue) -> None:
        pass

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def random_state(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like, device="cpu")

    def copy(self, source: torch.Tensor, target: torch.Tensor, queue: FakeQueue) -> None:
        queue.put("copy", lambda: _copy(source, target))

    def capture(self, work: Callable[[], None], queue: FakeQueue) -> FakeGraph:
        queue.synchronize()  # to give out memory of the pool fills it with NaN
        if self.begins_pool(queue):
            self.pools[queue] = Pool()
        self.recording, self.recorded_of, self.before, self.base = [], [], [], queue
        for each in self.queues.values():
            each.nodes = () if each is queue else None
        try:
            with _disable_current_modes(), Recording(_OnQueue(queue), self.pools[queue]):
                work()
            graph = FakeGraph(self.recording)
        finally:
            self.recording = self.base = None
        for comm in self.recorded_of:
            comm.graphs.add(graph)
        self.graphs.setdefault(queue, WeakSet()).add(graph)
        return graph

    def begins_pool(self, queue: FakeQueue) -> bool:
        return not self.graphs.get(queue)

    def note(self, queue: FakeQueue) -> None:
        """Make a node of the graph that is being captured, behind those of a stream."""
        nodes = queue.nodes or ()
        self.before.append(frozenset(nodes).union(*(self.before[node] for node in nodes)))
        queue.nodes = (len(self.before) - 1,)

    def nodes(self, queue: FakeQueue) -> tuple[int, ...] | None:
        return None if self.recording is None else queue.nodes

    def follow_alone(self, queue: FakeQueue, event: FakeEvent, nodes: tuple[int, ...]) -> None:
        implied = frozenset(nodes).union(*(self.before[node] for node in nodes))
        assert implied.issuperset(queue.nodes or ()), "an edge of the graph is lost"
        queue.wait_event(event)
        queue.nodes = nodes

    def synchronize(self) -> None:
        self.synchronized += 1
        for found in tuple(self.queues.values()):
            found.synchronize()


class FakeComm:
    """A member of a communicator: a socket to each other member."""

    def __init__(self, folder: str, size: int, unique: bytes, member: int) -> None:
        self.size = size
        self.member = member
        self.aborted = False
        self.graphs: WeakSet[FakeGraph] = WeakSet()
        self._last = threading.Event()
        self._last.set()
        self.peers: dict[int, Connection] = {}
        path = os.path.join(folder, unique[:8].hex())
        with Listener(f"{path}-{member}", "AF_UNIX", backlog=size) as listener:
            for peer in range(member):
                self.peers[peer] = _dial(f"{path}-{peer}")
                self.peers[peer].send(member)
            for _ in range(member + 1, size):
                conn = listener.accept()
                self.peers[conn.recv()] = conn

    def in_turn(self, work: Callable[[], None]) -> Callable[[], None]:
        """An operation that begins when those are over that were put on a stream before it."""
        before, over = self._last, threading.Event()
        self._last = over

        def run() -> None:
            try:
                _wait(before, "communicator")
                work()
            finally:
                over.set()

        return run

    def exchange(self, mine: bytes) -> list[bytes]:
        """Everybody's bytes, by member."""
        sends = [
            threading.Thread(target=self._send, args=(conn, mine)) for conn in self.peers.values()
        ]
        for thread in sends:
            thread.start()
        found = {peer: conn.recv_bytes() for peer, conn in self.peers.items()}
        for thread in sends:
            thread.join()
        found[self.member] = mine
        return [found[member] for member in range(self.size)]

    def _send(self, conn: Connection, content: bytes) -> None:
        with contextlib.suppress(OSError):  # as when the communicator is aborted meanwhile
            conn.send_bytes(content)


def _dial(path: str) -> Connection:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return Client(path, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.002)


_NUMPY: dict[int, Any] = {
    0: numpy.int8,
    1: numpy.uint8,
    2: numpy.int32,
    3: numpy.uint32,
    4: numpy.int64,
    5: numpy.uint64,
    6: numpy.float16,
    7: numpy.float32,
    8: numpy.float64,
}
_REDUCE: dict[int, Any] = {0: numpy.add, 1: numpy.multiply, 2: numpy.maximum, 3: numpy.minimum}


class FakeLibrary:
    """A `Library` of this process, with the numbers of NCCL.

    Works between threads and between processes.
    """

    name = "fake"

    def __init__(self, device: FakeDevice, folder: str | None = None) -> None:
        self.device = device
        self.folder = folder or tempfile.gettempdir()
        self.calls: list[str] = []
        self.fault: str | None = None

    def version(self) -> str:
        return "0"

    def unique_id(self) -> bytes:
        return uuid.uuid4().bytes * 8

    def connect(self, size: int, unique: bytes, rank: int, width: int | None = None) -> FakeComm:
        self.calls.append(f"connect {rank} of {size}")
        return FakeComm(self.folder, size, unique, rank)

    def is_ready(self, comm: FakeComm) -> bool:
        return True

    def send(self, pointer: int, nbytes: int, peer: int, comm: FakeComm, stream: int) -> None:
        def work() -> None:
            comm.peers[peer].send_bytes(ctypes.string_at(pointer, nbytes))

        self.put(f"send {nbytes}", stream, comm, work)

    def recv(self, pointer: int, nbytes: int, peer: int, comm: FakeComm, stream: int) -> None:
        def work() -> None:
            content = comm.peers[peer].recv_bytes()
            assert len(content) == nbytes, "both ends must agree"
            ctypes.memmove(pointer, content, nbytes)

        self.put(f"recv {nbytes}", stream, comm, work)

    def all_reduce(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        def work() -> None:
            total = self._reduced(source, count, type_, op, comm)
            ctypes.memmove(target, total.tobytes(), total.nbytes)

        self.put(f"all_reduce {count}", stream, comm, work)

    def reduce_scatter(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        def work() -> None:
            total = self._reduced(source, count * comm.size, type_, op, comm)
            part = total[comm.member * count : (comm.member + 1) * count]
            ctypes.memmove(target, part.tobytes(), part.nbytes)

        self.put(f"reduce_scatter {count}", stream, comm, work)

    def all_gather(self, source: int, target: int, nbytes: int, comm: Any, stream: int) -> None:
        def work() -> None:
            everything = b"".join(comm.exchange(ctypes.string_at(source, nbytes)))
            ctypes.memmove(target, everything, len(everything))

        self.put(f"all_gather {nbytes}", stream, comm, work)

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, comm: Any, stream: int
    ) -> None:
        def work() -> None:
            mine = ctypes.string_at(source, nbytes) if comm.member == root else b""
            ctypes.memmove(target, comm.exchange(mine)[root], nbytes)

        self.put(f"broadcast {nbytes}", stream, comm, work)

    def batch(self, messages: Sequence[Message], comm: Any, stream: int) -> None:
        def work() -> None:
            sent = {m.peer: ctypes.string_at(m.pointer, m.nbytes) for m in messages if not m[0]}
            own = sent.pop(comm.member, b"")
            sends = [
                threading.Thread(target=comm.peers[peer].send_bytes, args=(content,))
                for peer, content in sent.items()
            ]
            for thread in sends:
                thread.start()
            for message in messages:
                if message.receives:
                    mine = message.peer == comm.member
                    content = own if mine else comm.peers[message.peer].recv_bytes()
                    assert len(content) == message.nbytes, "both ends must agree"
                    ctypes.memmove(message.pointer, content, message.nbytes)
            for thread in sends:
                thread.join()

        self.put("batch", stream, comm, work)

    def error(self, comm: FakeComm) -> str | None:
        return self.fault

    def abort(self, comm: FakeComm) -> None:
        comm.aborted = True
        self.calls.append("abort")
        self._outlive_graphs(comm)
        for conn in comm.peers.values():
            conn.close()

    def destroy(self, comm: FakeComm) -> None:
        self.calls.append("destroy")
        self._outlive_graphs(comm)
        for conn in comm.peers.values():
            conn.close()

    def _outlive_graphs(self, comm: FakeComm) -> None:
        """NCCL gives a communicator up when no graph has operations of it any more."""
        deadline = time.monotonic() + PATIENCE
        while comm.graphs:
            assert time.monotonic() < deadline, "a graph still has operations of the communicator"
            time.sleep(0.002)

    def put(self, what: str, stream: int, comm: FakeComm, work: Callable[[], None]) -> None:
        if self.device.recording is not None:
            self.device.recorded_of.append(comm)
        self.calls.append(what)
        self.device.by_raw(stream).put(what, work, comm)

    def _reduced(self, source: int, count: int, type_: int, op: int, comm: FakeComm) -> Any:
        if type_ == 9:  # bf16, which numpy lacks
            parts = comm.exchange(ctypes.string_at(source, count * 2))
            tensors = [torch.frombuffer(bytearray(p), dtype=torch.bfloat16).float() for p in parts]
            arrays = [t.numpy() for t in tensors]
            total = _combine(arrays, op)
            bits = torch.from_numpy(total).to(torch.bfloat16).view(torch.int16)
            return bits.numpy()
        dtype = numpy.dtype(_NUMPY[type_])
        parts = comm.exchange(ctypes.string_at(source, count * dtype.itemsize))
        return _combine([numpy.frombuffer(part, dtype) for part in parts], op)


def _combine(arrays: Sequence[Any], op: int) -> Any:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = _REDUCE[0 if op == 4 else op](total, array)
    return (total / len(arrays)).astype(total.dtype) if op == 4 else total
