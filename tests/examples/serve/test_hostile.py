"""Clients that mean harm, or are broken: what they get, and that nobody else is hurt.

During every test somebody else is served by the shared server, and afterwards its requests, blocks,
files and memory are as they were (`attacked`). What stands in quotation marks in a docstring is a
line of the guide's tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.front.admission import Bounds
from examples.serve.front.text import Bytes

from .fake_engine import ROOMY, reference
from .servers import PATIENCE, Server, read_all, serving

MEBIBYTE = 1 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def attacked(clean: Server) -> Iterator[Server]:
    """The shared server; whoever else asks it meanwhile gets the right text, each time."""
    memory = clean.memory()
    wanted = Bytes().decode(reference(b"others", 8, ROOMY))
    ended = threading.Event()

    def others() -> int:
        served = 0
        while not ended.wait(0.05) or not served:
            found, body = clean.complete("others", 8)
            assert (found, body["choices"][0]["text"]) == (200, wanted)
            served += 1
        return served

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(others)
        try:
            yield clean
        finally:
            ended.set()
        assert served.result() > 0
    assert clean.memory() < memory + 32 * MEBIBYTE


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def ask(server: Server, data: bytes) -> bytes:
    """Send bytes as they are, and read all that comes."""
    sock = server.connect()
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)
    return read_all(sock)


# -- slow ones --------------------------------------------------------------------------------


def test_nothing_is_sent(attacked: Server) -> None:
    """ "Nothing sent"."""
    assert Bounds().idle <= 15
    assert Bounds().read <= 15
    assert status(read_all(attacked.connect())) in (0, 408)


def test_headers_come_a_byte_at_a_time(attacked: Server) -> None:
    """ "Headers a byte at a time": however often one comes, the connection is closed."""
    sock = attacked.connect()
    sent = 0
    sock.settimeout(0.05)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            sock.send(HEAD[sent : sent + 1] if sent < len(HEAD) else b"X-A: b\r\n")
            sent += 1
            if sock.recv(1000) == b"":
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    else:
        raise AssertionError("it is open still")
    sock.close()


def test_a_body_stalls(attacked: Server) -> None:
    """ "A body that stalls"."""
    answer = ask(attacked, HEAD + b"Content-Length: 100\r\n\r\n{")
    assert status(answer) == 408
    assert b'"timeout_error"' in answer


# -- large ones -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head", [b"X-Long: " + b"a" * 9000 + b"\r\n", b"".join(b"X-%d: a\r\n" % i for i in range(200))]
)
def test_large_headers(attacked: Server, head: bytes) -> None:
    """ "A header of more than 8 KiB", "more than 128 headers"."""
    before = attacked.memory()
    for _ in range(20):
        assert status(ask(attacked, HEAD + head + b"\r\n")) == 400
    assert attacked.memory() < before + 8 * MEBIBYTE


def test_endless_headers(attacked: Server) -> None:
    """They are cut off long before they end."""
    sock = attacked.connect()
    before = attacked.memory()
    sent = 0
    with contextlib.suppress(ConnectionError):
        sock.sendall(HEAD + b"X-Long: ")
        for _ in range(1000):
            sock.sendall(b"a" * MEBIBYTE)
            sent += 1
    sock.close()
    assert sent < 1000
    assert attacked.memory() < before + 8 * MEBIBYTE


def test_a_large_body(attacked: Server) -> None:
    """ "A body of 2 MiB"."""
    answer = ask(
        attacked, HEAD + b"Content-Length: %d\r\n\r\n" % (2 * MEBIBYTE) + b" " * 2 * MEBIBYTE
    )
    assert status(answer) == 413


def test_an_endless_body(attacked: Server) -> None:
    """ "A gibibyte in chunks" takes no memory: what comes behind the first mebibyte is dropped."""
    sock = attacked.connect()
    before = attacked.memory()
    sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n" % MEBIBYTE + b" " * MEBIBYTE + b"\r\n"
    with contextlib.suppress(ConnectionError):
        for _ in range(1024):
            sock.sendall(chunk)
    sock.close()
    assert attacked.memory() < before + 16 * MEBIBYTE


def test_the_answer_to_an_endless_body(attacked: Server) -> None:
    chunk = b"%x\r\n" % (MEBIBYTE + 1) + b" " * (MEBIBYTE + 1) + b"\r\n"
    assert status(ask(attacked, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)) == 413


def test_a_small_body_that_unpacks_to_a_gibibyte(attacked: Server) -> None:
    """ "A mebibyte that unpacks to a gibibyte"."""
    before = attacked.memory()
    part = gzip.compress(b" " * (1 << 26), 9)
    packed = part * 16  # gzip is concatenated as it is
    head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    assert status(ask(attacked, head + packed)) == 413
    assert attacked.memory() < before + 32 * MEBIBYTE


# -- bodies that are none ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'),
        *(b'{"prompt": NaN}', b"[" * 200_000),
        *(b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": -Infinity}'),
        *(b'{"a":' * 100_000, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}"),
        *(b'{"prompt": "x", "stop": "\\udfff"}', b'{"prompt": "x", "user": "\\ud800"}'),
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_bodies_that_are_no_requests(attacked: Server, body: bytes, path: str) -> None:
    """ "Invalid UTF-8", "half a character", "200,000 brackets", "NaN"."""
    found, error = attacked.get(path, body)
    assert found == 400, error
    assert error["error"]["type"] == "invalid_request_error"


def test_a_nul_is_a_character(attacked: Server) -> None:
    """ "A NUL" is served."""
    found, body = attacked.complete("a\0b", 3)
    assert found == 200
    assert body["usage"]["prompt_tokens"] == 3


STRANGE = [10**9, -1, 1.5, "3", True, None, [], {}]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *[("completions", name) for name in ("n", "max_tokens", "stop", "seed", "logprobs")],
        *[("chat/completions", name) for name in ("top_logprobs", "max_completion_tokens")],
        *[("chat/completions", name) for name in ("logprobs", "messages", "tools")],
        *[("completions", name) for name in ("top_k", "top_p", "temperature", "stream", "echo")],
        *[("completions", name) for name in ("stream_options", "ignore_eos", "cache_salt")],
        *[("completions", name) for name in ("presence_penalty", "best_of", "response_format")],
        *[("completions", name) for name in ("logit_bias", "user", "model")],
    ],
)
def test_strange_values(attacked: Server, path: str, name: str) -> None:
    """ "Numbers out of range, and values of another type": 400, or what the default gives.

    Never another status, and never a hang.
    """
    messages = [{"role": "user", "content": "x"}]
    base = {"prompt": "x"} if path == "completions" else {"messages": messages}
    if name == "top_logprobs":
        base["logprobs"] = True
    for value in STRANGE:
        body = {**base, "max_tokens": 2, name: value}
        found, answer = attacked.get(f"/v1/{path}", body)
        if value is None:
            assert found == (400 if name == "messages" else 200)
        assert found in ((400, 404) if name == "model" and value == "3" else (200, 400)), answer
        if found == 400:
            assert answer["error"]["param"] in (name, "best_of")
        if name in {"n", "max_tokens", "max_completion_tokens", "seed", "top_k"}:
            assert (found == 400) == (type(value) is not int and value is not None) or value in (
                10**9,
                -1,
            )


def test_a_number_beyond_floats(attacked: Server) -> None:
    """ "1e999"."""
    for field in ("temperature", "top_p", "presence_penalty"):
        body = b'{"prompt": "x", "%s": 1e999}' % field.encode()
        assert attacked.get("/v1/completions", body)[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/v1/completions", {"prompt": "x", "model": "no"}, 404),
        ("/v1/nothing", {"prompt": "x"}, 404),
        ("/v1/models", {"prompt": "x"}, 405),
        ("/../../etc/passwd", None, 404),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/completions", {"prompt": [[]]}, 400),
        ("/v1/completions", {"prompt": [1, "x"]}, 400),
        ("/v1/completions", {"prompt": ["x", 1]}, 400),
        ("/v1/completions", {"prompt": [256]}, 400),
        ("/v1/completions", {"prompt": [-1]}, 400),
        ("/v1/completions", {"prompt": [True]}, 400),
        ("/v1/completions", {"prompt": [1] * 600}, 400),
        ("/v1/completions", {"prompt": "x" * 600}, 400),
        ("/v1/completions", {"prompt": ["x"] * 9}, 400),
        ("/v1/completions", {"prompt": ["x"] * 3, "n": 8}, 400),
        ("/v1/completions", {}, 400),
        ("/v1/completions", {"prompt": "x", "stop": ["a"] * 5}, 400),
        ("/v1/completions", {"prompt": "x", "stop": [""]}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": ["x"]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": 1, "content": "x"}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": [], "content": "x"}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "tools", "content": "x"}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user<|im_end|>", "content": "x"}]}, 400),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
            400,
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}, 400),
    ],
)
def test_requests_for_what_there_is_not(
    attacked: Server, path: str, body: Any, wanted: int
) -> None:
    """ "An unknown model", "a wrong path", "a wrong method", "no tokens at all", "a token beyond
    the vocabulary", "more tokens than the context", "names of special tokens in a role".
    """
    found, answer = attacked.get(path, body)
    assert found == wanted, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        ("/v1/completions", "prompt", "a text, a list of token ids, or a list of these"),
        ("/v1/chat/completions", "messages", "a list of them"),
        ("/tokenize", "prompt", "a text, or messages"),
        ("/detokenize", "tokens", "a list of token ids"),
    ],
)
@pytest.mark.parametrize("body", [{}, {"prompt": None, "messages": None, "tokens": None}])
def test_a_field_that_is_missing_is_named(
    attacked: Server, path: str, name: str, kind: str, body: Any
) -> None:
    if path == "/tokenize" and "messages" in body:
        body = {"prompt": None}
    found, answer = attacked.get(path, body)
    assert found == 400
    error = answer["error"]
    assert (error["message"], error["param"]) == (f"{name} is missing: give {kind}", name)


def test_bytes_that_are_no_http(attacked: Server) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"\0" * 1000):
        assert status(ask(attacked, data + b"\r\n\r\n")) in (0, 400)
    smuggled = HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert status(ask(attacked, smuggled)) == 400


# -- those that go away -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server whose engine takes its time, so that clients can leave in the middle."""
    with serving(
        tmp_path_factory.mktemp("slow"), delay=0.01, limits={"slots": 2, "groups": 1}
    ) as it:
        yield it


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["headers", "queue", "prefill", "first", "last", "half"])
def test_clients_that_leave(slow: Server, when: str, stream: bool) -> None:
    """ "Leaving before the headers", "in the queue", "in prefill", "at the first token", "at the
    last token", "half-closing": what they held is free, and whoever stays gets all of its text.
    """
    slow.wait_for(slow.is_empty)
    files = slow.files()
    stays = slow.post({"prompt": "stay", "max_tokens": 60, "temperature": 0})
    others = []
    if when == "queue":  # behind those that have all seats
        others = [slow.post({"prompt": [i], "max_tokens": 400}) for i in range(2)]
        slow.wait_for(lambda: slow.metric("num_requests_running") == 2)
    if when == "headers":
        leaves = slow.connect()
        leaves.sendall(HEAD)
    else:
        length = 480 if when == "prefill" else 3
        leaves = slow.post({"prompt": [3] * length, "max_tokens": 30, "stream": stream})
        if when == "queue":
            slow.wait_for(lambda: slow.metric("num_requests_waiting") >= 1)
        elif stream and when != "prefill":
            leaves.recv(10)
        found = b""
        while when == "last" and b'"length"' not in found:
            found += leaves.recv(1 << 16)
    if when == "half":
        leaves.shutdown(socket.SHUT_WR)
        read_all(leaves)
    else:
        leaves.close()
    for other in others:
        other.close()
    answer = stays.recv(1 << 16)
    while b"usage" not in answer:
        answer += stays.recv(1 << 16)
    stays.close()
    text = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
    assert text == Bytes().decode(reference(b"stay", 60, ROOMY))
    slow.wait_for(slow.is_empty, "an empty engine")
    slow.wait_for(lambda: slow.files() <= files, "as few files as before")


@pytest.mark.parametrize(
    "number", [30, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_readers_that_never_read(tmp_path: Path, number: int) -> None:
    """ "500 readers that never read": text is merged, they are cut off, and others go on."""
    assert Bounds().stall <= 60
    bounds = {"stall": 1.0, "requests": 2000, "tokens": 1 << 30}
    limits = {"slots": 128, "context": 4096, "blocks": 65537, "groups": 1}
    with serving(tmp_path, bounds=bounds, limits=limits) as own:
        files, before = own.files(), own.memory()
        readers = []
        for i in range(number):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(PATIENCE)
            sock.connect(("127.0.0.1", own.port))
            body = {"prompt": [i % 200, i // 200], "max_tokens": 4000, "stream": True}
            readers.append(own.post(body, sock=sock))
        found, body = own.complete("others", 50)
        assert found == 200
        assert body["choices"][0]["text"] == Bytes().decode(reference(b"others", 50, ROOMY))
        own.wait_for(own.is_empty, "an end of all requests")
        own.wait_for(lambda: own.files() <= files + 1, "an end of their connections")
        assert own.memory() < before + number * MEBIBYTE + 16 * MEBIBYTE
        assert own.metric('request_success_total{finished_reason="length"}') == 1
        for sock in readers:
            sock.close()


# -- too many ---------------------------------------------------------------------------------


def burst(server: Server, number: int) -> list[int]:
    """So many requests at once, each over a connection of its own; their statuses."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    assert number + 200 < most, "this process may not open so many files: raise ulimit -n"
    connected = asyncio.Semaphore(0)
    all_are = asyncio.Event()

    async def one(i: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        connected.release()
        await all_are.wait()
        data = json.dumps({"prompt": [i % 250, i // 250 % 250], "max_tokens": 4}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert status(answer) == 200 or b"Retry-After: 1" in answer
        length = int(answer.lower().partition(b"content-length:")[2].split()[0])
        await reader.readexactly(length)
        writer.close()
        return status(answer)

    async def everyone() -> list[int]:
        requests = [asyncio.ensure_future(one(i)) for i in range(number)]
        for _ in requests:
            await connected.acquire()
        all_are.set()
        return await asyncio.gather(*requests)

    return asyncio.run(everyone())


@pytest.mark.parametrize(
    "number", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_many_requests_at_once(tmp_path: Path, number: int) -> None:
    """ "10,000 requests at once": some are told to come again, none fails, all that are taken end.

    Each has a connection, and sends when all are connected. Those beyond the bound on connections
    are answered, too.
    """
    bounds = {"requests": 40, "connections": number * 2 // 5, "idle": 60.0}
    with serving(tmp_path, bounds=bounds) as own:
        files, before = own.files(), own.memory()
        found = burst(own, number)
        assert set(found) == {200, 429}
        own.wait_for(own.is_empty)
        assert own.metric("request_success_total") == found.count(200)
        own.wait_for(lambda: own.files() <= files + 1, "as few files as before")
        assert own.memory() < before + 64 * MEBIBYTE
        assert own.complete("after", 4)[0] == 200


def test_more_connections_than_there_may_be(tmp_path: Path) -> None:
    """ "1,000 open connections": more are told to come again, and closed ones make room."""
    with serving(tmp_path, bounds={"connections": 1000, "idle": 60.0}) as own:
        files, before = own.files(), own.memory()
        held = [own.connect() for _ in range(1000)]
        # A client that the system keeps from reading for long may find a reset in place of it; one
        # that was let in would be waited for until the patience ends.
        for _ in range(10):
            own.wait_for(lambda: b"Retry-After" in read_all(own.connect()), "a refusal")
        # What a client sends may come after the server's patience, and is answered by a reset then.
        own.wait_for(lambda: status(ask(own, HEAD)) == 429)
        body = {"prompt": "x", "max_tokens": 2}
        answers = [own.post(body, sock=sock).recv(1 << 16) for sock in held[::100]]
        assert [status(answer) for answer in answers] == [200] * 10
        for sock in held:
            sock.close()
        own.wait_for(own.is_ready)
        own.wait_for(lambda: own.files() <= files + 1, "as few files as before")
        assert own.memory() < before + 32 * MEBIBYTE


def test_fewer_files_than_connections(tmp_path: Path) -> None:
    """ "More connections than files": they wait, or are told to come again; the server stays."""
    with serving(tmp_path, files=160) as own:
        socks = []
        for _ in range(300):
            sock = own.connect()
            socks.append(sock)
        for sock in socks:
            sock.close()
        own.wait_for(own.is_ready)
        assert own.complete("after", 4)[0] == 200


def test_pipelined_requests(attacked: Server) -> None:
    """ "Pipelined requests" are answered in order, and are not kept in memory for ever."""
    one = b'{"prompt": "x", "max_tokens": 1, "temperature": 0}'
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(one) + one
    before = attacked.memory()
    sock = attacked.connect()
    sock.sendall(request * 100 + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert read_all(sock).count(b"HTTP/1.1 200 OK") == 101
    assert attacked.memory() < before + 16 * MEBIBYTE


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ([1, 256], "the token id 256"),
        ([[1], [-1]], "the token id -1"),
        ([10**4000], f"the token id {10**4000}"[:60]),
        ([1, "x"], "something that is no token id"),
    ],
)
def test_a_token_beyond_the_vocabulary_is_named(
    prompt: list[Any], what: str, attacked: Server
) -> None:
    found, answer = attacked.get("/v1/completions", {"prompt": prompt})
    wanted = "the model's embedding has 256 rows, for token ids 0 to 255"
    assert (found, answer["error"]["message"]) == (400, f"prompt has {what}, and {wanted}")
