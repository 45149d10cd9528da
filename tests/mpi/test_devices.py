"""Ranks with devices: fake ones, whose streams are threads, and real ones where there are any."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from .jobs import Ended, counts_of_agreement, needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(150)]

NONBLOCKING = ["nccl4py", "--nonblocking", "--capture"]
needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def check_interruptions(ended: Ended, interrupted: Sequence[int]) -> None:
    """Every rank learns of each, and steps go on; the last one ends the job."""
    said = re.findall(r"rank (\d): in (\d): (.*)", ended.output)
    for rank in ("0", "1"):
        found = [row[1:] for row in said if row[0] == rank]
        each = ("KeyboardInterrupt ", "SystemExit 3")
        assert found == [(str(at), what) for at in interrupted for what in each], ended.output
    assert ended.code == 130, ended.output


DRIVEN = [
    "values",
    "state",
    "errors",
    "graphs",
    "within",
    "collectives",
    "timeouts",
    "variants",
    "awaits",
    "mixed",
    "after",
    "late",
]


SEALED = ["sealed", "changed", "beside"]


def check_driven(ended: Ended, passed: Sequence[str] = DRIVEN) -> None:
    """All that the job checks has passed, and its end with a graph open."""
    assert ended.code == 0, ended.output
    assert re.findall(r"passed (\w+)", ended.output) == list(passed), ended.output


def play(job: str, *words: str, fake: bool, ranks: int = 2, seconds: float = 100) -> str:
    start = ["-m", "tests.mpi.device_job"] if fake else ["-m"]
    device = {"CG_DEVICE": "cpu" if fake else "auto"}
    ended = run(ranks, [*start, f"tests.mpi.{job}", *words], variables=device, seconds=seconds)
    assert ended.code == 0, ended.output
    return ended.output


@pytest.mark.parametrize("words", [["cpu", "fake"], ["fake", "--capture"]])
def test_communicators_conform(words: list[str]) -> None:
    ended = run(2, ["-m", "tests.mpi.conformance_job", *words], seconds=100)
    assert ended.code == 0, ended.output
    assert ended.output.count("cases conform") == len([w for w in words if w[0] != "-"])


def test_pipelines_on_fake_devices() -> None:
    assert play("pipeline_job", "0", "1", fake=True).count("6 agree") == 2


def test_training_on_fake_devices() -> None:
    assert play("training_job", "4", fake=True).count("trained as on one device") == 2


def test_random_steps_on_fake_devices() -> None:
    # Two of these cannot be pipelined, and are refused by all ranks.
    assert counts_of_agreement(play("oracle_job", "0", "10", fake=True)) == [8, 8]


def test_calls_are_timed_on_fake_devices() -> None:
    assert play("measure_job", fake=True).count(": measured") == 2


def test_lifetimes_on_fake_devices() -> None:
    assert play("lifetimes_job", fake=True).count("nothing was written over") == 2


def test_failures_on_fake_devices() -> None:
    assert play("device_failure_job", fake=True).count("failures are as they should be") == 2


def test_interruptions_on_fake_devices() -> None:
    job = ["-m", "tests.mpi.device_job", "tests.mpi.device_interrupt_job", "0", "1"]
    check_interruptions(run(2, job, seconds=100), (0, 1))


@pytest.mark.parametrize(("ranks", "how"), [(2, ()), (3, ()), (2, ("--slow",))])
def test_driven_graphs_on_fake_devices(ranks: int, how: tuple[str, ...]) -> None:
    program = ["-m", "tests.mpi.device_job", *how, "tests.mpi.driven_job"]
    check_driven(run(ranks, program, seconds=100))


@pytest.mark.parametrize(("ranks", "how"), [(2, ()), (3, ()), (2, ("--slow",))])
def test_steps_that_need_no_host_on_fake_devices(ranks: int, how: tuple[str, ...]) -> None:
    program = ["-m", "tests.mpi.device_job", *how, "tests.mpi.sealed_job"]
    check_driven(run(ranks, program, seconds=100), SEALED)


def test_what_cannot_be_put_on_a_device_ends_the_job_where_nothing_is_announced() -> None:
    job = ["-m", "tests.mpi.device_job", "tests.mpi.driven_fault_job"]
    ended = run(2, job, seconds=60)
    assert ended.code != 0, ended.output
    assert "rank 1 could not put its part of an execution of 'step'" in ended.output
    assert "IndexError" in ended.output
    assert "compiled with passes='-capture'" in ended.output
    assert "nobody has noticed" not in ended.output


@pytest.mark.gpu
@needs_gpus
def test_driven_graphs_on_gpus() -> None:
    program = ["-m", "tests.mpi.driven_job", "nccl"]
    ended = run(2, program, variables={"CG_DEVICE": "auto"}, seconds=100)
    check_driven(ended, [check for check in DRIVEN if check != "within"])


@pytest.mark.gpu
@needs_gpus
def test_steps_that_need_no_host_on_gpus() -> None:
    program = ["-m", "tests.mpi.sealed_job", "nccl"]
    check_driven(run(2, program, variables={"CG_DEVICE": "auto"}, seconds=100), SEALED)


@pytest.mark.gpu
@needs_gpus
def test_a_fault_of_a_gpu_ends_the_job_with_a_message() -> None:
    program = ["-m", "tests.mpi.device_fault_job"]
    ended = run(2, program, variables={"CG_DEVICE": "auto"}, seconds=60)
    assert ended.code != 0, ended.output
    assert "the device has failed in execution" in ended.output
    assert "device-side assert" in ended.output


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize("words", [["nccl4py"], ["nccl4py", "--capture"], ["cupy"], NONBLOCKING])
def test_nccl_conforms(words: list[str]) -> None:
    pytest.importorskip({"nccl4py": "nccl.bindings", "cupy": "cupy.cuda"}[words[0]])
    assert "cases conform" in play("conformance_job", *words, fake=False)


@pytest.mark.gpu
@needs_gpus
def test_pipelines_on_gpus() -> None:
    assert play("pipeline_job", "0", "4", fake=False).count("9 agree") == 2


@pytest.mark.gpu
@needs_gpus
def test_calls_are_timed_on_gpus() -> None:
    assert play("measure_job", fake=False).count(": measured") == 2


@pytest.mark.gpu
@needs_gpus
def test_failures_on_gpus() -> None:
    output = play("device_failure_job", fake=False)
    assert output.count("failures are as they should be") == 2


@pytest.mark.gpu
@needs_gpus
def test_training_on_gpus() -> None:
    assert play("training_job", "50", fake=False).count("trained as on one device") == 2


@pytest.mark.gpu
@needs_gpus
def test_random_steps_on_gpus() -> None:
    assert counts_of_agreement(play("oracle_job", "0", "20", fake=False)) == [17, 17]


@pytest.mark.gpu
@needs_gpus
def test_lifetimes_on_gpus() -> None:
    assert play("lifetimes_job", fake=False).count("nothing was written over") == 2
