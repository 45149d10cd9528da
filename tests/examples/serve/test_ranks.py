"""The server as users start it, with ranks under MPI: it answers, and loses no rank unnoticed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cg.launch.job.job import descendants

from ...mpi.jobs import ROOT, environment, launcher, needs_mpi
from .servers import PATIENCE, Server, is_alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), *needs_mpi]

SMALL = ["--model", "random", "--blocks", "32", "--batch", "2", "--chunk", "8", "--context", "64"]


@contextmanager
def serving(folder: Path, ranks: int) -> Iterator[Server]:
    """`python -m examples.serve` with so many ranks; nothing is left of it afterwards."""
    before = set(os.listdir("/dev/shm"))
    log = folder / "log"
    found = launcher()
    assert found is not None
    path = f"{Path(found).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.serve", "-n", str(ranks), "--port", "0", *SMALL],
            stderr=file,
            cwd=ROOT,
            env=environment({"PATH": path, "TMPDIR": str(folder)}),
        )
    try:
        server = Server(process, _port(process, log), log)
        while not server.is_ready():
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield server
    finally:
        left = descendants(process.pid)
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE)
        wait_until(lambda: not any(map(is_alive, left)))
        wait_until(lambda: set(os.listdir("/dev/shm")) <= before)


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    while " at http://" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    return int(log.read_text().partition(" at http://")[2].split("/")[0].rpartition(":")[2])


def wait_until(right: object, seconds: float = PATIENCE) -> None:
    assert callable(right)
    end = time.monotonic() + seconds
    while not right():
        assert time.monotonic() < end
        time.sleep(0.1)


def named(pids: list[int], word: str) -> list[int]:
    """Those whose command line has a word; of ranks in their order."""
    return [pid for pid in sorted(pids) if word in Path(f"/proc/{pid}/cmdline").read_text()]


def ranks_of(server: Server) -> list[int]:
    """The processes of the ranks: they run the module, and start no others that do."""
    found = named(descendants(server.process.pid), "examples.serve.ranks")
    return [pid for pid in found if not set(descendants(pid)) & set(found)]


def test_two_ranks_give_the_text_of_one(tmp_path: Path) -> None:
    texts = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        with serving(folder, ranks) as own:
            found, body = own.complete("hello", 20)
            assert found == 200
            texts.append(body["choices"][0]["text"])
            own.wait_for(own.is_empty)
            assert own.end() == 0
            text = own.log.read_text()
            assert "BAD TERMINATION" not in text
            assert "cg.launch:" not in text  # which says how a job has ended, if not by itself
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two ranks, whose engine is started again after each of its deaths."""
    with serving(tmp_path_factory.mktemp("shared"), 2) as found:
        yield found


@pytest.mark.parametrize("when", ["prefill", "decode", "idle"])
@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "mpirun", "cg.launch"])
def test_a_killed_process(shared: Server, when: str, victim: str) -> None:
    """ "A rank killed in prefill", "in decode", "while idle", "mpirun killed", "the launcher
    killed": streams end with an error, then requests get 503, and another engine is started once
    the old one has gone.
    """
    own = shared
    own.wait_for(own.is_ready, seconds=200.0)
    wanted = own.complete("hello", 20)[1]["choices"][0]["text"]
    starts = own.metric("engine_starts_total")
    old = descendants(own.process.pid)
    if victim.startswith("rank"):
        target = ranks_of(own)[int(victim[-1])]
    else:
        target = named(old, victim)[0]
    sock = None
    if when != "idle":
        prompt = "long " * 11 if when == "prefill" else "x"
        sock = own.post(
            {"prompt": prompt, "max_tokens": 8 if when == "prefill" else 60, "stream": True}
        )
        if when == "decode":
            sock.recv(1 << 16)
    os.kill(target, signal.SIGKILL)
    if sock is not None:
        found = b""
        while b"[DONE]" not in found and b" 503 " not in found:
            data = sock.recv(1 << 16)
            assert data, found
            found += data
        sock.close()
        # Otherwise it had ended before, or was read behind the death.
        told = (b'"the engine has ended; it is started again"', b'"length"', b" 503 ")
        assert any(each in found for each in told)
    own.wait_for(lambda: own.complete("hello")[0] == 503, "a notice of the death")
    own.wait_for(lambda: own.metric("engine_starts_total") > starts, "another start")
    assert not any(map(is_alive, old))
    own.wait_for(own.is_ready, "another engine", seconds=200.0)
    assert own.complete("hello", 20)[1]["choices"][0]["text"] == wanted


def test_a_killed_front(tmp_path: Path) -> None:
    """ "The front killed"."""
    with serving(tmp_path, 2) as own:
        left = descendants(own.process.pid)
        sock = own.post({"prompt": "x", "max_tokens": 60, "stream": True})
        sock.recv(1 << 16)
        own.end(signal.SIGKILL)
        sock.close()
        wait_until(lambda: not any(map(is_alive, left)))


def test_a_stopped_rank(tmp_path: Path) -> None:
    """ "A rank ten times slower" than the others changes no text."""
    with serving(tmp_path, 2) as own:
        wanted = own.complete("hello", 20)[1]["choices"][0]["text"]
        sock = own.post({"prompt": "hello", "max_tokens": 20, "temperature": 0})
        rank = ranks_of(own)[1]
        for _ in range(20):
            os.kill(rank, signal.SIGSTOP)
            time.sleep(0.09)
            os.kill(rank, signal.SIGCONT)
            time.sleep(0.01)
        found = b""
        while b"total_tokens" not in found:
            found += sock.recv(1 << 16)
        sock.close()
        assert json.loads(found.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == wanted
