"""Programs of the cache: read for the same step and options, and made anew for any other."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cg
from cg.backends.agreement.plan_hash import plan_hash
from cg.backends.virtual.world import VirtualWorld
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Module, Program
from cg.ir.text import stored_programs
from cg.ir.text.printer import format_module, format_program
from cg.launch.cache import program_entries
from cg.launch.cache.compile_cache import CompileCache
from cg.launch.cache.entry_store import EntryStore
from cg.launch.cache.program_entries import Scheduled, from_cache
from cg.launch.world.world import use_world
from cg.passes.manager.manager import run_on_copy
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.manager.registry import parse_switches
from cg.passes.schedules import Pipeline, Schedule, gpipe, table, zb_h1


@cg.actor
class Stage(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


@pytest.fixture(scope="module")
def module() -> Module:
    with use_world(VirtualWorld(2)):
        stages = [Stage.on(rank)() for rank in range(2)]

        @cg.trace
        def step(x):  # type: ignore[no-untyped-def]
            losses = []
            for part in cg.microbatches(x, 2):
                for stage in stages:
                    part = stage.forward(part)
                losses.append(part.mean())
            loss = cg.mean(losses)
            cg.backward(loss)
            return loss

        return step.lower(torch.ones(4, 4)).trace.module


class Counted:
    """A cache in a folder, as one start has it, and how often this start has run the passes."""

    def __init__(self, folder: Path, rank: int | None = None) -> None:
        self.cache = CompileCache(EntryStore(folder))
        self.rank = rank
        self.runs = 0

    def compiled(
        self, module: Module, schedule: Schedule | None = None, **options: Any
    ) -> Scheduled:
        pipeline_of = functools.partial(default_pipeline, **options)

        def make() -> Scheduled:
            self.runs += 1
            return Scheduled(*run_on_copy(pipeline_of(schedule), module), "")

        text, depends = format_module(module, True), (schedule, pipeline_of)
        scheduled = from_cache(self.cache, module, text, depends, make, long=0.0, rank=self.rank)
        self.cache.flush()
        return scheduled


def test_a_second_start_has_the_same_programs(module: Module, tmp_path: Path) -> None:
    first, second = Counted(tmp_path), Counted(tmp_path)
    fresh, again = first.compiled(module), second.compiled(module)
    assert (first.runs, second.runs) == (1, 0)
    assert format_module(again.module, True) == format_module(fresh.module, True)
    assert again.reports == fresh.reports


def text_of(scheduled: Scheduled, rank: int) -> str:
    return format_program(scheduled.module.program_of(rank), locations=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_own_program_alone(
    rank: int, module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = Counted(tmp_path).compiled(module)
    read: list[str] = []
    parse = stored_programs.parse_program

    def counted(text: str, declared: Module, file: str) -> Program:
        read.append(file)
        return parse(text, declared, file)

    monkeypatch.setattr(stored_programs, "parse_program", counted)
    start = Counted(tmp_path, rank)
    again = start.compiled(module)
    assert start.runs == 0
    assert plan_hash(again.module) == plan_hash(fresh.module)
    assert text_of(again, rank) == text_of(fresh, rank)
    assert read == [f"the compile cache, rank {rank}"]
    assert format_module(again.module, True) == format_module(fresh.module, True)


def test_a_rank_does_not_run_a_program_with_an_error(module: Module, tmp_path: Path) -> None:
    fresh = Counted(tmp_path).compiled(module)
    (file,) = tmp_path.glob("*/*.entry")
    text = file.read_text().partition("\n")[2]
    key = program_entries._key(
        format_module(module, True), (None, functools.partial(default_pipeline))
    )
    before, mark, behind = text.partition("program @1")
    EntryStore(tmp_path).write(
        "programs", key, before + mark + behind.replace("call(", "recall("), 1
    )
    for rank, runs in enumerate((0, 1)):
        start = Counted(tmp_path, rank)
        scheduled = start.compiled(module)
        assert start.runs == runs
        assert text_of(scheduled, rank) == text_of(fresh, rank)


def renamed(module: Module) -> Module:
    other = clone(module)
    other.name = "another"
    return other


def made_of_table() -> Schedule:
    return table({0: "0F0 0B0 0F1 0B1", 1: "1F0 1B0 1F1 1B1"})


CHANGES: dict[str, Callable[[Module], tuple[Module, Schedule | None, dict[str, Any]]]] = {
    "another schedule": lambda m: (m, gpipe(), {}),
    "a schedule that splits": lambda m: (m, zb_h1(), {}),
    "another step": lambda m: (renamed(m), None, {}),
    "a switch": lambda m: (m, None, {"switches": parse_switches("-overlap")}),
    "an option": lambda m: (m, None, {"tasks_in_flight": 2}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_programs_anew(change: str, module: Module, tmp_path: Path) -> None:
    Counted(tmp_path).compiled(module)
    other, schedule, options = CHANGES[change](module)
    start = Counted(tmp_path)
    scheduled = start.compiled(other, schedule, **options)
    assert start.runs == 1
    fresh, _ = run_on_copy(default_pipeline(schedule, **options), other)
    assert format_module(scheduled.module, True) == format_module(fresh, True)


def test_another_version_of_cg_makes_programs_anew(
    module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Counted(tmp_path).compiled(module)
    monkeypatch.setattr(program_entries, "source_digest", lambda: "another")
    start = Counted(tmp_path)
    start.compiled(module)
    assert start.runs == 1


def test_a_schedule_of_a_script_is_not_kept(
    module: Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def order(pipeline: Pipeline) -> Any:
        return gpipe()(pipeline)

    caplog.set_level(logging.INFO, "cg")
    start = Counted(tmp_path)
    for _ in range(2):
        start.compiled(module, Schedule("mine", order))
    assert start.runs == 2
    assert "order is a function that is not of cg" in caplog.text


def test_a_program_that_is_made_fast_is_not_kept(module: Module, tmp_path: Path) -> None:
    cache = CompileCache(EntryStore(tmp_path))

    def make() -> Scheduled:
        return Scheduled(*run_on_copy(default_pipeline(), module), "")

    from_cache(cache, module, format_module(module, True), (), make, long=float("inf"))
    cache.flush()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("phase=scheduled", "phase=traced"),
        lambda text: text.replace("return(", "go back("),
        lambda text: text.replace("%x", "%y", 1),
        lambda text: text.replace('"choice"', '"chance"'),
        lambda text: "",
    ],
)
def test_a_text_that_is_no_such_program_is_a_miss(
    change: Callable[[str], str], module: Module, tmp_path: Path
) -> None:
    """The digest is right, and the content is not."""
    Counted(tmp_path).compiled(module)
    (file,) = tmp_path.glob("*/*.entry")
    text = file.read_text().partition("\n")[2]
    store = EntryStore(tmp_path)
    key = program_entries._key(
        format_module(module, True), (None, functools.partial(default_pipeline))
    )
    assert list(store.read("programs", key, 1)) == [text]
    assert change(text) != text
    store.write("programs", key, change(text), 1)
    start = Counted(tmp_path)
    fresh, _ = run_on_copy(default_pipeline(), module)
    assert start.compiled(module).module == fresh
    assert start.runs == 1
