"""Large copies, done by several threads."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.backends.cpu import copying
from cg.backends.cpu.copying import LEAST, PART, Copier, Job, cut


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
        patch.setattr(copying, "PART", part)
        found = cut.__wrapped__(nbytes, shares)
    assert len(found) == shares
    assert [at for parts in found for one in parts for at in range(nbytes)[one]] == [*range(nbytes)]
    assert all(0 < one.stop - one.start <= part for parts in found for one in parts)
    sizes = [sum(one.stop - one.start for one in parts) for parts in found]
    assert max(sizes) == -(-nbytes // shares)


def a_job(nbytes: int, shares: int) -> tuple[Job, np.ndarray, np.ndarray]:
    source = np.random.default_rng(0).integers(1, 256, nbytes, dtype=np.uint8)
    target = np.zeros_like(source)
    return Job(memoryview(target), memoryview(source), shares), target, source


@pytest.mark.parametrize("helpers", [1, 3])
def test_helpers_alone_copy_everything(helpers: int) -> None:
    job, target, source = a_job(3 * PART + 1, helpers + 1)
    copier = Copier(helpers)
    copier._avoid(copying.current_core())
    copier._call(job)
    until = time.monotonic() + 60
    while any(job._shares):
        assert time.monotonic() < until
        time.sleep(1e-3)
    job.stop()
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


def test_threads_on_different_cores_begin_with_different_shares() -> None:
    copier = Copier(3)
    cores = sorted(os.sched_getaffinity(0))
    shares = [copier._share(core) for core in cores]
    assert shares == [index % 4 for index in range(len(cores))]
    assert copier._share(max(cores) + 1) == 0  # one that was not ours when we began


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_helpers_leave_the_core_to_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = Copier(2)
    mine = os.sched_getaffinity(0)
    for core in sorted(mine)[:2]:
        monkeypatch.setattr(copying, "current_core", lambda core=core: core)
        source = np.ones(LEAST, dtype=np.uint8)
        copier.copy(memoryview(np.zeros_like(source)), memoryview(source))
        assert [os.sched_getaffinity(thread) for thread in copier._threads] == [mine - {core}] * 2
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

    monkeypatch.setattr(copying.np, "copyto", copyto)
    source = np.ones(6 * PART, dtype=np.uint8)
    target = np.zeros_like(source)
    with pytest.raises(KeyboardInterrupt):
        Copier(1).copy(memoryview(target), memoryview(source))
    assert written.is_set()
    assert 0 < target.sum() <= PART


def test_an_interruption_at_any_point_of_a_wait_hangs_nothing() -> None:
    """A signal may come between a token and what is done about it."""
    job, target, source = a_job(3 * PART, 2)
    helper = threading.Thread(target=job.help, args=(0,))
    helper.start()
    helper.join(60)
    job._news.get()  # taken, and then the signal came
    job.stop()
    assert (target == source).all()
