"""Sockets of clients: where to listen, how many there may be, and how long they may not read."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from time import monotonic

from aiohttp import hdrs, web

from .errors import ApiError

log = logging.getLogger("serve")

SEND_BUFFER = 1 << 16
"""Bytes that the system keeps for a client that does not read; it may double them."""
SPARE_FILES = 64
"""Descriptors that are not for connections that are let in."""
LINGER = 1.0
"""Seconds for a client that is refused to take its answer."""


class Gate:
    """Lets new connections in, up to a bound, and answers those beyond it.

    Args:
        server: makes the protocol of a connection that is let in.
        most: connections; fewer if this process may not open so many files.
    """

    def __init__(self, server: web.Server, most: int) -> None:
        files = most_files()
        self._server = server
        self._most = min(most, max(1, files - SPARE_FILES))
        # Refusals that linger may have the remaining files, except those for the process itself.
        self._lingering: set[Refusal] = set()
        self._most_lingering = files - self._most - SPARE_FILES // 2
        self._arriving = 0

    def connect(self) -> asyncio.Protocol:
        """Make the protocol of a new connection: the server's, or a refusal of one too many."""
        if len(self._server.connections) + self._arriving >= self._most:
            return Refusal(self._lingering, self._most_lingering)
        # The server counts a connection in the next turn of the loop, which may accept more first.
        # `_arrive` runs just before it does, so none is counted twice or left out in between.
        self._arriving += 1
        asyncio.get_running_loop().call_soon(self._arrive)
        return self._server()

    def _arrive(self) -> None:
        self._arriving -= 1


class Refusal(asyncio.Protocol):
    """Answers a connection beyond the bound, and closes it once the client has, or after a moment.

    A connection that is closed while bytes of its client are unread is reset, and the reset may
    overtake the answer. So the client's bytes are read, and dropped.

    Args:
        lingering: the refusals that wait for their clients.
        most: the most refusals that wait; one more is closed at once.
    """

    def __init__(self, lingering: set[Refusal], most: int) -> None:
        self._lingering, self._most = lingering, most
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        body = web.json_response(ApiError(429, "too many connections; try again later").body()).text
        assert body is not None
        head = "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        transport.write((head + body).encode())
        if len(self._lingering) >= self._most:
            transport.close()
            return
        self._lingering.add(self)
        transport.write_eof()
        # Not abort(), which resets, and a client that is slow to read would lose the answer.
        self._timer = asyncio.get_running_loop().call_later(LINGER, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lingering.discard(self)
        if self._timer is not None:
            self._timer.cancel()


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to, before anything else is started.

    Raises:
        OSError: there is no such host, or the port is taken, or not ours to take.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(f"{error.strerror}: give another --host or --port") from None


def most_files() -> int:
    """How many files this process may open; its own limit is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def limit_waits(listener: socket.socket, stall: float) -> None:
    """Bound what the system keeps for a client that does not read, in bytes and in seconds.

    Connections inherit the bound. It is for data that a handler has written and left behind, since
    nobody else waits for that.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall * 1000))


class Waits:
    """The writes that wait for their readers, and since when.

    A timeout of asyncio for each chunk would add a tenth to its cost. This class checks all writes
    from time to time.

    Args:
        stall: seconds after which a client that does not read is cut off.
    """

    def __init__(self, stall: float) -> None:
        self._stall = stall
        self._since: dict[asyncio.Transport, float] = {}

    def begin(self, transport: asyncio.Transport) -> None:
        """Record the start of a write."""
        self._since[transport] = monotonic()

    def end(self, transport: asyncio.Transport) -> None:
        """Record the end of the write, done or not."""
        del self._since[transport]

    async def cut_off(self) -> None:
        """Close connections whose clients have not read for too long, until it is cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._stall / 4))
            oldest = monotonic() - self._stall
            for transport in [stalled for stalled, began in self._since.items() if began < oldest]:
                log.warning("a client has not read for %g s, and is cut off", self._stall)
                transport.abort()


class Stream:
    """Writes a response whose head has been prepared, piece by piece.

    Args:
        transport: of the request.
        waits: knows of writes that wait for the client.
    """

    def __init__(
        self, response: web.StreamResponse, transport: asyncio.Transport, waits: Waits
    ) -> None:
        self._response, self._transport, self._waits = response, transport, waits
        # Chunks of HTTP/1.1; a client of HTTP/1.0 reads until the connection ends.
        self._is_chunked = response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"

    async def write(self, data: bytes) -> None:
        """Write a piece, once the client has read enough of those before.

        Raises:
            ConnectionError: the client has gone.
        """
        self._waits.begin(self._transport)
        try:
            await self._response.write(data)
        finally:
            self._waits.end(self._transport)

    @property
    def is_ready(self) -> bool:
        """True if the client is there, and the system has taken all that was written."""
        return not (self._transport.is_closing() or self._transport.get_write_buffer_size())

    def write_at_once(self, data: bytes) -> None:
        """Write a piece behind the first, without a wait; for a stream that is ready."""
        if data:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
