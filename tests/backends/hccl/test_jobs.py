"""The unmodified HCCL backend on ranks of MPI, over the mock and the stand-in for torch_npu."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ...equality import comparisons
from ...mpi.jobs import ROOT, Ended, environment, needs_mpi, run
from ...mpi.test_devices import DEVICE_ONLY, check_driven, check_interruptions
from .build import STANDIN, needs_compiler
from .conformance_job import served
from .test_npu import needs_no_torch_npu

pytestmark = [*needs_mpi, needs_compiler, pytest.mark.timeout(300)]

TINY = "--layers 4 --width 12 --batch 4 --microbatches 2 --steps 3 --rate 1e-2 --sample 0"


def on_npus(
    mock: Path, ranks: int, program: Sequence[str], seconds: float = 250, **variables: str
) -> Ended:
    """A job whose ranks have an NPU each."""
    path = os.pathsep.join([str(STANDIN), environment()["PYTHONPATH"], str(ROOT)])
    given = {
        "CG_DEVICE": "auto",
        "CUDA_VISIBLE_DEVICES": "",  # a machine with NPUs alone
        "HCCL_SO_PATH": str(mock),
        "HCCL_EXEC_TIMEOUT": "60",
        "PYTHONPATH": path,
    }
    return run(ranks, program, variables={**given, **variables}, seconds=seconds, warm=True)


def calls(output: str, rank: int, part: str) -> dict[str, int]:
    """How often a part of the suite has called each of HCCL's operations."""
    (found,) = re.findall(rf"rank {rank}: {part} called ([^\n]*)", output)
    return {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", found)}


@pytest.mark.parametrize(
    ("ranks", "seeds", "trainings"),
    [
        (4, (100, 102), 0),
        pytest.param(2, (0, 6), 4, marks=pytest.mark.slow),
        pytest.param(2, (6, 14), 0, marks=pytest.mark.slow),
        pytest.param(4, (102, 106), 0, marks=pytest.mark.slow),
    ],
)
def test_conformance_random_steps_and_training(
    mock: Path, ranks: int, seeds: tuple[int, int], trainings: int
) -> None:
    """All of it is for --slow; by default `test_the_self_test` conforms and trains on 2 NPUs."""
    words = [*map(str, seeds), *([] if trainings else ["less"])]
    check_suite(on_npus(mock, ranks, [*SUITE, *words]), ranks, seeds, trainings)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 4])
def test_more_random_steps_and_every_schedule(mock: Path, ranks: int) -> None:
    ended = on_npus(mock, ranks, [*SUITE, "200", "220", "every"], seconds=1400)
    check_suite(ended, ranks, (200, 220), trainings=comparisons(ranks))


SUITE = ("-m", "tests.backends.hccl.suite_job")


def check_suite(ended: Ended, ranks: int, seeds: tuple[int, int], trainings: int) -> None:
    """All cases conform, all steps that were taken agree, and so does all training."""
    assert ended.code == 0, ended.output
    cases = len(list(served(ranks, less=not trainings)))
    assert cases > (70 if trainings else 40)
    for rank in range(ranks):
        ran, replayed = re.findall(rf"rank {rank}: (\d+) cases .*, (\d+) replays", ended.output)[0]
        assert int(ran) == cases
        assert int(replayed) > 0
        agreed = re.findall(rf"rank {rank}: (\d+) of \d+ agree", ended.output)
        assert int(agreed[0]) >= 0.6 * (seeds[1] - seeds[0])
        if not trainings:
            continue
        assert f"rank {rank}: {trainings} trainings agree" in ended.output
        trained = calls(ended.output, rank, "training")
        # One forward, one backward: activations and gradients cross.
        assert min(trained["Send"], trained["Recv"], trained["BatchSendRecv"]) > 0
    moved = calls(ended.output, 0, "conformance")
    assert min(moved.values()) > 0
    assert calls(ended.output, 1, "random steps")["Broadcast"] > 0


EXCHANGE = ["-m", "tests.backends.hccl.exchange_job"]


def test_messages_that_cross_are_one_call(mock: Path) -> None:
    """In two executions there are two batches, and no other messages."""
    ended = on_npus(mock, 2, EXCHANGE)
    assert ended.code == 0, ended.output
    for rank in range(2):
        assert f"rank {rank}: right, called [0, 0, 2]" in ended.output


def test_messages_that_cross_go_one_after_the_other_without_batches(mock: Path) -> None:
    ended = on_npus(mock, 2, [*EXCHANGE, "-batch-messages"])
    assert ended.code == 0, ended.output
    for rank in range(2):
        assert f"rank {rank}: right, called [2, 2, 0]" in ended.output


def test_messages_that_cross_in_a_driven_graph(mock: Path) -> None:
    """They have one order, and are no batch: an error may take the place of one."""
    ended = on_npus(mock, 2, [*EXCHANGE, "driven"])
    assert ended.code == 0, ended.output
    assert ended.output.count(": driven") == 2


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_train_gpt(mock: Path, tmp_path: Path, ranks: int) -> None:
    """On 2 and 4 NPUs it learns what it learns in one process on the CPU.

    The 2 capture no graphs, so their programs run as they are.
    """
    script = str(ROOT / "examples" / "train_gpt.py")

    def losses(ranks: int) -> list[float]:
        folder = tmp_path / str(ranks)
        options = [*TINY.split(), "--out", str(folder)]
        if ranks == 0:
            ended = run(0, [script, *options], seconds=100, warm=True)
        else:
            graphs = {"MOCK_NPU_GRAPHS": "0"} if ranks == 2 else {}
            ended = on_npus(mock, ranks, [script, *options, "--backend", "hccl"], 100, **graphs)
        assert ended.code == 0, ended.output
        found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
        return [*found["losses"], found["validation"][-1][1]]

    plain = losses(0)
    assert len(plain) == 4
    assert losses(ranks) == pytest.approx(plain, rel=1e-4)


def test_a_failure_leaves_what_cannot_be_broken_off(mock: Path) -> None:
    """The error reaches all ranks; the next call says on all of them that the job has to end."""
    ended = on_npus(mock, 2, ["-m", "tests.backends.hccl.failing_job"], HCCL_EXEC_TIMEOUT="2")
    assert ended.code != 0
    assert ended.output.count("[3.0, 3.0]") == 0
    assert "rank 1: [4.0, 4.0]" in ended.output
    assert "went on" not in ended.output
    said = re.sub(r"\s+", " ", ended.output)
    ends_itself = "messages between devices have failed: ranks 0 and 1: timeout"
    refuses = (
        "HCCL cannot break them off (rank 1: ranks 0 and 1: timeout (HCCL result "
        "9)). Nothing more can be sent in this job: end it, and start again from a checkpoint"
    )
    assert ends_itself in said or refuses in said


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_driven_graphs(mock: Path, ranks: int) -> None:
    check_driven(on_npus(mock, ranks, ["-m", "tests.mpi.driven_job", "hccl"]))


def test_steps_that_need_no_host(mock: Path) -> None:
    """They are announced: the order of messages is that of announcements."""
    check_driven(on_npus(mock, 2, ["-m", "tests.mpi.device_only_job", "hccl"]), DEVICE_ONLY)


def test_interruptions(mock: Path) -> None:
    """On rank 1, which is the last: nothing is under way then that nobody could break off."""
    ended = on_npus(mock, 2, ["-m", "tests.mpi.device_interrupt_job", "1"])
    check_interruptions(ended, (1,))


def test_the_self_test(mock: Path) -> None:
    program = ["-m", "cg.backends.hccl.selftest", "-n", "2", "--library", str(mock)]
    ended = on_npus(mock, 0, program)
    assert ended.code == 0, ended.output
    rows = ended.output[ended.output.index("result | check | details") :].splitlines()[1:]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["pass", name]
        for name in (
            "structures lie as in C",
            "torch_npu",
            "library and functions",
            "at least 2 NPUs",
            "messages from rank to rank",
            "collectives",
            "training equals a plain loop",
            "time of a round trip",
            "all ranks ended",
        )
    ]
    assert re.search(
        r"training equals a plain loop .* graphs replayed [1-9]\d* times\n", ended.output
    )


@needs_no_torch_npu
def test_the_self_test_where_there_is_nothing() -> None:
    program = ["-m", "cg.backends.hccl.selftest", "--library", "/no/libhccl.so"]
    ended = run(0, program, seconds=60, warm=True)
    assert ended.code == 1
    rows = ended.output[ended.output.index("result | check | details") :].splitlines()[1:]
    begins = (
        "pass | structures lie as in C | RootInfo 4108 bytes",
        "FAIL | torch_npu | TransportError: NPUs are driven by torch_npu, which cannot be imported",
        "FAIL | library and functions | TransportError: tensors on NPUs travel by HCCL, and it "
        "cannot be loaded: /no/libhccl.so: ",
        "FAIL | at least 2 NPUs | RuntimeError: torch_npu, which knows how many there are, is not",
        "skip | steps on the NPUs | something above is missing",
    )
    assert len(rows) == len(begins)
    assert all(row.startswith(begin) for row, begin in zip(rows, begins, strict=True)), rows
    assert "source its set_env.sh, set HCCL_SO_PATH" in rows[2]
