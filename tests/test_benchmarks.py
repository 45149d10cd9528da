"""What benchmarks assert of what they count, and what they write beside their figures."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks.gpu.counting import Counts, check, sort_out

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
