"""Ranks with devices: fake ones, whose streams are threads, and real ones where there are any."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from .jobs import ROOT, Ended, counts_of_agreement, needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(150)]

SLOW = pytest.mark.slow
NONBLOCKING = ["nccl", "--nonblocking", "--capture"]
GPUS = max(2, min(torch.cuda.device_count(), 4))
"""Ranks of the jobs that take any number."""

ON_GPUS = {"CG_DEVICE": "auto"}


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


DEVICE_ONLY = [
    "device_only",
    "changed",
    "state",
    "nothing_is_written",
    "beside",
    "tails",
    "tail_of_another",
]


WAYS = [(3, ()), (2, ("--slow",)), *(pytest.param(n, (), marks=SLOW) for n in (2, 4))]
"""Ranks with fake devices, and whether these are slow: with 2 quick ones there is less to find."""


def check_driven(ended: Ended, passed: Sequence[str] = DRIVEN) -> None:
    """All that the job checks has passed, and its end with a graph open."""
    assert ended.code == 0, ended.output
    assert re.findall(r"passed (\w+)", ended.output) == list(passed), ended.output


SOON, SOON_ON_GPUS = 60, 250
"""Seconds in which a job ends that should end by itself. On a machine with GPUs, libraries of
gigabytes may be read from a disk first."""

ENDINGS = {
    "kill": "signal 9",
    "sleep": r"(after|for) 3(\.0)? s",
    "stall": r"(after|for) 3(\.0)? s",
}
"""The words of the message, by the ending of `device_endings_job`."""


def check_ending(
    ending: str, program: Sequence[str], device: Mapping[str, str] | None = None
) -> None:
    """The job has ended by itself, soon, with a message and a code."""
    seconds = SOON if device is None else SOON_ON_GPUS
    ended = run(2, program, variables=device, seconds=seconds, warm=device is None)
    assert ended.code != 0, ended.output
    assert f"it begins to {ending}" in ended.output
    assert re.search(ENDINGS[ending], ended.output), ended.output
    assert "nobody has noticed" not in ended.output
    if ending == "stall":
        # No host waits for another one, so what looks at devices has to find out.
        assert "StepTimeout" not in ended.output


def play(job: str, *words: str, fake: bool, ranks: int = 2, seconds: float = 250) -> str:
    start = ["-m", "tests.mpi.device_job"] if fake else ["-m"]
    program = [*start, f"tests.mpi.{job}", *words]
    variables = {} if fake else ON_GPUS
    ended = run(ranks, program, variables=variables, seconds=seconds, warm=fake)
    assert ended.code == 0, ended.output
    return ended.output


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["cpu", "fake"], marks=SLOW),
        ["fake", "--capture"],  # the first executions run as they are
        ["fake", "--strict"],
    ],
)
def test_communicators_conform(words: list[str]) -> None:
    ended = run(2, ["-m", "tests.mpi.conformance_job", *words], seconds=100, warm=True)
    assert ended.code == 0, ended.output
    assert ended.output.count("cases conform") == len([w for w in words if w[0] != "-"])


def test_pipelines_on_fake_devices() -> None:
    assert play("pipeline_job", "0", "1", fake=True).count("7 agree") == 2


def test_training_on_fake_devices() -> None:
    assert play("training_job", "4", fake=True).count("trained as on one device") == 2


@pytest.mark.parametrize("last", [3, pytest.param(6, marks=SLOW)])
def test_random_steps_on_fake_devices(last: int) -> None:
    # The second one cannot be pipelined, and is refused by all ranks.
    output = play("oracle_job", "0", str(last), fake=True)
    assert counts_of_agreement(output) == [last - 1] * 2


def test_calls_are_timed_on_fake_devices() -> None:
    assert play("measure_job", fake=True).count(": measured") == 2


def test_lifetimes_on_fake_devices() -> None:
    assert play("lifetimes_job", fake=True).count("nothing was written over") == 2


def test_fallbacks_on_fake_devices(tmp_path: Path) -> None:
    """The dump has those of every rank, and none of a program before."""
    (tmp_path / "step.rank1.graphs.txt").write_text("of a program before\n")
    job = ["-m", "tests.mpi.device_job", "tests.mpi.fallback_job"]
    variables = {"CG_DUMP": str(tmp_path)}
    ended = run(2, job, variables=variables, seconds=100, warm=True)
    assert ended.output.count("what falls back says so") == 2, ended.output
    found = {p.name: p.read_text() for p in sorted(tmp_path.glob("*graphs.txt"))}
    there = (
        "rank 1: graph 0 is put on op by op: it cannot be captured: this device records nothing\n"
    )
    one_graph = "rank 0: one graph, the whole program\nrank 1: one graph, the whole program\n"
    assert found["whole.graphs.txt"] == one_graph
    assert found["whole.rank1.graphs.txt"] == found["step.rank1.graphs.txt"] == there
    few = "is put on op by op: 1 of the 8 operators of torch that are worth it\n"
    assert few in found["step.graphs.txt"]


@pytest.mark.parametrize("words", [(), ("--strict",)])
def test_failures_on_fake_devices(words: tuple[str, ...]) -> None:
    """Also where the host of the other rank waits for its device, as when a kernel is loaded."""
    job = ["-m", "tests.mpi.device_job", *words, "tests.mpi.device_failure_job"]
    ended = run(2, job, variables={"CG_TIMEOUT": "60"}, seconds=250, warm=True)
    assert ended.output.count("failures are as they should be") == 2, ended.output


def test_interruptions_on_fake_devices() -> None:
    job = ["-m", "tests.mpi.device_job", "tests.mpi.device_interrupt_job", "0", "1"]
    check_interruptions(run(2, job, seconds=100, warm=True), (0, 1))


@pytest.mark.parametrize(("ranks", "how"), WAYS)
def test_driven_graphs_on_fake_devices(ranks: int, how: tuple[str, ...]) -> None:
    program = ["-m", "tests.mpi.device_job", *how, "tests.mpi.driven_job"]
    check_driven(run(ranks, program, seconds=100, warm=True))


@pytest.mark.parametrize(
    ("ranks", "how", "checks"),
    [
        (2, ("--slow",), DEVICE_ONLY),
        (4, (), ["device_only", "state"]),  # each rank reports to each of three
        *(pytest.param(n, (), DEVICE_ONLY, marks=SLOW) for n in (2, 3, 4)),
    ],
)
@pytest.mark.timeout(450)
def test_steps_that_need_no_host_on_fake_devices(
    ranks: int, how: tuple[str, ...], checks: Sequence[str]
) -> None:
    program = ["-m", "tests.mpi.device_job", *how, "tests.mpi.device_only_job", *checks]
    check_driven(run(ranks, program, seconds=400, warm=True), checks)


def test_masks_of_dropout_on_fake_devices() -> None:
    assert play("captured_job", "dropout", fake=True).count("dropout is as it should be") == 2


GROUPS = ("tp", "dp", "buckets", "stored", "pp", "clip", "sums")


def test_groups_on_fake_devices() -> None:
    """Of each way to share a model out, a rank's program is one graph, as that of one actor is."""
    output = play("captured_groups_job", *GROUPS, fake=True)
    assert output.count("is replayed, and differs") == 2 * len(GROUPS), output


@pytest.mark.gpu(2)
def test_groups_on_gpus() -> None:
    output = play("captured_groups_job", *GROUPS, fake=False, ranks=2)
    assert output.count("is replayed, and differs") == 2 * len(GROUPS), output


NOTED = "embedding: index 1001 at [7] is out of range: the dimension has 1001 entries"


def check_noted(output: str) -> None:
    for rank in (0, 1):
        assert f"rank {rank} raised {NOTED}" in output.replace("IndexError: ", ""), output
        assert f"rank {rank} goes on" in output, output


def test_what_fake_devices_note_is_raised() -> None:
    check_noted(play("ids_job", "raises", "-capture", fake=True))


def test_what_no_step_raises_ends_the_job() -> None:
    job = ["-m", "tests.mpi.device_job", "tests.mpi.ids_job", "left", "-capture"]
    ended = run(2, job, seconds=60, warm=True)
    assert ended.code != 0, ended.output
    assert NOTED in ended.output


@pytest.mark.gpu(2)
def test_what_gpus_note_is_raised() -> None:
    check_noted(play("ids_job", "raises", fake=False, ranks=2))


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_bad_end_of_a_rank_on_a_fake_device_ends_the_job(ending: str) -> None:
    check_ending(ending, ["-m", "tests.mpi.device_job", "tests.mpi.device_endings_job", ending])


def test_what_cannot_be_put_on_a_device_ends_the_job_where_nothing_is_announced() -> None:
    job = ["-m", "tests.mpi.device_job", "tests.mpi.driven_fault_job"]
    ended = run(2, job, seconds=60, warm=True)
    assert ended.code != 0, ended.output
    assert "rank 1 could not put its part of an execution of 'step'" in ended.output
    assert "IndexError" in ended.output
    assert "compiled with passes='-capture'" in ended.output
    assert "nobody has noticed" not in ended.output


@pytest.mark.parametrize(
    ("how", "step", "at"),
    [
        ([], "step", r"stream compute: `%forward.recv = .*, message 0 of channel 0 from rank 1"),
        (["behind"], "step", r"a part of it that is not known, since .* of execution 4 behind it"),
        (["driven"], "driven", r"stream compute: `%forward.recv = .*, message 0 of channel 1 from"),
    ],
)
def test_an_execution_that_a_device_does_not_end(how: list[str], step: str, at: str) -> None:
    job = ["-m", "tests.mpi.device_job", "tests.mpi.device_hang_job", *how]
    ended = run(2, job, seconds=60, warm=True)
    assert ended.code != 0, ended.output
    named = rf"step '{step}' \(plan [0-9a-f]{{16}}\)"
    first = rf"the host has put all of execution 0 of {named} on the device, which has not ended it"
    assert re.search(first, ended.output), ended.output
    assert re.search(at, ended.output), ended.output
    where = "in no execution" if "driven" in how else "the host of rank 0 has put all of execution"
    assert where in ended.output, ended.output
    assert "raise compile(timeout=...) or CG_TIMEOUT" in ended.output
    assert "nobody has noticed" not in ended.output


@pytest.mark.gpu(2)
def test_driven_graphs_on_gpus() -> None:
    program = ["-m", "tests.mpi.driven_job", "nccl"]
    ended = run(GPUS, program, variables=ON_GPUS, seconds=SOON_ON_GPUS)
    check_driven(ended, [check for check in DRIVEN if check != "within"])


@pytest.mark.gpu(2)
def test_steps_that_need_no_host_on_gpus() -> None:
    program = ["-m", "tests.mpi.device_only_job", "nccl"]
    check_driven(run(GPUS, program, variables=ON_GPUS, seconds=SOON_ON_GPUS), DEVICE_ONLY)


FAULTS = ("watched", "read", "again", "within", "driven")
"""Where a host learns that its device has failed; see `device_fault_job`."""


def check_fault(how: str, device: Mapping[str, str] | None = None) -> None:
    """The job has ended with one message, which names the method that has failed the device."""
    program = ["-m", "tests.mpi.device_fault_job", how]
    if device is None:
        program[1:1] = ["tests.mpi.device_job"]
    seconds = SOON if device is None else SOON_ON_GPUS
    ended = run(2, program, variables=device, seconds=seconds, warm=device is None)
    assert ended.code != 0, ended.output
    assert ended.output.count("the device has failed in execution") == 1, ended.output
    assert ended.output.count("CUDA error: device-side assert triggered") == 1, ended.output
    assert "The likely cause: an index is out of range" in ended.output
    file = ROOT / "tests" / "mpi" / "device_fault_job.py"
    lines = file.read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "the line to be named" in text)
    assert f"an embedding at {file}:{line}, in forward: it takes 0 to 3\n" in ended.output
    for other in ("Traceback", "Search for", "messages between devices", "nobody has noticed"):
        assert other not in ended.output, ended.output


@pytest.mark.parametrize("how", FAULTS)
def test_a_fault_of_a_fake_device_ends_the_job_with_one_message(how: str) -> None:
    check_fault(how)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("how", FAULTS)
def test_a_fault_of_a_gpu_ends_the_job_with_one_message(how: str) -> None:
    check_fault(how, ON_GPUS)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_bad_end_of_a_rank_on_a_gpu_ends_the_job(ending: str) -> None:
    check_ending(ending, ["-m", "tests.mpi.device_endings_job", ending], ON_GPUS)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("word", ["dropout", "fused"])
def test_what_is_captured_on_gpus(word: str) -> None:
    output = play("captured_job", word, fake=False, ranks=GPUS)
    assert output.count(f"{word} is as it should be") == GPUS


@pytest.mark.gpu(2)
def test_a_step_is_one_launch_on_each_gpu_and_waits_for_none() -> None:
    program = ["benchmarks/gpu.py", "--sections", "profile"]
    ended = run(GPUS, program, variables=ON_GPUS, seconds=SOON_ON_GPUS)
    assert ended.code == 0, ended.output
    assert ended.output.count("nothing else was launched, no host has waited") == 2, ended.output


@pytest.mark.gpu(2)
@pytest.mark.parametrize("words", [["nccl"], ["nccl", "--capture"], NONBLOCKING])
def test_nccl_conforms(words: list[str]) -> None:
    pytest.importorskip("nccl.bindings")
    assert "cases conform" in play("conformance_job", *words, fake=False, ranks=GPUS)


@pytest.mark.gpu(2)
def test_pipelines_on_gpus() -> None:
    pipelines = 14 if GPUS == 4 else 10  # four of the orders that `auto` finds take four ranks
    output = play("pipeline_job", "0", "4", fake=False, ranks=GPUS)
    assert output.count(f"{pipelines} agree") == GPUS, output


@pytest.mark.gpu(2)
def test_calls_are_timed_on_gpus() -> None:
    assert play("measure_job", fake=False).count(": measured") == 2


@pytest.mark.gpu(2)
def test_failures_on_gpus() -> None:
    output = play("device_failure_job", fake=False)
    assert output.count("failures are as they should be") == 2


@pytest.mark.gpu(2)
def test_training_on_gpus() -> None:
    output = play("training_job", "50", fake=False, ranks=GPUS)
    assert output.count("trained as on one device") == GPUS


@pytest.mark.gpu(2)
def test_random_steps_on_gpus() -> None:
    agree = 18 if GPUS == 2 else 19  # the others cannot be pipelined
    output = play("oracle_job", "0", "20", fake=False, ranks=GPUS)
    assert counts_of_agreement(output) == [agree] * GPUS


@pytest.mark.gpu(2)
def test_lifetimes_on_gpus() -> None:
    assert play("lifetimes_job", fake=False).count("nothing was written over") == 2
