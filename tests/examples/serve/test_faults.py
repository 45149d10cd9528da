"""Faults of the server itself: who is told, who is not hurt, and that it serves again.

What stands in quotation marks in a docstring is a line of the guide's tables.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.front.text import Bytes

from .fake_engine import ROOMY, reference
from .fake_rank import DIES, EXHAUSTS, FAILS, HANGS
from .servers import (
    PATIENCE,
    PROGRAM,
    Server,
    children,
    is_alive,
    read_all,
    resident,
    serving,
)

TEXT = Bytes().decode(reference(b"fine", 40, ROOMY))


def stream(server: Server, prompt: Any, number: int = 400) -> socket.socket:
    """A stream whose first chunk has come."""
    sock = server.post({"prompt": prompt, "max_tokens": number, "stream": True})
    found = b""
    while b"data: " not in found:
        found += sock.recv(1 << 16)
    return sock


def serves_again(server: Server) -> None:
    server.wait_for(server.is_ready, "another engine")
    found, body = server.complete("fine", 40)
    assert (found, body["choices"][0]["text"]) == (200, TEXT)
    server.wait_for(server.is_empty)


# -- the engine -------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["prefill", "decode", "idle"])
def test_a_dead_engine(tmp_path: Path, when: str) -> None:
    """ "A rank killed in prefill", "in decode", "while idle": its streams end with an error, whole
    answers are 503, and another engine is started.
    """
    with serving(tmp_path, delay=0.01) as own:
        files = own.files()
        if when != "idle":
            sock = stream(own, "x")
            whole = own.post({"prompt": "y", "max_tokens": 400})
        if when == "prefill":
            assert own.complete([DIES, 1])[0] == 503
        else:
            (rank,) = own.children()
            os.kill(rank, signal.SIGKILL)
        if when != "idle":
            answer = read_all_until(sock, b"[DONE]")
            assert b'"the engine has ended; it is started again"' in answer
            assert b'"service_unavailable_error"' in answer
            assert b" 503 " in read_all_until(whole, b"service_unavailable_error")
        own.wait_for(lambda: own.metric("engine_starts_total") == 2, "another start")
        serves_again(own)
        own.wait_for(lambda: own.files() <= files, "as few files as before")


def test_a_dead_rank_that_nobody_else_notices(tmp_path: Path) -> None:
    """The front looks after all ranks: here the launcher and rank 0 go on without the other."""
    with serving(tmp_path, delay=0.01, ranks=3) as own:
        (launcher,) = own.children()
        old = [launcher, *children(launcher)]
        sock = stream(own, "x")
        os.kill(old[1], signal.SIGKILL)
        answer = read_all_until(sock, b"[DONE]")
        assert b'"the engine has ended; it is started again"' in answer
        own.wait_for(lambda: own.metric("engine_starts_total") == 2, "another start")
        assert not any(map(is_alive, old))  # not when the next one starts
        serves_again(own)


def read_all_until(sock: socket.socket, mark: bytes) -> bytes:
    found = b""
    while mark not in found:
        data = sock.recv(1 << 16)
        assert data, found
        found += data
    sock.close()
    return found


def test_requests_meanwhile_are_told_to_come_again(tmp_path: Path) -> None:
    with serving(tmp_path, waits=False, slow_start=1.0) as own:
        own.wait_for(lambda: own.get("/health")[0] == 200)
        found, body = own.complete("x")
        assert found == 503
        assert body["error"]["message"] == "the engine is starting; try again later"
        assert own.get("/ready")[0] == 503
        own.wait_for(own.is_ready)
        serves_again(own)


def test_ending_while_the_engine_starts(tmp_path: Path) -> None:
    """It is not waited for: it has no socket yet whose end it could see."""
    with serving(tmp_path, waits=False, slow_start=3600.0) as own:
        own.wait_for(lambda: bool(own.children()))
        (rank,) = own.children()
        assert own.end() == 0
        assert not is_alive(rank)


def test_an_engine_that_never_gets_ready(tmp_path: Path) -> None:
    with serving(tmp_path, waits=False, limits={"blocks": 2}) as own:
        assert own.process.wait(PATIENCE) == 1
        assert "give more blocks, or a shorter context" in own.text()
        assert "the engine never became ready" in own.text()


def test_an_engine_that_hangs(tmp_path: Path) -> None:
    """ "An execution that never ends" is an error after a while, and the engine starts over."""
    with serving(tmp_path, patience=0.5) as own:
        found, body = own.complete([HANGS, 1])
        assert (found, body["error"]["type"]) == (503, "service_unavailable_error")
        own.wait_for(lambda: "an execution has not ended" in own.text())
        serves_again(own)


@pytest.mark.parametrize(
    ("token", "message"),
    [(FAILS, "ValueError: a method has raised"), (EXHAUSTS, "MemoryError: no memory")],
)
def test_a_method_that_raises(clean: Server, token: int, message: str) -> None:
    """ "A method that raises", "a MemoryError": its request fails, and nobody else's does."""
    others = [clean.post({"prompt": "fine", "max_tokens": 40, "temperature": 0}) for _ in range(4)]
    found, body = clean.complete([token, 1])
    assert (found, body["error"]["message"]) == (500, message)
    for sock in others:
        answer = read_all_until(sock, b"total_tokens")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == TEXT


def test_an_engine_ten_times_slower(tmp_path: Path) -> None:
    """ "A rank ten times slower": it is healthy, if it beats, and its text is the same."""
    with serving(tmp_path, delay=0.1) as own:
        sock = own.post({"prompt": "fine", "max_tokens": 40, "temperature": 0})
        assert own.get("/health")[0] == 200
        answer = read_all_until(sock, b"total_tokens")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == TEXT


# -- the front --------------------------------------------------------------------------------


def test_a_killed_front_leaves_no_engine(tmp_path: Path) -> None:
    """ "The front killed"."""
    with serving(tmp_path, delay=0.01) as own:
        sock = stream(own, "x")
        (rank,) = own.children()
        own.end(signal.SIGKILL)
        read_all(sock)
        while is_alive(rank):  # which ends by itself, or the test by its timeout
            time.sleep(0.01)
    with serving(tmp_path) as another:  # whatever is left in the folder
        serves_again(another)


def test_a_front_that_stops_for_a_while(tmp_path: Path) -> None:
    """ "A front that is stopped for a while": the engine keeps what it has drawn, merged, in
    bounds, and the text is the same.
    """
    with serving(tmp_path, delay=0.001) as own:
        sock = own.post({"prompt": "fine", "max_tokens": 400, "temperature": 0, "stream": True})
        own.process.send_signal(signal.SIGSTOP)
        (rank,) = own.children()
        before, memory = os.times(), resident(rank)
        stat = Path(f"/proc/{rank}/stat")
        ticks = int(stat.read_text().split()[13])
        while int(stat.read_text().split()[13]) < ticks + 5 and os.times()[4] - before[4] < 5:
            time.sleep(0.01)
        assert resident(rank) < memory + (16 << 20)
        own.process.send_signal(signal.SIGCONT)
        answer = read_all_until(sock, b"[DONE]")
        events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
        text = "".join(json.loads(each)["choices"][0]["text"] for each in events)
        assert text == Bytes().decode(reference(b"fine", 400, ROOMY))
        own.wait_for(own.is_empty)


def test_draining(tmp_path: Path) -> None:
    """ "SIGTERM": nobody is let in, whoever is there gets all, and the exit code is 0."""
    with serving(tmp_path, delay=0.02) as own:
        sock = stream(own, "fine", 60)
        (rank,) = own.children()
        own.process.send_signal(signal.SIGTERM)
        own.wait_for(lambda: own.get("/ready")[0] == 503)
        assert own.complete("x")[1]["error"]["message"] == "the server is shutting down"
        assert own.get("/health")[0] == 200
        answer = read_all_until(sock, b"[DONE]")
        assert b'"finish_reason":"length"' in answer
        assert own.process.wait(PATIENCE) == 0
        assert not is_alive(rank)


def test_draining_has_an_end(tmp_path: Path) -> None:
    with serving(tmp_path, delay=0.05, bounds={"drain": 0.2}) as own:
        sock = stream(own, "x")
        own.process.send_signal(signal.SIGTERM)
        answer = read_all_until(sock, b"[DONE]")
        assert b"the server is shutting down" in answer
        assert own.process.wait(PATIENCE) == 0


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """ "SIGTERM twice"."""
    with serving(tmp_path, delay=0.05, bounds={"drain": 1000.0}) as own:
        sock = stream(own, "x")
        (rank,) = own.children()
        own.process.send_signal(signal.SIGTERM)
        own.wait_for(lambda: own.get("/ready")[0] == 503)
        assert own.end(signal.SIGINT) != 0
        sock.close()
        while is_alive(rank):
            time.sleep(0.01)


def test_a_port_that_is_taken() -> None:
    """ "A port that is taken"."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = _command("--port", port)
    assert ended.returncode == 2
    assert "Address already in use" in ended.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--features=-nothing"], "no feature '-nothing'"),
        (["--model", "/nowhere"], "there is no model /nowhere"),
        (["--host", "no.such.host.invalid"], "give another --host or --port"),
        (["--port", "65536"], "port must be 0-65535"),
    ],
)
def test_a_command_line_that_is_wrong(options: list[str], message: str) -> None:
    ended = _command("--port", "0", *options)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_format_that_is_not_read(tmp_path: Path) -> None:
    """ "Quantised weights in a format that is not read"."""
    settings = {"model_type": "llama", "quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ended = _command("--port", "0", "--model", str(tmp_path))
    assert ended.returncode == 2
    assert "'torchao' is not read" in ended.stderr
    assert "Traceback" not in ended.stderr


def _command(*options: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    line = [*before, sys.executable, "-m", "examples.serve", *options]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_no_room_on_the_disk(tmp_path: Path) -> None:
    """ "A full disk": nothing is written that it needs; its log is on a full device here."""
    line = [sys.executable, str(PROGRAM), json.dumps({})]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT}/examples"}
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=full, text=True, env=environment
        )
    assert process.stdout is not None
    with process.stdout:
        own = Server(process, int(process.stdout.readline()), Path("/dev/null"))
        own.wait_for(own.is_ready)
        assert own.complete([FAILS, 1])[0] == 500  # which is logged, or would be
        serves_again(own)
        assert own.end() == 0


def test_no_room_for_its_folder() -> None:
    """Not a byte can be written anywhere: the server says so, and ends."""
    limited = ["bash", "-c", 'ulimit -f 0; exec "$@"', "limited"]
    ended = _command("--port", "0", before=limited)
    assert ended.returncode == 2
    assert "No usable temporary directory found" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_socket_that_was_left(tmp_path: Path) -> None:
    """ "A socket that was left behind": each server has a folder of its own, for its user alone."""
    old = tmp_path / "cg-serve-old"
    old.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(old / "engine"))
    with serving(tmp_path) as own:
        (mine,) = (each for each in tmp_path.glob("cg-serve-*") if each != old)
        assert mine.stat().st_mode & 0o777 == 0o700
        serves_again(own)
    assert not mine.exists()


def test_what_is_no_engine_cannot_take_its_place(clean: Server, tmp_path: Path) -> None:
    """A second connection to the socket is not listened to, and garbage hurts nobody."""
    with serving(tmp_path) as own:
        (folder,) = tmp_path.glob("cg-serve-*")
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(folder / "engine"))
            other.sendall(b"\xff" * 1000)
            serves_again(own)
