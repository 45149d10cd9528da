"""When a start writes to its cache: when bodies have run, whose code is settled then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cg
from cg.launch.cache import compile_cache
from cg.launch.cache.compile_cache import CompileCache
from cg.launch.cache.entry_store import EntryStore


def test_texts_wait_until_steps_have_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that runs for the first time in a pause begins another."""
    cache, pauses, code = CompileCache(EntryStore(tmp_path)), list[float](), list[str]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            code.append("settled")
            cache.write_behind()

    monkeypatch.setattr(compile_cache, "time", SimpleNamespace(sleep=pause))
    cache.keep("traces", "key", lambda: "".join(code))
    cache.write_behind()
    writer = cache._writer
    assert writer is not None
    writer.join()
    assert len(pauses) == 2
    assert [*cache.read("traces", "key")] == ["settled"]


def test_a_driver_writes_behind_its_first_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    monkeypatch.setattr(CompileCache, "write_behind", lambda _: writes.append(len(writes)))

    @cg.actor
    class Double:
        def apply(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    double = Double.on(0)()  # type: ignore[attr-defined]

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x: torch.Tensor) -> torch.Tensor:
        return double.apply(x)

    x = torch.ones(3)
    with step.lower(x).compile(max_inflight=1) as graph:
        assert not writes
        for _ in range(2):
            assert torch.equal(graph.execute(x).result(), x * 2)
            assert len(writes) == 1


@pytest.mark.parametrize("runs", [True, False])
def test_texts_wait_for_graphs_that_others_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """For a while, and for the end of the pause in which one has begun to run."""
    cache, pauses = CompileCache(EntryStore(tmp_path)), list[float]()
    monkeypatch.setattr(compile_cache, "time", SimpleNamespace(sleep=pauses.append))
    cache.keep("traces", "key", lambda: str(len(pauses)))
    cache.write_behind(lambda: runs and len(pauses) == 3)
    writer = cache._writer
    assert writer is not None
    writer.join()
    assert [*cache.read("traces", "key")] == ["4" if runs else str(compile_cache.PAUSES + 1)]


def test_a_cache_that_writes_nothing_holds_no_graph(tmp_path: Path) -> None:
    for cache in (CompileCache(), CompileCache(EntryStore(tmp_path))):
        cache.write_behind(lambda: False)
        assert not cache._awaited
