"""Large copies, done by several threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from cg.backends.cpu.copying import LEAST, PART, Copier, Job


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


@pytest.mark.parametrize("helpers", [1, 3])
def test_helpers_alone_copy_everything(helpers: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, 3 * PART + 1, dtype=np.uint8)
    target = np.zeros_like(source)
    job = Job(memoryview(target), memoryview(source))
    Copier(helpers).hand_out(job)
    job.wait()
    assert (target == source).all()


def test_nothing_waits_for_a_helper_that_gets_no_core() -> None:
    copier = Copier(1)
    copier._started = True  # a helper that never comes
    source = np.ones(2 * LEAST, dtype=np.uint8)
    target = np.zeros_like(source)
    copier.copy(memoryview(target), memoryview(source))
    assert target.all()
