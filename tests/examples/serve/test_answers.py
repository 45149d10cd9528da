"""Streams of answers: what a client reads, however tokens, clients and failures come."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.features import Features
from examples.serve.front.answers import Answers
from examples.serve.front.connections import Waits, limit_waits, listen
from examples.serve.front.metrics import Metrics
from examples.serve.front.protocol import Completion
from examples.serve.front.reply import Reply
from examples.serve.front.text import Bytes, Decoder
from examples.serve.requests import End, Sampling

BAD = 13
"""A token that decoders do not know."""


class Wide(Bytes):
    """Text whose characters are tokens, each repeated."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.prompts: list[Sequence[int]] = []

    def decoder(
        self, prompt: Sequence[int] = (), special: bool = False, kept: Sequence[str] = ()
    ) -> Decoder:
        self.prompts.append(prompt)
        return WideDecoder(self._width)


class WideDecoder:
    def __init__(self, width: int) -> None:
        self._width = width

    def step(self, token: int) -> str:
        if token == BAD:
            raise RuntimeError("no such token")
        return chr(token) * self._width

    def rest(self) -> str:
        return ""


class Job:
    """An engine that says what the test has it say."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.cancelled: list[Reply] = []  # whose handlers have ended

    def submit(self, what: Completion) -> Reply:
        reply = Reply([1] * what.choices, None)
        reply.ids = list(range(what.choices))
        self.replies.append(reply)
        return reply

    def cancel(self, reply: Reply, index: int | None = None) -> None:
        if index is None:
            self.cancelled.append(reply)


def say(reply: Reply, text: str, index: int = 0) -> None:
    reply.tokens[index] += text.encode()
    reply.touch()


def end(reply: Reply, index: int = 0) -> None:
    reply.ends[index] = End(index, "length", 1)
    reply.touch()


@asynccontextmanager
async def serving(width: int = 1, **fields: Any) -> AsyncIterator[tuple[Job, int]]:
    """A server that answers each request in the same way; its engine, and its port."""
    features, job = Features(), Job()
    metrics = Metrics(features.changes)
    text = fields.pop("text", None) or Wide(width)
    answers = Answers(text, job, Waits(30.0), metrics, features)  # type: ignore[arg-type]
    usual = {"stop": (), "n": 1, "include_usage": False, "is_chat": False, "stream": True}
    fields = {"prompts": ((1,),)} | usual | fields
    what = Completion(
        **{"continues": not fields["is_chat"], **fields},
        model="fake",
        max_tokens=9,
        sampling=Sampling(),
        ignore_eos=False,
        salt=b"",
    )
    server = web.Server(lambda request: answers.answer(request, what))
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    listener = listen("127.0.0.1", 0)
    limit_waits(listener, 30.0)
    await web.SockSite(runner, listener).start()
    try:
        yield job, runner.addresses[0][1]
    finally:
        await runner.cleanup()


class Client:
    """A connection whose bytes the test reads when it wants to."""

    def __init__(self, port: int, version: str = "1.1", room: int = 1 << 16) -> None:
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        self._sock.connect(("127.0.0.1", port))
        self._sock.setblocking(False)
        self._sock.send(f"GET / HTTP/{version}\r\nHost: a\r\nConnection: close\r\n\r\n".encode())

    async def read(self, wanted: bytes | None = None) -> bytes:
        """Bytes up to these, or all."""
        loop, found = asyncio.get_running_loop(), b""
        while wanted is None or wanted not in found:
            data = await loop.sock_recv(self._sock, 1 << 16)
            if not data:
                self.close()
                break
            found += data
        return found

    def read_some(self) -> bytes:
        """Bytes that have come."""
        try:
            return self._sock.recv(1 << 16)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self._sock.close()


def body_of(answer: bytes) -> bytes:
    """What an answer holds, whose chunks have to be whole if it has them."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"chunked" not in head:
        return rest
    body = b""
    while True:
        length, _, rest = rest.partition(b"\r\n")
        size = int(length, 16)
        assert rest[size : size + 2] == b"\r\n"
        if not size:
            return body
        body, rest = body + rest[:size], rest[size + 2 :]


def texts_of(answer: bytes) -> dict[int, str]:
    """The text of each choice, whose events have to be whole; behind them is `[DONE]`."""
    *events, done, nothing = body_of(answer).split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    found: dict[int, str] = {}
    for event in events:
        for choice in json.loads(event.removeprefix(b"data: ")).get("choices", []):
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


async def begin(job: Job, client: Client) -> tuple[Reply, bytes]:
    """A reply, and what the client has read of it: all up to its first token."""
    while not job.replies:
        await asyncio.sleep(0)
    reply = job.replies.pop()
    say(reply, "<")
    return reply, await client.read(b"<")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("usage", [False, True])
def test_a_token_is_written_before_any_task_wakes_up(version: str, usage: bool) -> None:
    async def ask() -> None:
        async with serving(include_usage=usage) as (job, port):
            client = Client(port, version)
            reply, answer = await begin(job, client)
            for letter in "abc":
                say(reply, letter)
                assert not any(reply.tokens)
            end(reply)
            answer += await client.read()
            assert texts_of(answer) == {0: "<abc"}
            assert (b"chunked" in answer) == (version == "1.1")

    asyncio.run(ask())


@pytest.mark.parametrize("seed", range(4))
def test_a_client_that_reads_at_times_reads_all(seed: int) -> None:
    """Some pieces are written at once, and some by the task, which waits for the client."""
    draw = random.Random(seed)

    async def ask() -> None:
        async with serving(n=2, width=1000) as (job, port):
            client = Client(port, room=1 << 17)
            reply, answer = await begin(job, client)
            wanted, waited = {0: "<" * 1000, 1: ""}, 0
            for _ in range(1000):
                index, letter = draw.randrange(2), draw.choice("abcd")
                wanted[index] += letter * 1000
                say(reply, letter, index)
                waited += any(reply.tokens)
                if draw.random() < 0.3:
                    await asyncio.sleep(0)
                if draw.random() < 0.01:
                    answer += client.read_some()
            assert 0 < waited < 1000
            end(reply, 0)
            end(reply, 1)
            assert texts_of(answer + await client.read()) == wanted

    asyncio.run(ask())


def test_a_failure_ends_its_stream_and_no_other() -> None:
    async def ask() -> None:
        async with serving() as (job, port):
            failing = Client(port)
            bad, broken = await begin(job, failing)
            lasting = Client(port)
            good, whole = await begin(job, lasting)
            for reply in (bad, good):
                say(reply, chr(BAD) if reply is bad else "a")
            say(good, "b")
            say(bad, "never shown")
            end(good)
            assert texts_of(whole + await lasting.read()) == {0: "<ab"}
            first, error, done, _ = body_of(broken + await failing.read()).split(b"\n\n")
            assert b'"text":"<"' in first
            assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "RuntimeError"
            assert done == b"data: [DONE]"

    asyncio.run(ask())


def test_a_stop_string_ends_a_stream() -> None:
    async def ask() -> None:
        async with serving(n=2, stop=("stop",)) as (job, port):
            client = Client(port)
            reply, answer = await begin(job, client)
            said = ((0, "a st"), (1, "b"), (0, "op it"), (0, "never shown"), (1, "stop"))
            for index, text in said:
                say(reply, text, index)
            answer += await client.read()
            assert texts_of(answer) == {0: "<a ", 1: "b"}
            assert answer.count(b'"finish_reason":"stop"') == 2

    asyncio.run(ask())


def test_a_client_that_has_gone_ends_its_stream() -> None:
    async def ask() -> None:
        async with serving() as (job, port):
            client = Client(port)
            reply, _ = await begin(job, client)
            client.close()
            while job.cancelled != [reply]:
                say(reply, "a")
                await asyncio.sleep(0)

    asyncio.run(ask())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("is_chat", "n"), [(True, 1), (False, 2)])
def test_a_completion_goes_on_with_its_prompt(stream: bool, is_chat: bool, n: int) -> None:
    """Each choice has that of its own; a chat's answer begins a text."""
    text = Wide(1)
    prompts = ((1,),) if is_chat else ((1, 2), (3,))
    fields = {"stream": stream, "is_chat": is_chat, "n": n, "prompts": prompts, "text": text}

    async def go() -> None:
        async with serving(**fields) as (job, port):
            client = Client(port)
            while not job.replies:
                await asyncio.sleep(0)
            for index in range(len(prompts) * n):
                end(job.replies[0], index)
            assert b"200 OK" in await client.read()

    asyncio.run(go())
    assert text.prompts == ([()] if is_chat else [(1, 2), (1, 2), (3,), (3,)])
