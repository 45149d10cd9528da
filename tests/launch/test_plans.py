"""Plans that are saved and loaded: by the same step, by another, edited, and by ranks of MPI."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.failures.flight import FlightRecord, Position
from cg.backends.virtual.world import VirtualWorld
from cg.ir.ops import Recv
from cg.ir.text.plan_file import PlanFile
from cg.ir.text.stored_plan import StoredPlan
from cg.launch.tools import opt
from cg.launch.world.world import use_world
from cg.passes.manager.manager import PassManager

from .conftest import Launch
from .programs.planned import Training
from .test_auto_schedule import COSTS, HIDDEN, WIDE, gradients, wide


@dataclass(frozen=True)
class Saved:
    """A plan of a training on two ranks, and the losses of the run that has compiled it."""

    world: VirtualWorld
    training: Training
    file: Path
    losses: list[float]

    def load(self, file: Path | None = None, microbatches: int = 2) -> list[float]:
        """The losses by a plan of a file."""
        with use_world(self.world):
            lowered = self.training.lower(microbatches)
            return self.training.losses(cg.load_plan(lowered, file or self.file))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    file, world = tmp_path_factory.mktemp("plans") / "step.plan", VirtualWorld(2)
    with use_world(world):
        training = Training()
        compiled = training.lower().compile(schedule=cg.schedules.gpipe())
        compiled.save(file)
        return Saved(world, training, file, training.losses(compiled))


def test_a_loaded_plan_is_what_was_compiled(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: PassManager, module: object) -> None:
        raise AssertionError(f"passes run: {self.pipeline}")

    monkeypatch.setattr(PassManager, "run", run)
    assert saved.load() == saved.losses


def test_ranks_of_mpi_run_a_plan_that_one_process_has_saved(
    saved: Saved, launch: Launch, tmp_path: Path
) -> None:
    # Actors are numbered in each process. Those of the job are the first there.
    text = saved.file.read_text()
    for rank, stage in enumerate(saved.training.stages):
        text = re.sub(rf"\b{stage.name}\b", f"stage{rank}", text)
    file, changed = reproven(text, tmp_path), tmp_path / "changed.plan"
    # In the program of rank 1, which rank 0 does not read.
    before, program, after = file.read_text().partition("  program @1(")
    changed.write_text(before + program + after.replace("slot = 0", "slot = 1", 1))
    assert changed.read_text() != file.read_text()
    job = launch(2, "planned.py", str(file), str(changed), warm=True)
    assert job.finish() == 0, job.output
    for rank in range(2):
        own = rf"ops on rank {rank} of 2> read \[{rank}\] losses={re.escape(str(saved.losses))}\n"
        assert re.search(own, job.output), job.output
        assert f"refused on rank {rank}: {changed} was changed since its programs" in job.output


def test_another_step_is_refused_with_what_differs(saved: Saved) -> None:
    with pytest.raises(cg.PlanFileError, match="plan of another step than train") as raised:
        saved.load(microbatches=4)
    assert re.search(r"the plan:    function @stage\d+.forward\(f32\[4,4\]\) ->", str(raised.value))
    assert re.search(r"this script: function @stage\d+.forward\(f32\[2,4\]\)", str(raised.value))


def test_other_ranks_are_refused(saved: Saved) -> None:
    message = "is a plan for 2 ranks, and there are 3"
    with use_world(VirtualWorld(3)), pytest.raises(cg.PlanFileError, match=message):
        cg.load_plan(Training().lower(), saved.file)


def test_other_devices_are_refused(saved: Saved, tmp_path: Path) -> None:
    text = saved.file.read_text().replace("// devices {}", '// devices {"ranks": "nccl+nccl"}')
    message = 'is for devices with the fabrics {"ranks": "nccl.nccl"}, and here are ranks without'
    with pytest.raises(cg.PlanFileError, match=message):
        saved.load(reproven(text, tmp_path))


def test_an_edited_plan_is_refused(saved: Saved, tmp_path: Path) -> None:
    text = saved.file.read_text()
    edited = tmp_path / "edited.plan"
    edited.write_text(text.replace("slot = 0", "slot = 1"))
    assert edited.read_text() != text
    message = "changed since its programs were proven. Prove it again: cg-opt .*edited.plan > new"
    with pytest.raises(cg.PlanFileError, match=message):
        saved.load(edited)


def test_cg_opt_proves_what_it_reads(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert opt.main([str(saved.file)]) == 0
    assert capsys.readouterr().out == saved.file.read_text()
    lines = saved.file.read_text().splitlines(keepends=True)
    send = next(n for n, line in enumerate(lines) if " = send(" in line)
    unsent = tmp_path / "unsent.plan"
    unsent.write_text("".join(lines[:send] + lines[send + 1 :]))
    assert opt.main([str(unsent)]) == 1
    assert "error: " in capsys.readouterr().err


def reproven(text: str, folder: Path) -> Path:
    """The text of a changed plan as cg-opt writes it."""
    stdin, stdout = sys.stdin, sys.stdout
    sys.stdin, sys.stdout = io.StringIO(text), io.StringIO()
    try:
        assert opt.main(["-"]) == 0
        (folder / "new.plan").write_text(sys.stdout.getvalue())
    finally:
        sys.stdin, sys.stdout = stdin, stdout
    return folder / "new.plan"


def test_an_edited_plan_runs_once_it_is_proven(saved: Saved, tmp_path: Path) -> None:
    """An order by hand: an op of rank 0 goes ahead of the one before it, which it does not need."""
    lines = saved.file.read_text().splitlines(keepends=True)
    views = [n for n, line in enumerate(lines) if " = view(" in line and not line.startswith("//")]
    first = views[0]
    assert "= call(" in lines[first + 1], lines[first + 1]
    second = next(n for n in views if n > first)
    moved = lines.pop(second)
    lines.insert(first, moved)
    file = reproven("".join(lines), tmp_path)
    assert moved in file.read_text()
    assert file.read_text() != saved.file.read_text()
    assert saved.load(file) == saved.losses


def test_programs_with_an_error_are_refused_whoever_has_made_the_digests(
    saved: Saved, tmp_path: Path
) -> None:
    text = re.sub(r"(recv\(\) {chan = \d+, .*?peer = )\d", r"\g<1>1", saved.file.read_text())
    (tmp_path / "made.plan").write_text(str(PlanFile.of(text, "made.plan")))
    with pytest.raises(cg.PlanFileError, match=r"has programs with an error; .*\n.*with peer 1"):
        saved.load(tmp_path / "made.plan")


def test_where_ranks_are_is_said_of_a_plan_whose_file_has_changed(
    saved: Saved, tmp_path: Path
) -> None:
    file = tmp_path / "step.plan"
    file.write_text(saved.file.read_text())
    module = StoredPlan.open(file).module
    waiting = next(i for i, op in enumerate(module.program_of(0).ops) if isinstance(op, Recv))
    positions = [Position(0, 0, waiting, awaited=waiting), Position(1, 0, 0)]
    file.write_text("somebody has written into it")
    lines = FlightRecord(module, positions).describe().splitlines()
    assert re.fullmatch(r"  rank 1 is at op 0 of its program, but .*was changed since.*", lines[1])
    assert len(lines) == 2


def test_facts_of_another_version_are_refused(saved: Saved, tmp_path: Path) -> None:
    text = saved.file.read_text().replace('"max_inflight"', '"most_in_flight"')
    (tmp_path / "other.plan").write_text(str(PlanFile.of(text, "other.plan")))
    with pytest.raises(cg.PlanFileError, match="facts of another version of cg: save it again"):
        saved.load(tmp_path / "other.plan")


def test_a_file_that_is_not_there(saved: Saved) -> None:
    with pytest.raises(OSError, match=r"rank 0 could not read /nowhere/x\.plan"):
        saved.load(Path("/nowhere/x.plan"))


def test_a_file_that_cannot_be_written_leaves_nothing(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with use_world(saved.world):
        compiled = saved.training.lower().compile()
        with pytest.raises(OSError, match=r"rank 0 could not write .*folder"):
            compiled.save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_is_not_lowered_is_refused(saved: Saved) -> None:
    with use_world(saved.world):
        compiled = saved.training.lower().compile()
        with pytest.raises(TypeError, match=r"give the step as it is lowered, step\.lower"):
            cg.load_plan(compiled, saved.file)  # type: ignore[arg-type]


@cg.actor
class Doubler:
    """Doubles."""

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_a_driven_graph_is_loaded(tmp_path: Path) -> None:
    with use_world(VirtualWorld(2)):
        doubler = Doubler.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x: torch.Tensor) -> torch.Tensor:
            return doubler.double(x)

        x = torch.arange(3.0)
        with step.lower(x).compile(max_inflight=2) as compiled:
            compiled.save(tmp_path / "driven.plan")
        with cg.load_plan(step.lower(x), tmp_path / "driven.plan") as loaded:
            futures = [loaded.execute(x) for _ in range(2)]
            assert all(torch.equal(future.result(), 2 * x) for future in futures)


def test_several_signatures_are_refused(saved: Saved, tmp_path: Path) -> None:
    with use_world(VirtualWorld(2)):
        doubler = Doubler.on(1)()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            return doubler.double(x)

        lowered = step.lower_many([torch.zeros(2), torch.zeros(3)])
        with pytest.raises(ValueError, match=r"compiled for 2: .* Lowered.apart\(\)"):
            lowered.compile().save(tmp_path / "both.plan")
        with pytest.raises(cg.PlanFileError, match="was lowered for 2: load what"):
            cg.load_plan(lowered, saved.file)
        one, _ = lowered.apart()
        one.compile().save(tmp_path / "one.plan")
        loaded = cg.load_plan(one, tmp_path / "one.plan")
        assert torch.equal(loaded(torch.ones(2)), torch.full((2,), 2.0))


def loaded_alike(
    lowered: cg.Lowered, compiled: cg.Compiled, layers: list[Any], file: Path
) -> cg.Compiled:
    """The plan of a step, saved and loaded, which gives the same loss and gradients."""
    compiled.save(file)
    loss, expected = compiled(WIDE), gradients(layers)
    for layer in layers:
        layer.local.zero_grad()
    loaded = cg.load_plan(lowered, file)
    assert torch.equal(loaded(WIDE), loss)
    assert all(map(torch.equal, gradients(layers), expected))
    return loaded


@pytest.mark.slow  # the search takes most of it
def test_stages_that_a_search_lets_recompute_do_so_again(tmp_path: Path) -> None:
    with use_world(VirtualWorld(2)):
        layers, step = wide()
        lowered = step.lower(WIDE)
        room = 3 * HIDDEN
        schedule = cg.schedules.auto(costs=COSTS, max_bytes=room, remat=True)
        compiled = lowered.compile(schedule=schedule)
        assert "recompute" in compiled.schedule_report
        loaded = loaded_alike(lowered, compiled, layers, tmp_path / "remat.plan")
        assert max(plan.values for plan in loaded.memory_analysis()) <= 1.03 * room


def test_forwards_that_save_less_do_so_again(tmp_path: Path) -> None:
    """And what is loaded can be saved."""
    with use_world(VirtualWorld(2)):
        layers, step = wide()
        lowered = step.lower(WIDE)
        most = max(plan.peak for plan in lowered.compile().memory_analysis())
        compiled = lowered.compile(memory=int(0.8 * most))
        recomputed = re.findall(r"computes (\S+) % of the forward again", compiled.memory_report)
        assert set(recomputed) > {"0.0"}
        loaded = loaded_alike(lowered, compiled, layers, tmp_path / "limited.plan")
        assert max(plan.peak for plan in loaded.memory_analysis()) <= 0.8 * most
        loaded.save(tmp_path / "again.plan")
        assert (tmp_path / "again.plan").read_text() == (tmp_path / "limited.plan").read_text()


@cg.actor
class WritesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h = h * h.sigmoid()
        h.mul_(0.5)
        t = torch.tanh(h)
        u = t.clone()
        u[..., 0] += x[..., 1]
        return x + u.add_(1.0) * t


def test_a_limit_that_binds_nothing_leaves_the_trace(tmp_path: Path) -> None:
    """So the plan is that of a compilation without it."""
    with use_world(VirtualWorld(2)):
        layer = WritesInPlace.on(cg.mesh(dp=2), plan={"forward(x)": cg.cut(0, "dp")})()

        @cg.trace
        def step(x: Tensor) -> Tensor:
            loss = layer.forward(x).square().mean()
            cg.backward(loss)
            return loss

        lowered = step.lower(torch.randn(8, 7, 8))
        lowered.compile().save(tmp_path / "plain.plan")
        lowered.compile(memory="1GiB").save(tmp_path / "roomy.plan")
        cg.load_plan(lowered, tmp_path / "roomy.plan")
    assert (tmp_path / "roomy.plan").read_text() == (tmp_path / "plain.plan").read_text()
