"""Sockets of clients: where to listen, how many there may be, and how long they may not read."""

from __future__ import annotations

import asyncio
import resource
import socket

from aiohttp import web

from .protocol import ApiError

SEND_BUFFER = 1 << 16
"""Bytes that the system keeps for a client that does not read; it may double them."""
SPARE_FILES = 64
"""Descriptors that are not for connections."""


class Refusal(asyncio.Protocol):
    """Answers a connection beyond the bound, and closes it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        body = web.json_response(ApiError(429, "too many connections; try again later").body()).text
        assert body is not None
        head = "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        transport.write((head + body).encode())
        transport.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to, before anything else is started.

    Raises:
        OSError: the port is taken, or not ours to take.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def most_connections(asked: int) -> int:
    """As many as asked, or as this process may open files for; its own limit is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(asked, max(1, hard - SPARE_FILES))


def limit_waits(listener: socket.socket, stall: float) -> None:
    """Bound what the system keeps for a client that does not read, in bytes and in seconds.

    Connections inherit it. It is for what a handler has written and left behind; nobody else waits
    for that.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall * 1000))
