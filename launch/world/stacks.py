"""Ask the other processes of a machine at which line their Python is.

A thread of each process sleeps on a pipe and costs nothing. The process that asks writes a byte to
the pipe, which it finds in /proc, and the thread writes what its process does to a file in memory.
While a C function keeps the interpreter's lock, the thread cannot run. Then the process that asks
sends the thread a signal. Python's faulthandler, which needs no lock, writes the stacks of all
threads to a second file. The signal goes to that thread alone, so it interrupts no system call of
the program.
"""

from __future__ import annotations

import ctypes
import faulthandler
import linecache
import os
import re
import signal
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from types import FrameType
from typing import Final

from ...backends.failures.flight import Activity, Sight
from ...ir.location import Location
from ...tracer.source import is_our_file, is_user_file

SIGNAL: Final = signal.SIGURG
"""It does nothing in a process that has no handler for it, such as one that is about to end."""

DUMP_SECONDS: Final = 0.25
"""Seconds that a signal's handler may take to write the stacks."""

_POLL: Final = 1e-3
_STEADY: Final = 20
"""Polls without news after which a dump is taken to be whole."""

_HEAD = struct.Struct("<QQQ")
"""The head of an answer: its number, its length and its checksum, since the answer may be
overwritten while it is read."""

_BACKENDS: Final = f"{os.sep}backends{os.sep}"

Frame = tuple[str, int, str]
"""File, line and function."""


@dataclass(frozen=True, slots=True)
class StackAddress:
    """The address at which a process is asked.

    Attributes:
        pid, thread: its number, and that of the thread that answers.
        main: the identity of its main thread, as faulthandler prints it.
        pipe, answer, dump: its descriptors, each with its inode. In another PID namespace that
            number may belong to another process, which the inode shows.
        has_handler: True if `SIGNAL` makes it write a dump.
    """

    pid: int
    thread: int
    main: int
    pipe: tuple[int, int]
    answer: tuple[int, int]
    dump: tuple[int, int]
    has_handler: bool


class Stacks:
    """Answers questions of the machine's other processes about this one, and asks them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tellers: list[Callable[[], Activity | None]] = []
        self._reader, self._writer = os.pipe()
        self._answer = os.memfd_create("cg-answer", os.MFD_CLOEXEC)
        self._dump = os.memfd_create("cg-stacks", os.MFD_CLOEXEC)
        self._count = 0
        self._thread = threading.Thread(target=self._serve, name="cg stacks", daemon=True)
        self._thread.start()
        self._has_handler = signal.getsignal(SIGNAL) == signal.SIG_DFL
        if self._has_handler:
            faulthandler.register(SIGNAL, self._dump, all_threads=True)
        self._others: dict[int, StackAddress] = {}

    @property
    def address(self) -> StackAddress:
        """The address at which others ask this process."""
        main = threading.main_thread().ident
        assert main is not None
        assert self._thread.native_id is not None
        pipe, answer, dump = (
            (descriptor, os.fstat(descriptor).st_ino)
            for descriptor in (self._writer, self._answer, self._dump)
        )
        thread = self._thread.native_id
        return StackAddress(os.getpid(), thread, main, pipe, answer, dump, self._has_handler)

    def meet(self, others: Mapping[int, StackAddress]) -> None:
        """Learn how to ask the other ranks of this machine."""
        self._others = dict(others)

    def answer_by(self, teller: Callable[[], Activity | None]) -> None:
        """Let `teller` say what this process does; another thread calls it.

        The latest teller is asked first. A teller that returns None does not know.
        """
        self._tellers.insert(0, teller)

    def look(self, ranks: Sequence[int], seconds: float) -> dict[int, Sight]:
        """Ask other ranks of this machine what they do.

        Args:
            ranks: to ask; the result leaves out ranks that cannot be asked.
            seconds: how long to wait for answers. The dump of a rank that gives none takes up to
                `DUMP_SECONDS` more.
        """
        asked = {rank: self._others[rank] for rank in ranks if rank in self._others}
        began = {rank: number for rank, to in asked.items() if (number := _ask(to)) is not None}
        sights: dict[int, Sight] = {}
        deadline = monotonic() + seconds
        while len(sights) < len(began):
            for rank in began.keys() - sights.keys():
                number, text = _read_answer(asked[rank])
                if number > began[rank]:
                    sights[rank] = Sight(text)
            if monotonic() > deadline:
                break
            sleep(_POLL)
        silent = [rank for rank in began if rank not in sights]
        sights.update(_dumps({rank: asked[rank] for rank in silent}, seconds))
        return sights

    def _serve(self) -> None:
        while os.read(self._reader, 4096):
            try:
                text = self._describe()
            except Exception as error:
                name = type(error).__name__
                text = f"rank {self._rank} cannot say what it does: {name}: {error}"
            self._write(text.encode())

    def _describe(self) -> str:
        doings = (teller() for teller in tuple(self._tellers))
        doing = next(filter(None, doings), None) or Activity(f"rank {self._rank} runs its program")
        main = threading.main_thread().ident
        frame = sys._current_frames().get(doing.thread or main or 0)
        python = _python(list(_frames(frame)))
        return "\n".join([doing.text, *python, _process(os.getpid())])

    def _write(self, text: bytes) -> None:
        self._count += 1
        os.pwrite(self._answer, text, _HEAD.size)
        os.pwrite(self._answer, _HEAD.pack(self._count, len(text), zlib.crc32(text)), 0)


def _frames(frame: FrameType | None) -> Iterator[Frame]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name
        frame = frame.f_back


def _python(frames: Sequence[Frame]) -> list[str]:
    """Describe a stack, innermost frame first: the user's line, and the function that it calls.

    Empty if cg itself waits, since the flight record says what for.
    """
    users = next((at for at, (file, *_) in enumerate(frames) if is_user_file(file)), None)
    if users is None or (is_our_file(frames[0][0]) and _BACKENDS in frames[0][0]):
        return []
    location = Location(*frames[users])
    source = linecache.getline(location.file, location.line).strip()
    line = f"    its Python is at {location}" + (f": {source}" if source else "")
    if users and not is_our_file(frames[0][0]):
        line += f" (inside of {Location(*frames[0])})"
    return [line]


def _process(pid: int) -> str:
    """Name a process of this machine, for users who attach a debugger."""
    return f"    it is process {pid} on {socket.gethostname()}"


def _method(frames: Sequence[Frame]) -> str:
    """The user's function that cg has called, if a stack shows one."""
    method = ""
    for file, _, name in frames:
        if is_our_file(file):
            return method
        if is_user_file(file):
            method = name
    return ""


# -- asking -----------------------------------------------------------------------------------


def _open(pid: int, descriptor: tuple[int, int], flags: int) -> int | None:
    """Open another process's descriptor; None if it is closed, or not that process's."""
    number, inode = descriptor
    try:
        file = os.open(f"/proc/{pid}/fd/{number}", flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    if os.fstat(file).st_ino == inode:
        return file
    os.close(file)
    return None


def _ask(to: StackAddress) -> int | None:
    """Ask a process; the number of its last answer, or None where it cannot be asked."""
    number, _ = _read_answer(to)
    pipe = _open(to.pid, to.pipe, os.O_WRONLY)
    if number < 0 or pipe is None:
        return None
    try:
        os.write(pipe, b"?")
    except OSError:  # full of questions that the process has not read
        pass
    finally:
        os.close(pipe)
    return number


def _read_answer(to: StackAddress) -> tuple[int, str]:
    """The last answer of a process and its number: 0 before the first, -1 if it cannot be read."""
    file = _open(to.pid, to.answer, os.O_RDONLY)
    if file is None:
        return -1, ""
    try:
        head = os.pread(file, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return 0, ""
        number, nbytes, checksum = _HEAD.unpack(head)
        text = os.pread(file, nbytes, _HEAD.size)
    finally:
        os.close(file)
    return (number, text.decode()) if zlib.crc32(text) == checksum else (0, "")


def _dumps(silent: Mapping[int, StackAddress], seconds: float) -> dict[int, Sight]:
    """Have processes that were silent for `seconds` write their stacks, by the signal."""
    began: dict[int, int] = {}
    for rank, to in silent.items():
        size = _size(to)
        if to.has_handler and size is not None and _signal(to):
            began[rank] = size
    sights: dict[int, Sight] = {}
    for rank in silent:
        frames = _stack(silent[rank], began[rank]) if rank in began else []
        lines = [
            f"rank {rank} has not answered in {seconds:.2g} s: a C function keeps its "
            "interpreter's lock, or its process is stopped, or gets no core",
            *_python(frames),
            _process(silent[rank].pid),
        ]
        sights[rank] = Sight("\n".join(lines), _method(frames))
    return sights


def _signal(to: StackAddress) -> bool:
    """Send the signal to the thread that answers; False if that thread has ended."""
    try:
        return bool(ctypes.CDLL(None).tgkill(to.pid, to.thread, int(SIGNAL)) == 0)
    except AttributeError:  # a C library without it
        return False


def _size(to: StackAddress) -> int | None:
    file = _open(to.pid, to.dump, os.O_RDONLY)
    if file is None:
        return None
    try:
        return os.fstat(file).st_size
    finally:
        os.close(file)


def _stack(to: StackAddress, begin: int) -> list[Frame]:
    """The main thread's frames in the dump from byte `begin` on, innermost first."""
    file = _open(to.pid, to.dump, os.O_RDONLY)
    if file is None:
        return []
    deadline, size, steady = monotonic() + DUMP_SECONDS, begin, 0
    try:
        while monotonic() < deadline and steady < _STEADY:
            sleep(_POLL)
            before, size = size, os.fstat(file).st_size
            steady = steady + 1 if size == before and size > begin else 0
        text = os.pread(file, size - begin, begin).decode(errors="replace")
    finally:
        os.close(file)
    return parse_dump(text, to.main)


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*:\n((?:  [^\n]*\n)*)", re.M)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)


def parse_dump(text: str, thread: int) -> list[Frame]:
    """A thread's frames in what faulthandler has written, innermost first."""
    for identity, frames in _THREAD.findall(text):
        if int(identity, 16) == thread:
            return [(file, int(line), name) for file, line, name in _FRAME.findall(frames)]
    return []
