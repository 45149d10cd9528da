"""Other ways for events from rank 0 to the front: control arms of ablations, off by default.

`+queue_ipc` does what `multiprocessing.Queue` does: a feeder thread pickles objects. `+shm_ring`
puts the bytes of a frame into shared memory, and sends where they lie. `+uvloop` runs the loops of
both processes on libuv.
"""

from __future__ import annotations

import asyncio
import io
import mmap
import pickle
import queue
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .features import Features
from .wire import Kind, Link, WireError

RING = 1 << 22
"""Bytes of the ring."""
_TAIL = struct.Struct("<Q")
_PLACE = struct.Struct("<QII")


def loop_factory(features: Features) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The function that makes the event loop, for `asyncio.Runner`; None is asyncio's own.

    Raises:
        ValueError: uvloop is wanted, and not installed.
    """
    if not features.uvloop:
        return None
    try:
        import uvloop  # optional
    except ImportError:
        raise ValueError("+uvloop needs uvloop: pip install uvloop") from None
    features.changes["uvloop"] += 1
    return uvloop.new_event_loop


class Feeder:
    """Pickles and sends objects in a thread of its own."""

    def __init__(self, link: Link) -> None:
        self._link, self._loop = link, asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        self._queue.put(message)

    def close(self) -> None:
        """Send what is left."""
        self._queue.put(None)
        self._thread.join()

    def _feed(self) -> None:
        while (item := self._queue.get()) is not None:
            payload = pickle.dumps(item)
            self._loop.call_soon_threadsafe(self._link.send, Kind.PICKLED, payload)


class _Plain(pickle.Unpickler):
    """Numbers, strings and lists; nothing that a pickle could have called."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise WireError(f"a pickle names {module}.{name}")


def unpickle(payload: bytes) -> Any:
    return _Plain(io.BytesIO(payload)).load()


class Ring:
    """Bytes of frames in shared memory, between one writer and one reader.

    The first eight bytes count what the reader has taken; the writer counts what it has put.
    """

    def __init__(self, path: Path, creates: bool) -> None:
        if creates:
            path.write_bytes(bytes(_TAIL.size + RING))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _TAIL.size + RING)
        self._head = 0

    def put(self, kind: Kind, payload: bytes) -> bytes | None:
        """Write a payload, and return its place for `take`; None if there is no room."""
        (taken,) = _TAIL.unpack_from(self._memory)
        place = self._head % RING
        start = self._head if place + len(payload) <= RING else self._head + RING - place
        if start + len(payload) - taken > RING:
            return None
        at = _TAIL.size + start % RING
        self._memory[at : at + len(payload)] = payload
        self._head = start + len(payload)
        return _PLACE.pack(start, len(payload), kind)

    def take(self, where: bytes) -> tuple[Kind, bytes]:
        """Read the kind and the bytes of a frame, and free its room."""
        start, length, kind = _PLACE.unpack(where)
        at = _TAIL.size + start % RING
        payload = bytes(self._memory[at : at + length])
        _TAIL.pack_into(self._memory, 0, start + length)
        return Kind(kind), payload
