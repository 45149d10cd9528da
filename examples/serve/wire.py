"""Frames between the front and rank 0, over a Unix socket: a length, a kind, and flat numbers.

    front to rank 0     ADD: requests             CANCEL: their ids
    rank 0 to front     HELLO: limits, process    EVENTS: what has happened    STATS: counts, a beat
                        VECTORS: of texts, where the model pools; the ends of their requests follow

Nothing that is received is ever executed, and no frame is longer than `MOST`. PICKLED and RING are
of `transports.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from enum import IntEnum
from typing import Any, cast

from .features import Features
from .requests import Adjustments, End, Events, Limits, Request, Sampling, Scores


class Kind(IntEnum):
    HELLO = 1
    ADD = 2
    CANCEL = 3
    EVENTS = 4
    OBJECTS = 5
    STATS = 6
    PICKLED = 7
    RING = 8
    VECTORS = 9


MOST = 1 << 26
"""The most bytes of a frame; a sender splits more than `CUT` bytes into several frames."""
CUT = 1 << 20
_KINDS = {kind.value: kind for kind in Kind}
_HEAD = struct.Struct("<IB")
_REQUEST = struct.Struct("<IIfIfQbb?HIHIIII")
_VECTOR = struct.Struct("<II")
_EVENTS = struct.Struct("<II")


class WireError(ValueError):
    """A frame that is not valid."""


class Link(asyncio.Protocol):
    """One end of the socket.

    Args:
        on_frame: called with the kind and the bytes of each frame.
        on_end: called once, when the other side has gone.
        on_room: called when there is room for more frames again, after `is_full`.
        on_read: called behind the frames that have come together.
    """

    def __init__(
        self,
        on_frame: Callable[[Link, Kind, bytes], None],
        on_end: Callable[[Link], None],
        on_room: Callable[[], None] = lambda: None,
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_frame, self._on_end = on_frame, on_end
        self._on_room, self._on_read = on_room, on_read
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.is_full = False  # the other side does not read: keep what can be kept
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=CUT)

    def send(self, kind: Kind, payload: bytes) -> None:
        """Send a frame; a link that is closed drops it."""
        if self._transport is None or self.is_closed:
            return
        self._transport.write(_HEAD.pack(len(payload), kind) + payload)

    def pause(self, paused: bool) -> None:
        """Stop reading, or start again; the other side's `is_full` follows."""
        if self._transport is None or self.is_closed:
            return
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        """Send what is left, and end."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._buffer, at)
            if length > MOST or kind not in _KINDS:
                self._end(abort=True)
                return
            end = at + _HEAD.size + length
            if len(self._buffer) < end:
                break
            self._on_frame(self, _KINDS[kind], bytes(self._buffer[at + _HEAD.size : end]))
            at = end
        del self._buffer[:at]
        self._on_read()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._on_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(abort=False)

    def _end(self, abort: bool) -> None:
        if abort and self._transport is not None:
            self._transport.abort()
        if not self.is_closed:
            self.is_closed = True
            self._on_end(self)


# -- what frames hold ------------------------------------------------------------------------------


def pack_hello(limits: Limits) -> bytes:
    return json.dumps([asdict(limits), os.getpid()]).encode()


def unpack_hello(payload: bytes) -> tuple[Limits, int]:
    """The engine's limits, and the number of rank 0's process."""
    limits, process = json.loads(payload)
    listed = {name: tuple(limits[name]) for name in ("eos", "lengths")}
    return Limits(**{**limits, **listed}), process


def pack_requests(requests: Iterable[Request]) -> Iterable[bytes]:
    """The contents of frames; a frame ends with the request that brings it to `CUT` bytes."""
    parts: list[bytes] = []
    size = 0
    for request in requests:
        how, grammar = request.sampling, request.grammar.encode()
        adjustments = b"" if how.adjustments is None else pack_adjustments(how.adjustments)
        head = _REQUEST.pack(
            *(request.id, request.max_tokens, how.temperature, how.top_k, how.top_p, how.seed),
            *map(_count, (how.logprobs, request.prompt_logprobs)),
            *(request.ignore_eos, request.adapter, request.second),
            *(len(request.salt), len(adjustments), len(grammar)),
            *(len(request.stops), len(request.prompt)),
        )
        ids = array("I", request.stops + request.prompt)
        parts.append(head + request.salt + adjustments + grammar + ids.tobytes())
        size += len(parts[-1])
        if size >= CUT:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


def unpack_requests(payload: bytes) -> list[Request]:
    """Read the requests of a frame.

    Raises:
        WireError: the bytes are no requests.
    """
    requests, at = [], 0
    try:
        while at < len(payload):
            head = _REQUEST.unpack_from(payload, at)
            id_, most, *how, ranked, asked, ignores, adapter, second = head[:-5]
            salted, adjusted, ruled, ends, length = head[-5:]
            at += _REQUEST.size
            salt, at = payload[at : at + salted], at + salted
            changes, at = payload[at : at + adjusted], at + adjusted
            grammar, at = payload[at : at + ruled].decode(), at + ruled
            size = 4 * (ends + length)
            if len(payload) - at < size:
                raise WireError("a request is cut off")
            ids, at = tuple(numbers(payload[at : at + size])), at + size
            adjustments = unpack_adjustments(changes) if changes else None
            sampling = Sampling(*how, _none(ranked), adjustments)
            more = ignores, ids[:ends], _none(asked), salt, grammar, adapter, second
            requests.append(Request(id_, ids[ends:], most, sampling, *more))
    except (struct.error, ValueError) as error:
        raise WireError(f"no requests: {error}") from None
    return requests


def _count(number: int | None) -> int:
    return -1 if number is None else number


def _none(number: int) -> int | None:
    return None if number < 0 else number


def pack_adjustments(adjustments: Adjustments) -> bytes:
    """Adjustments as JSON: they are rare, and of any length."""
    return json.dumps(asdict(adjustments)).encode()


def unpack_adjustments(payload: bytes) -> Adjustments:
    """Read adjustments.

    Raises:
        ValueError: the bytes are none.
    """
    try:
        return Adjustments(**{name: _frozen(value) for name, value in json.loads(payload).items()})
    except (AttributeError, TypeError) as error:
        raise WireError(f"no adjustments: {error}") from None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def pack_events(events: Events, is_flat: bool = True) -> bytes:
    """Events as arrays of numbers, rare ones as JSON; for an ablation an object for each token."""
    rest = _rare(events)
    if not is_flat:
        pairs = zip(events.pairs[::2], events.pairs[1::2], strict=True)
        objects = [{"id": id_, "token": token} for id_, token in pairs]
        return json.dumps([list(events.started), objects, *rest]).encode()
    tail = json.dumps(rest).encode() if any(rest) else b""
    head = _EVENTS.pack(len(events.started), len(events.pairs))
    return head + events.started.tobytes() + events.pairs.tobytes() + tail


def unpack_events(kind: Kind, payload: bytes) -> Events:
    if kind is Kind.OBJECTS:
        started_ids, objects, *rest = json.loads(payload)
        return events_of(started_ids, [n for event in objects for n in event.values()], *rest)
    started, length = _EVENTS.unpack_from(payload)
    middle = _EVENTS.size + 4 * started
    end = middle + 4 * length
    rest = json.loads(payload[end:]) if len(payload) > end else ((), (), ())
    return events_of(numbers(payload[_EVENTS.size : middle]), numbers(payload[middle:end]), *rest)


def plain(events: Events) -> list[list[Any]]:
    """Events as lists of numbers and strings; `events_of` reads them."""
    return [list(events.started), list(events.pairs), *_rare(events)]


def _rare(events: Events) -> list[list[Any]]:
    return [
        [[end.id, end.reason, end.count, end.message, end.token] for end in events.ends],
        [[id_, scores.drawn, scores.likeliest] for id_, scores in events.scores],
        [[id_, scores.drawn, scores.likeliest, scores.rank] for id_, scores in events.prompts],
    ]


def events_of(
    started: Iterable[int],
    pairs: Iterable[int],
    ends: Iterable[Any],
    scores: Iterable[Any],
    prompts: Iterable[Any],
) -> Events:
    return Events(
        array("I", started),
        array("I", pairs),
        [End(*end) for end in ends],
        [(id_, Scores(own, tuple(map(tuple, top)))) for id_, own, top in scores],
        [(id_, Scores(own, tuple(map(tuple, top)), rank)) for id_, own, top, rank in prompts],
    )


def pack_vector(id_: int, values: bytes) -> bytes:
    """The vector of a request, for a frame of them.

    Args:
        values: float32, as the machine has them.
    """
    return _VECTOR.pack(id_, len(values)) + values


def unpack_vectors(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """The vectors of a frame, with the ids of their requests."""
    at = 0
    while at < len(payload):
        id_, length = _VECTOR.unpack_from(payload, at)
        at += _VECTOR.size + length
        yield id_, payload[at - length : at]


def numbers(payload: bytes) -> array[int]:
    values = array("I")
    values.frombytes(payload)
    return values


def pack_ids(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def send_requests(link: Link, requests: Sequence[Request], features: Features) -> None:
    """Send requests in as few frames as possible; for an ablation, in a frame for each."""
    if features.batch_send:
        for payload in pack_requests(requests):
            link.send(Kind.ADD, payload)
        return
    features.changes["batch_send"] += len(requests) - 1
    for request in requests:
        for payload in pack_requests([request]):
            link.send(Kind.ADD, payload)
