"""Large copies, done by several threads."""

from __future__ import annotations

import os
import threading
import time
import weakref
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.backends.cpu.memory import parallel_memcpy
from cg.backends.cpu.memory.parallel_memcpy import LEAST, PART, Copier, CopyJob, cut
from cg.backends.errors import TransportError


@pytest.mark.parametrize("helpers", [0, 1, 3])
@pytest.mark.parametrize("nbytes", [0, 1, LEAST - 1, LEAST, LEAST + 1, 3 * LEAST + PART // 2])
def test_every_byte_is_copied_and_no_other(helpers: int, nbytes: int) -> None:
    copier = Copier(helpers)
    source = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    for _ in range(3):
        around = np.full(nbytes + 2, 7, dtype=np.uint8)
        copier.copy(memoryview(around)[1:-1], memoryview(source))
        assert (around[1:-1] == source).all()
        assert around[0] == around[-1] == 7


def test_threads_ask_at_the_same_time() -> None:
    copier = Copier(2)
    sources = [np.full(LEAST + i, i, dtype=np.uint8) for i in range(4)]
    targets = [np.zeros_like(source) for source in sources]
    threads = [
        threading.Thread(target=copier.copy, args=(memoryview(target), memoryview(source)))
        for target, source in zip(targets, sources, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for target, source in zip(targets, sources, strict=True):
        assert (target == source).all()


@given(nbytes=st.integers(1, 200), shares=st.integers(1, 9), part=st.integers(1, 50))
def test_shares_follow_each_other_and_are_alike(nbytes: int, shares: int, part: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_memcpy, "PART", part)
        found = cut.__wrapped__(nbytes, shares)
    assert len(found) == shares
    assert [at for parts in found for one in parts for at in range(nbytes)[one]] == [*range(nbytes)]
    assert all(0 < one.stop - one.start <= part for parts in found for one in parts)
    sizes = [sum(one.stop - one.start for one in parts) for parts in found]
    assert max(sizes) == -(-nbytes // shares)


def a_job(nbytes: int, shares: int) -> tuple[CopyJob, np.ndarray, np.ndarray]:
    source = np.random.default_rng(0).integers(1, 256, nbytes, dtype=np.uint8)
    target = np.zeros_like(source)
    return CopyJob(memoryview(target), memoryview(source), shares), target, source


@pytest.mark.parametrize("helpers", [1, 3])
def test_helpers_alone_copy_everything(helpers: int) -> None:
    job, target, source = a_job(3 * PART + 1, helpers + 1)
    threads = [threading.Thread(target=job.help, args=(share,)) for share in range(helpers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    job.stop()
    job.check()
    assert (target == source).all()


@pytest.mark.parametrize("share", [0, 1, 2])
def test_who_is_alone_copies_the_shares_of_all(share: int) -> None:
    job, target, source = a_job(3 * PART + 1, 3)
    job.work(share, lambda called: None)
    job.stop()
    assert (target == source).all()


def test_nothing_waits_for_a_helper_that_gets_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(Copier, "_help", lambda self: never.wait(60))
    copier = Copier(1)
    source = np.ones(2 * LEAST, dtype=np.uint8)
    target = np.zeros_like(source)
    copier.copy(memoryview(target), memoryview(source))
    never.set()
    assert target.all()


def test_threads_on_different_cores_begin_with_different_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel_memcpy.os, "sched_getaffinity", lambda pid: {2, 3, 5, 7, 11})
    copier = Copier(3)
    assert [copier.share(core) for core in (2, 3, 5, 7, 11)] == [0, 1, 2, 3, 0]
    assert copier.share(13) == 0  # one that was not ours when we began


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_helpers_leave_the_core_to_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = Copier(2)
    mine = os.sched_getaffinity(0)
    for core in sorted(mine)[:2]:
        monkeypatch.setattr(parallel_memcpy, "current_core", lambda core=core: core)
        source = np.ones(LEAST, dtype=np.uint8)
        copier.copy(memoryview(np.zeros_like(source)), memoryview(source))
        assert [os.sched_getaffinity(thread) for thread in copier.threads] == [mine - {core}] * 2
    assert os.sched_getaffinity(0) == mine


def test_an_interrupted_copy_writes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper is at its part when the asking thread is interrupted: it ends that one first."""
    began, written = threading.Event(), threading.Event()
    here = threading.current_thread()

    def copyto(target: np.ndarray, source: np.ndarray) -> None:
        if threading.current_thread() is here:
            assert began.wait(60)
            raise KeyboardInterrupt
        began.set()
        time.sleep(0.05)
        target[:] = source
        written.set()

    monkeypatch.setattr(parallel_memcpy.np, "copyto", copyto)
    source = np.ones(6 * PART, dtype=np.uint8)
    target = np.zeros_like(source)
    with pytest.raises(KeyboardInterrupt):
        Copier(1).copy(memoryview(target), memoryview(source))
    assert written.is_set()
    assert 0 < target.sum() <= PART


def test_a_token_that_an_interruption_has_lost_is_not_waited_for() -> None:
    job, target, source = a_job(3 * PART, 2)
    helper = threading.Thread(target=job.help, args=(0,))
    helper.start()
    helper.join(60)
    while not job._news.empty():
        job._news.get()  # taken, and then a signal came
    job.stop()
    job.check()
    assert (target == source).all()


def test_an_interruption_of_the_wait_comes_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The asking thread waits for a helper's part, and is interrupted twice meanwhile."""
    job, target, _ = a_job(2 * PART, 2)
    began, may_end = threading.Event(), threading.Event()

    def copyto(into: np.ndarray, out_of: np.ndarray) -> None:
        began.set()
        assert may_end.wait(60)
        into[:] = out_of

    monkeypatch.setattr(parallel_memcpy.np, "copyto", copyto)
    helper = threading.Thread(target=job.help, args=(0,))
    helper.start()
    assert began.wait(60)
    interruptions = [KeyboardInterrupt(), KeyboardInterrupt()]

    class News(SimpleQueue[None]):
        def get(self, block: bool = True, timeout: float | None = None) -> None:
            if interruptions:
                raise interruptions.pop()
            may_end.set()
            super().get(block, timeout)

    job._news = News()
    with pytest.raises(KeyboardInterrupt):
        job.stop()
    assert np.count_nonzero(target) == PART  # nothing is written from here on
    helper.join(60)


def test_shares_that_nobody_has_begun_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One helper is slow, and two never come."""
    job, target, source = a_job(4 * PART, 4)
    copyto, asker = np.copyto, threading.current_thread()
    by_asker = []

    def slow(into: np.ndarray, out_of: np.ndarray) -> None:
        if threading.current_thread() is asker:
            by_asker.append(into.nbytes)
        else:
            time.sleep(0.3)
        copyto(into, out_of)

    monkeypatch.setattr(parallel_memcpy.np, "copyto", slow)
    helper = threading.Thread(target=job.help, args=(1,))
    job.work(0, lambda called: helper.start())
    job.stop()
    job.check()
    helper.join(60)
    assert (target == source).all()
    assert len(by_asker) == 3


def test_a_helper_that_fails_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    copyto, asker = np.copyto, threading.current_thread()
    failed = threading.Event()
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def fail(into: np.ndarray, out_of: np.ndarray) -> None:
        if threading.current_thread() is not asker:
            failed.set()
            raise MemoryError
        assert failed.wait(60)
        copyto(into, out_of)

    monkeypatch.setattr(parallel_memcpy.np, "copyto", fail)
    source = np.ones(LEAST, dtype=np.uint8)
    with pytest.raises(TransportError, match="copied in 2 parts, and of some nothing came"):
        Copier(1).copy(memoryview(np.zeros_like(source)), memoryview(source))
    assert len(told) == 1


def test_what_the_system_has_no_threads_for_is_copied_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    copier = Copier(3)
    for _ in range(2):
        source = np.ones(LEAST, dtype=np.uint8)
        target = np.zeros_like(source)
        copier.copy(memoryview(target), memoryview(source))
        assert target.all()
    assert len(started) == 1


def test_a_copy_that_a_helper_missed_holds_on_to_no_memory() -> None:
    job, _, source = a_job(LEAST, 2)
    held = weakref.ref(source)
    del source, _
    job.work(0, lambda called: None)
    job.stop()
    assert held() is None
    job.help(1)  # it comes now
