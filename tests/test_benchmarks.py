"""Benchmarks: the counts that they assert, and the facts that they write beside their figures."""

from __future__ import annotations

import json
import platform
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import provenance
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
