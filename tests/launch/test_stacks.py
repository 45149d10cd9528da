"""The answers of processes that another one asks where they are."""

from __future__ import annotations

import dataclasses
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from cg.backends.failures.flight import Activity
from cg.launch.world.stacks import StackAddress, Stacks, parse_dump

from ..mpi.jobs import environment

pytestmark = pytest.mark.timeout(120)

CHILD = """
import ctypes, pickle, sys, time
from cg.backends.failures.flight import Activity
from cg.launch.world.stacks import Stacks

stacks = Stacks(1)
TELL
sys.stdout.buffer.write(pickle.dumps(stacks.address))
sys.stdout.flush()

def method():
    HANG  # the line

method()
"""

Ask = Callable[..., str]


@pytest.fixture
def ask(tmp_path) -> Iterator[Ask]:
    """Starts a process that hangs, and asks it until it has come to that."""
    started: list[subprocess.Popen[bytes]] = []

    def start(hang: str, seconds: float, tell: str = "", until: str = "in method") -> str:
        script = tmp_path / "child.py"
        script.write_text(CHILD.replace("HANG", hang).replace("TELL", tell))
        child = subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, env=environment()
        )
        started.append(child)
        assert child.stdout is not None
        mine = Stacks(0)
        mine.meet({1: pickle.load(child.stdout)})
        text = ""
        while until not in text:
            text = mine.look([1, 7], seconds)[1].text
        return text

    yield start
    for child in started:
        child.kill()
        child.communicate()


def test_a_process_that_sleeps_says_where(ask: Ask) -> None:
    text = ask("time.sleep(100)", 60)
    assert text.startswith("rank 1 runs its program\n    its Python is at /")
    *_, line, process = text.split("\n")
    assert line.endswith("child.py:12, in method: time.sleep(100)  # the line")
    assert re.fullmatch(rf"    it is process \d+ on {re.escape(socket.gethostname())}", process)


def test_a_process_that_runs_python_says_where(ask: Ask) -> None:
    assert "in method: while True: pass  # the line\n" in ask("\n    while True: pass", 60)


def test_the_last_that_knows_says_what_a_process_does(ask: Ask) -> None:
    tell = (
        "stacks.answer_by(lambda: Activity('rank 1 idles'));"
        "stacks.answer_by(lambda: Activity('rank 1 works'));"
        "stacks.answer_by(lambda: None)"
    )
    assert ask("time.sleep(100)", 60, tell).startswith("rank 1 works\n    its Python is at /")


def test_one_that_cannot_say_it_says_so(ask: Ask) -> None:
    text = ask("time.sleep(100)", 60, "stacks.answer_by(lambda: 1 / 0)", until="cannot")
    assert text == "rank 1 cannot say what it does: ZeroDivisionError: division by zero"


def test_the_line_that_the_users_line_is_inside_of(ask: Ask) -> None:
    text = ask("__import__('queue').Queue().get()", 60, until=", in wait)")
    assert "in method: __import__('queue').Queue().get()  # the line (inside of " in text
    assert ", in wait)\n" in text


def test_a_process_whose_lock_is_kept_is_looked_into(ask: Ask) -> None:
    text = ask("ctypes.PyDLL(None).sleep(100)", 0.5)
    assert text.startswith("rank 1 has not answered in 0.5 s: a C function keeps ")
    assert "child.py:12, in method: ctypes.PyDLL(None).sleep(100)  # the line\n" in text


def test_a_process_that_has_ended_is_left_out() -> None:
    mine = Stacks(0)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    address = dataclasses.replace(mine.address, pid=gone.pid)
    mine.meet({1: address, 2: dataclasses.replace(mine.address, answer=(0, 1))})
    assert mine.look([1, 2, 3], 0.1) == {}


def test_a_process_may_ask_itself() -> None:
    mine = Stacks(3)
    mine.answer_by(lambda: Activity("rank 3 tests"))
    mine.meet({3: mine.address})
    assert mine.look([3], 60)[3].text.startswith("rank 3 tests")


def test_addresses_travel() -> None:
    address = Stacks(0).address
    assert isinstance(address, StackAddress)
    assert pickle.loads(pickle.dumps(address)) == address


def test_the_frames_of_a_thread_in_a_dump() -> None:
    text = (
        'Current thread 0x00007f01 (most recent call first):\n  File "/a.py", line 1 in serve\n\n'
        'Thread 0x00007f02 [MainThread] (most recent call first):\n  File "/b c.py", line 22 in f\n'
        '  File "/d.py", line 3 in <module>\n'
    )
    assert parse_dump(text, 0x7F02) == [("/b c.py", 22, "f"), ("/d.py", 3, "<module>")]
    assert parse_dump(text, 0x7F01) == [("/a.py", 1, "serve")]
    assert parse_dump(text, 0x7F03) == parse_dump("", 1) == []
