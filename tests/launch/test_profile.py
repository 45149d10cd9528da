"""cg.profile in one process: what is recorded, what is written, what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import cg
from cg.backends.program.code import Code
from cg.backends.program.instructions import Instruction
from cg.backends.program.tracing import InstructionLog, device_ranges
from cg.ir.ops import Call
from cg.launch.api.compiled import Compiled
from cg.launch.pictures.model import WorkKind
from tests.mpi.profile_job import check_trace, events_of

from ..stages import TrainedStage
from ..worlds import virtual_world


@cg.actor
class Speaker:
    def __init__(self, word: str) -> None:
        self.word = word

    def say(self, text: str) -> str:
        if text.startswith("bad"):
            raise ValueError(text)
        return f"{text} {self.word}"


world = virtual_world(2)


def training(name: str = "step") -> Compiled:
    stages = [TrainedStage.on(rank)(rank) for rank in range(2)]

    def step(x: torch.Tensor) -> torch.Tensor:
        losses = [stages[1].forward(stages[0].forward(mx)).mean() for mx in cg.microbatches(x, 3)]
        loss = cg.mean(losses)
        cg.backward(loss)
        for stage in stages:
            stage.update()
        return loss

    step.__name__ = name
    return cg.trace(step).lower(X).compile()


def speaking(inflight: int = 4) -> Compiled:
    speakers = [Speaker.on(0)("a"), Speaker.on(1)("b"), Speaker.on(0)("c")]

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def talk(x: Any) -> Any:
        for speaker in speakers:
            x = speaker.say(x)
        return x

    return talk.lower(cg.object).compile(max_inflight=inflight)


X = torch.zeros(6, 4)


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_instruction_of_every_execution_is_in_the_trace(tmp_path: Path) -> None:
    compiled = training()
    compiled(X)
    with cg.profile(tmp_path / "out") as profile:
        compiled(X)
        compiled(X)
    compiled(X)
    assert profile.trace == tmp_path / "out" / "trace.json"
    events = events_of(profile.trace)
    check_trace(events, ranks=2, uncertainty=0.0)
    assert {event["args"]["execution"] for event in events if event["ph"] == "X"} == {1, 2}
    calls = Counter(event["name"] for event in events if event.get("cat") == "forward")
    assert len(calls) == 2 * 3
    assert set(calls.values()) == {2}
    (update, *_) = [event for event in events if event.get("cat") == "update"]
    assert Path(__file__).name in update["args"]["source"]
    assert sum(event["ph"] == "s" for event in events) == 2 * 2 * 3


def test_the_manifest_says_what_was_run(tmp_path: Path) -> None:
    compiled = training()
    with cg.profile(tmp_path) as profile:
        compiled(X)
    found = read(profile.manifest)
    assert profile.manifest == tmp_path / "manifest.json"
    assert found["trace"] == "trace.json"
    assert found["world"] == {"size": 2, "kind": "virtual", "machines": [0, 0]}
    assert found["versions"]["torch"] == torch.__version__
    assert found["command"]
    ((step),) = found["steps"]
    assert (step["name"], step["executions"], len(step["plan"])) == ("step", 1, 64)
    assert found["clocks"]["start"] == [{"offset": 0.0, "uncertainty": 0.0}] * 2
    slices = [event for event in events_of(profile.trace) if event["ph"] == "X"]
    assert sum(each["recorded"] for each in found["processes"]) == len(slices)
    assert all(each["left_out"] == 0 for each in found["processes"])


def test_executions_in_flight_have_lanes_of_their_own(tmp_path: Path) -> None:
    with cg.profile(tmp_path / "talk.json") as profile:
        with speaking() as graph:
            futures = [graph.execute(str(i)) for i in range(6)]
            assert [f.result() for f in futures] == [f"{i} a b c" for i in range(6)]
        assert not profile.trace.exists()
    assert profile.manifest.name == "talk.manifest.json"
    events = events_of(profile.trace)
    check_trace(events, ranks=2, uncertainty=0.0)
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "compute 1"} <= threads
    executions = {e["args"]["execution"] for e in events if e.get("cat") == "call"}
    assert executions == set(range(6))
    picture = profile.picture(execution=2)
    assert picture.title == "@talk, execution 2"
    says = [s for s in picture.slices() if s.kind is WorkKind.CALL]
    assert [s.label for s in says] == ["say"] * 3
    assert min(s.start for s in picture.slices()) == 0.0


def test_steps_that_are_compiled_inside_are_recorded(tmp_path: Path) -> None:
    with cg.profile(tmp_path) as profile:
        one, other = training("one"), training("other")
        one(X)
        other(X)
        other(X)
    steps = {step["name"]: step["executions"] for step in read(profile.manifest)["steps"]}
    assert steps == {"one": 1, "other": 2}
    assert profile.picture().title == "@other, execution 1"
    assert profile.picture("one").title == "@one, execution 0"


def test_pictures_of_a_profile(tmp_path: Path) -> None:
    compiled = training()
    with cg.profile(tmp_path) as profile:
        compiled(X)
    profile.visualize(tmp_path / "a.svg")
    profile.visualize(tmp_path / "a.html", predicted=compiled.simulate())
    assert (tmp_path / "a.svg").read_text().startswith("<svg ")
    page = (tmp_path / "a.html").read_text()
    assert page.index("rank 1 predicted") < page.index("rank 1 measured")
    with pytest.raises(ValueError, match=r"no step 'stop' has run .*; it saw 'step'"):
        profile.picture("stop")
    with pytest.raises(ValueError, match="execution 7 was not recorded; there are 1 of them"):
        profile.picture(execution=7)


def test_nothing_is_recorded_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = training()
    recorded: list[InstructionLog] = []
    wrap = InstructionLog.wrap

    def spy(log: InstructionLog, code: Code) -> list[Instruction]:
        recorded.append(log)
        return wrap(log, code)

    monkeypatch.setattr(InstructionLog, "wrap", spy)
    with cg.profile(tmp_path):
        compiled(X)
    before = (tmp_path / "trace.json").read_text()
    compiled(X)
    assert [log.left_out for log in recorded] == [0, 0]
    assert (tmp_path / "trace.json").read_text() == before


def test_an_execution_that_fails_is_there_as_far_as_it_came(tmp_path: Path) -> None:
    graph = speaking()
    with cg.profile(tmp_path) as profile:
        with pytest.raises(ValueError, match="bad"):
            graph.execute("bad").result()
        assert graph.execute("good").result() == "good a b c"
    graph.close()
    says = [e for e in events_of(profile.trace) if e.get("cat") == "call"]
    assert Counter(e["args"]["execution"] for e in says) == {0: 1, 1: 3}


def test_an_exception_leaves_what_was_recorded(tmp_path: Path) -> None:
    compiled = training()

    def fail() -> None:
        with cg.profile(tmp_path):
            compiled(X)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    check_trace(events_of(tmp_path / "trace.json"), ranks=2, uncertainty=0.0)
    with cg.profile(tmp_path):
        compiled(X)


def test_beyond_the_limit_instructions_are_counted(tmp_path: Path) -> None:
    compiled = training()
    with cg.profile(tmp_path, limit=10) as profile:
        compiled(X)
    slices = [event for event in events_of(profile.trace) if event["ph"] == "X"]
    assert len(slices) == 10
    assert read(profile.manifest)["processes"][0]["left_out"] > 10
    with pytest.raises(ValueError, match="limit=0: a profile records at least 1"):
        cg.profile(tmp_path, limit=0)


def test_one_profile_at_a_time(tmp_path: Path) -> None:
    with (
        cg.profile(tmp_path),
        pytest.raises(RuntimeError, match=r"recorded already, to .*trace\.json: end that first"),
        cg.profile(tmp_path / "other"),
    ):
        pass


def test_a_profile_that_saw_nothing_is_still_one(tmp_path: Path) -> None:
    with cg.profile(tmp_path) as profile:
        pass
    assert events_of(profile.trace) == []
    with pytest.raises(ValueError, match="no step '' has run inside the profile; it saw nothing"):
        profile.picture()


def test_where_there_is_a_device_instructions_are_ranges_of_its_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    @contextmanager
    def mark(text: str) -> Iterator[None]:
        seen.append(text)
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", mark)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    compiled = training()
    with cg.profile(tmp_path) as profile:
        compiled(X)
    assert read(profile.manifest)["processes"][0]["device"] == "a device"
    assert {text for text in seen if text.startswith("0F1 @")} == {
        f"0F1 @{call.fn.name}" for call in calls_of(compiled, "0F1")
    }


def calls_of(compiled: Compiled, task: str) -> list[Call]:
    ops = [op for program in compiled.module.programs for op in program.ops]
    return [op for op in ops if isinstance(op, Call) and str(op.task) == task]


@pytest.mark.gpu
def test_on_a_gpu_ranges_are_nvtx(tmp_path: Path) -> None:
    # Of the ranges themselves only Nsight Systems knows; they must not get in the way.
    assert device_ranges() is torch.cuda.nvtx.range
    compiled = training()
    with cg.profile(tmp_path) as profile:
        compiled(X)
    check_trace(events_of(profile.trace), ranks=2, uncertainty=0.0)
    assert read(profile.manifest)["processes"][0]["device"] == torch.cuda.get_device_name()
