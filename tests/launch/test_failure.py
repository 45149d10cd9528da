"""The hooks of one process: what ends the job, and what does not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import cg

PRELUDE = """
import os, sys, threading
from cg.launch.job import failure
from cg.launch.environment.detect import Launch

def end(code):
    print("ended", code, flush=True)
    os._exit(40)

guard = failure.install(Launch("test", "TEST_RANK", 2, 4))
guard.end_job = end
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env={**os.environ, "PYTHONPATH": str(Path(cg.__file__).absolute().parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit(256 + 5)", 5),
        ("sys.exit(-1)", 255),
        ("sys.exit('out of data')", 1),
        ("import argparse; argparse.ArgumentParser().error('no')", 2),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", 130),
        ("threading.Thread(target=lambda: 1 / 0).start()", 1),
    ],
)
def test_what_ends_the_job(code: str, ended: int) -> None:
    done = run(code)
    assert done.stdout == f"ended {ended}\n"
    assert done.returncode == 40


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "sys.exit()",
        "sys.exit(0)",
        "raise SystemExit(0)",
        "try: sys.exit(3)\nexcept SystemExit as error: assert error.code == 3",
        "try: sys.exit(3)\nexcept SystemExit: pass\nsys.exit(0)",
        "threading.Thread(target=sys.exit, args=(3,)).start()",
        "try: 1 / 0\nexcept ZeroDivisionError: pass",
    ],
)
def test_what_does_not_end_the_job(code: str) -> None:
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_traceback_is_under_the_ranks_number() -> None:
    lines = run("def f():\n    raise ValueError('why')\nf()").stderr.splitlines()
    assert all(line.startswith("[rank 2] ") for line in lines)
    assert lines[-1] == "[rank 2] ValueError: why"


def test_an_interrupt_is_one_line() -> None:
    assert run("raise KeyboardInterrupt").stderr == "[rank 2] interrupted\n"


def test_the_text_of_an_exit_is_written_once() -> None:
    assert run("sys.exit('out of data')").stderr == "[rank 2] out of data\n"


def test_another_hook_shows_the_exception_its_own_way() -> None:
    done = run(
        "failure._guard = None\n"
        "sys.excepthook = lambda *args: print('mine', args[1])\n"
        "failure.install(guard.launch).end_job = end\n"
        "1 / 0"
    )
    assert done.stdout == "mine division by zero\nended 1\n"


def test_a_forked_process_fails_alone() -> None:
    done = run(
        "child = os.fork()\n"
        "if child == 0: raise ValueError('in the child')\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1"
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "ValueError: in the child" in done.stderr


def test_a_raised_exit_keeps_its_code() -> None:
    assert run("raise SystemExit(3)").returncode == 3


@pytest.mark.parametrize("answers", [True, False])
def test_the_launcher_is_asked_to_end_the_job_before_mpi_has_started(answers: bool) -> None:
    ours, theirs = socket.socketpair()
    code = f"""
from cg.launch.job import failure
from cg.launch.environment.detect import Launch
failure.KILL_SECONDS = {60 if answers else 0.1}
failure.install(Launch("Hydra", "PMI_RANK", 0, 2, pmi_socket={theirs.fileno()}))
raise ValueError
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(cg.__file__).absolute().parent.parent)},
        pass_fds=[theirs.fileno()],
        stderr=subprocess.DEVNULL,
    )
    theirs.close()
    with ours, process:
        ours.settimeout(60)
        assert ours.recv(100) == b"cmd=init pmi_version=1 pmi_subversion=1\n"
        if answers:
            ours.sendall(b"cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n")
        assert ours.recv(100) == b"cmd=abort exitcode=1\n"
        ours.close()
        assert process.wait(60) == 1


def test_a_descriptor_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    code = f"""
import os
from cg.launch.job import failure
from cg.launch.environment.detect import Launch
descriptor = os.open({str(path)!r}, os.O_RDWR | os.O_CREAT)
failure.install(Launch("Hydra", "PMI_RANK", 0, 2, pmi_socket=descriptor))
raise ValueError
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(cg.__file__).absolute().parent.parent)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert path.read_bytes() == b""
