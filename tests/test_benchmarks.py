"""Benchmarks: the counts that they assert, and the facts that they write beside their figures."""

from __future__ import annotations

import json
import platform
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory_gpu, provenance
from benchmarks.finetuning import processes, rows
from benchmarks.finetuning.arms import ARMS, matching
from benchmarks.finetuning.exposed import shares
from benchmarks.finetuning.shapes import SHAPES, stage_layers
from benchmarks.gpu.counting import Counts, check, sort_out

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
STEPS = 10

# What CUDA's profiler has seen on an H200 in ten steps, with names that are no calls of CUDA.
WHOLE = {
    "cudaStreamIsCapturing": 50,
    "cudaEventRecordWithFlags": 20,
    "cudaStreamWaitEvent": 20,
    "cudaGraphLaunch": 10,
    "cudaDeviceSynchronize": 1,
    "aten::empty": 20,
    "Memcpy DtoD (Device -> Device)": 30,
    "cutlass::KernelLaunch": 80,
}
NOTHING = {"cudaDeviceSynchronize": 1}


def against(mine: Mapping[str, int], copies: int = 0) -> None:
    """Check a job of two ranks, of which the second does what it may."""
    found = [sort_out(counts) for counts in (mine, WHOLE)]
    check(found, [sort_out(NOTHING)] * 2, STEPS, [copies, 0])


def test_calls_are_counted_by_kind() -> None:
    calls = {"cudaGraphLaunch": 3, "cudaMemcpyAsync": 5, "cuStreamSynchronize": 1}
    more = {"cudaLaunchKernelExC": 2, "cuLaunchKernel": 2, "cudaMemsetAsync": 1}
    assert sort_out({**calls, **more, "sum": 9}) == Counts(3, 4, 6, 1, {**calls, **more})


def test_a_graph_a_step_and_copies_of_inputs_are_allowed() -> None:
    against(WHOLE)
    against({**WHOLE, "cudaMemcpyAsync": 20}, copies=2)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"cudaGraphLaunch": 11}, "11 launches of graphs on rank 0 in 10 steps"),
        ({"cudaGraphLaunch": 0}, "0 launches of graphs on rank 0"),
        ({"cuLaunchKernelEx": 1}, "1 launches outside of graphs on rank 0"),
        ({"cudaMemcpyAsync": 1}, "1 copies on rank 0"),
        ({"cudaStreamSynchronize": 1}, "waits for the device, 2 of them, on rank 0"),
    ],
)
def test_what_else_a_host_does_is_found(more: Mapping[str, int], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        against({**WHOLE, **more})


def test_gpus_are_counted_by_name() -> None:
    listed = "NVIDIA H200, 580.159.04\nNVIDIA H200, 580.159.04"
    assert provenance.gpus(listed) == {"gpus": {"NVIDIA H200": 2}, "driver": "580.159.04"}
    assert provenance.gpus("") == provenance.gpus("NVIDIA-SMI has failed") == {}


def test_a_program_that_is_not_there_says_nothing() -> None:
    assert provenance.output_of(["no-such-program"]) == ""
    assert provenance.output_of([sys.executable, "-c", "print('x'); raise SystemExit(1)"]) == ""


def test_figures_of_gpus_say_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", "--sections", "profile,host"])
    report = runpy.run_path(str(BENCHMARKS / "gpu" / "report.py"))["Report"]()
    report.note("profile", "graph launches in a step", 1.0, "")
    report.write(tmp_path / "gpu.json")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["value"] for row in written["rows"]] == [1.0]
    assert written["command"] == "python benchmarks/gpu.py --sections profile,host"
    assert written["ranks"] == 1
    assert written["machine"]["python"] == platform.python_version()
    assert {"torch", "numpy"} <= set(written["machine"]["packages"])
    assert {"date", "revision"} <= set(written)


# -- fine-tuning ----------------------------------------------------------------------------------


def kernel(name: str, begin: float, end: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}


def test_communication_is_exposed_where_nothing_else_runs() -> None:
    events = [
        kernel("gemm", 0.0, 1000.0),
        kernel("gemm", 500.0, 2000.0),  # on another stream
        kernel("ncclDevKernel_SendRecv", 1500.0, 3500.0),
        kernel("ncclDevKernel_AllReduce", 3000.0, 4000.0),
        kernel("gemm", 3200.0, 3400.0),
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 2000.0, "dur": 9000.0},
        {"name": "a mark"},
    ]
    seen = shares(events, steps=2)
    assert seen["communication_ms"] == pytest.approx(1.25)
    assert seen["computation_ms"] == pytest.approx(1.1)
    assert seen["exposed_ms"] == pytest.approx(0.9)
    assert seen["exposed_share"] == pytest.approx(0.72)
    assert shares([], steps=1)["exposed_share"] == 0.0


def test_shapes_are_those_of_the_models() -> None:
    assert SHAPES["0.5B"].parameters == 494_032_768
    assert SHAPES["3B"].parameters == 3_085_938_688
    assert [len(each) for each in stage_layers(SHAPES["0.5B"], 2)] == [16, 8]
    assert [len(each) for each in stage_layers(SHAPES["0.5B"], 4)] == [8, 8, 8, 0]
    assert [len(each) for each in stage_layers(SHAPES["3B"], 4)] == [10, 10, 10, 6]
    assert [each.start for each in stage_layers(SHAPES["3B"], 4)] == [0, 10, 20, 30]


def test_arms_are_chosen_by_name() -> None:
    assert [arm.name for arm in matching(["torch-ddp*", "cg-dp"])] == [
        "cg-dp",
        "torch-ddp-compiled",
        "torch-ddp",
    ]
    assert len(matching([])) == len(ARMS)
    with pytest.raises(ValueError, match="no arm is called cg-ddp; there are cg-dp, "):
        matching(["cg-ddp"])


def job(code: str, log: Path, seconds: float) -> str:
    return processes.run([sys.executable, "-c", code], {}, log, seconds)


def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert job("print('fine')", log, 60.0) == ""
    failing = "import sys; sys.stderr.write('ValueError: no\\nChildFailedError: x\\nrank 1\\n')"
    assert job(f"{failing}; sys.exit(3)", log, 60.0) == "ValueError: no"
    assert job("raise SystemExit(4)", log, 60.0) == "exit code 4: no output"


def test_a_job_that_hangs_is_ended(tmp_path: Path) -> None:
    assert job("import time; time.sleep(600)", tmp_path / "log", 1.0) == "timeout: ended after 1 s"


def test_all_that_a_job_has_started_is_ended() -> None:
    code = (
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        began = processes.descendants(parent.pid)[child]
        assert processes.is_running(child, began)
        processes.end(parent)
    assert not processes.is_running(child, began)


def row(arm: str, *losses: float, **more: Any) -> dict[str, Any]:
    rank = {"communication": None, "step_ms": []}
    measured = {"losses": losses, "tokens_per_second": 9.0, "mfu": None, "peak_gib": [1.5, None]}
    measured |= {"until_first_step_s": 3.0, "ranks": [rank, rank]}
    return {"shape": "tiny", "arm": arm, "status": "ok", **measured, **more}


def test_losses_are_held_against_those_of_the_first_arm() -> None:
    failed = {"shape": "tiny", "arm": "c", "status": "failed", "error": "ValueError: no"}
    many = [row("a", 5.0, 4.0), row("b", 5.04, 4.1), failed]
    assert rows.disagreements(many) == []
    assert rows.disagreements([*many, row("d", 5.0, float("nan"))]) == [
        "tiny d: last loss nan, not 4.0000 of a"
    ]
    lines = rows.table(many).splitlines()
    assert " ".join(lines[1].split()) == "tiny a 9 - 1.5 - - - - 3.0 5.0000 4.0000"
    assert " ".join(lines[3].split()) == "tiny c failed: ValueError: no"


def test_memory_on_a_gpu_begins_no_arm_without_time_for_it(tmp_path: Path) -> None:
    record = tmp_path / "memory.json"
    options = ["--only", "train-*", "--seconds", "1", "--json", str(record)]
    assert memory_gpu.main(options) == 0
    rows = json.loads(record.read_text())["rows"]
    assert [row["arm"] for row in rows] == [a for a in memory_gpu.ARMS if a.startswith("train")]
    assert {row["status"] for row in rows} == {"skipped"}


def test_arms_of_memory_must_have_the_same_losses() -> None:
    arms = [("layers-keep", 2.0), ("layers-torch", 2.01), ("layers-offload", float("nan"))]
    seen = [{"arm": arm, "status": "ok", "losses": [loss]} for arm, loss in arms]
    wrong = memory_gpu.disagreements([*seen, {"arm": "layers-memory", "status": "failed"}])
    assert [words.split()[0] for words in wrong] == ["layers-offload"]
