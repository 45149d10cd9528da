"""Starts servers with the fake engine, asks them, and looks at what they hold."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("fake_server.py")
PATIENCE = 60.0
"""Seconds for what should take none, on a machine whose cores are busy."""


class Server:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def get(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        """The status and the body, of JSON if it is; POST if there is something to send."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url(path), data, headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()

    def complete(self, prompt: Any, number: int = 8, **more: Any) -> tuple[int, Any]:
        body = {"prompt": prompt, "max_tokens": number, "temperature": 0, **more}
        return self.get("/v1/completions", body)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def post(
        self, body: Any, path: str = "/v1/completions", sock: socket.socket | None = None
    ) -> socket.socket:
        """Send a request over a socket of its own, and read nothing."""
        sock = sock or self.connect()
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        return sock

    def metric(self, name: str) -> float:
        """A value of /metrics, all labels together."""
        _, text = self.get("/metrics")
        rows = [line.split() for line in text.splitlines() if line.startswith(f"cg:{name}")]
        return sum(float(row[-1]) for row in rows)

    def wait_for(
        self, right: Callable[[], bool], what: str = "it", seconds: float = PATIENCE
    ) -> None:
        """Wait until something holds."""
        end = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, f"the server has ended; the log:\n{self.text()}"
            if right():
                return
            assert time.monotonic() < end, f"{what} has not happened; the log:\n{self.text()}"
            time.sleep(0.02)

    def is_ready(self) -> bool:
        try:
            return self.get("/ready")[0] == 200
        except urllib.error.URLError:
            return False

    def is_empty(self) -> bool:
        """True if no request and no block is held, in the front and in the engine.

        A front that refuses connections still holds those of which it has not seen the end.
        """
        return self.get("/metrics")[0] == 200 and not any(
            self.metric(name)
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        )

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory(self) -> int:
        """Resident bytes of the front."""
        return resident(self.process.pid)

    def children(self) -> list[int]:
        return children(self.process.pid)

    def text(self) -> str:
        return self.log.read_text()

    def end(self, signal_: int = signal.SIGTERM) -> int:
        """Stop it and wait; returns its exit code."""
        self.process.send_signal(signal_)
        return self.process.wait(PATIENCE)


@contextmanager
def serving(
    folder: Path, waits: bool = True, files: int | None = None, **options: Any
) -> Iterator[Server]:
    """A server; afterwards neither it nor its engine is left.

    Args:
        waits: until the engine is ready.
        files: that it may open, at most.
        options: of `fake_server.py` and `fake_rank.py`.
    """
    log = folder / f"server-{time.monotonic_ns()}.log"
    with log.open("w") as file:
        line = [sys.executable, str(PROGRAM), json.dumps(options)]
        if files is not None:
            line = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "limited", *line]
        process = subprocess.Popen(
            line,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": f"{ROOT}:{ROOT}/examples"},
        )
    assert process.stdout is not None
    with process.stdout:
        port = int(process.stdout.readline())
        server = Server(process, port, log)
        try:
            if waits:
                server.wait_for(server.is_ready, "a ready engine")
            yield server
        finally:
            if process.poll() is None:
                children = server.children()
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    raise
                assert not [pid for pid in children if is_alive(pid)]


def children(pid: int) -> list[int]:
    """The processes that a process's first thread has started, in their order."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def is_alive(pid: int) -> bool:
    """True if the process is there, and not only its entry."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def read_all(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = bytearray()
    with sock:
        while True:
            try:
                data = sock.recv(1 << 16)
            except ConnectionError:
                break
            if not data:
                break
            found += data
    return bytes(found)
