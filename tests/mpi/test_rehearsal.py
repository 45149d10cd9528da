"""Programs that run on fake devices by `CG_DEVICE=fake`, and nothing else."""

from __future__ import annotations

import re

import pytest

from .jobs import ROOT, Ended, counts_of_agreement, needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(200)]

JOB = ["-m", "tests.mpi.rehearsal_job"]


def rehearse(word: str, ranks: int = 2, device: str = "fake", **variables: str) -> Ended:
    environment = {"CG_DEVICE": device, "CG_TIMEOUT": "60", **variables}
    return run(ranks, [*JOB, word], variables=environment, seconds=150, warm=True)


def losses(ended: Ended) -> set[str]:
    assert ended.code == 0, ended.output
    return set(re.findall(r"trained: (.*)", ended.output))


@pytest.mark.parametrize("word", ["train", "train-by-hosts"])
def test_a_pipeline_does_not_stand_still_where_the_device_waits(word: str) -> None:
    """It did while receives were posted early, and sends by hosts begun when a host waits."""
    values = losses(rehearse(word, CG_TIMEOUT="30"))
    assert values == losses(rehearse(word, device="cpu"))


def test_what_a_gpu_refuses_is_refused_everywhere() -> None:
    ended = rehearse("refuse")
    assert ended.code == 0, ended.output
    mixed = "Expected all tensors to be on the same device, but found at least two devices, fake:0"
    refusals = {
        "mixes": "RehearsedStage.mixes cannot be traced: it raised "
        f"FakeTensorDeviceMismatchError: {mixed}",
        "mixes_by_hand": mixed,
        "draws_on_the_host": "Expected a 'fake' device type for generator but found 'cpu'",
        "asks_numpy": "can't convert fake:0 device type tensor to numpy",
        "numpy of fake:0": "can't convert fake:0 device type tensor to numpy",
        "sum of fake:0": mixed,
    }
    for rank in (0, 1):
        for name, words in refusals.items():
            line = rf"rank {rank} {name}: .*{re.escape(words)}"
            assert re.search(line, ended.output), f"{line}\n{ended.output}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--schedule", "gpipe"],
        ["--schedule", "zb-h1"],
        ["--schedule", "interleaved"],
        ["--schedule", "dualpipe-v"],
        ["--tp", "2"],
        ["--dp", "2"],
        ["--dp", "2", "--fsdp"],
    ],
)
def test_the_example_trains_as_on_the_host(options: list[str], tmp_path: str) -> None:
    program = [str(ROOT / "examples" / "train_gpt.py"), "--layers", "4", "--width", "48"]
    program += ["--batch", "8", "--microbatches", "2", "--steps", "6", "--validate-every", "6"]
    program += ["--sample", "0", *options]
    validated = []
    for device in ("cpu", "fake"):
        variables = {"CG_DEVICE": device}
        out = ["--out", f"{tmp_path}/{device}"]
        ended = run(2, [*program, *out], variables=variables, seconds=190)
        assert ended.code == 0, ended.output
        validated.append(re.findall(r"validation loss (\S+)", ended.output))
    assert validated[0] == validated[1] != []


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (2, (0, 2)),
        *(pytest.param(2, (n, n + 20), marks=pytest.mark.slow) for n in range(2, 182, 20)),
        pytest.param(4, (0, 20), marks=pytest.mark.slow),
    ],
)
def test_random_steps_on_devices_that_wait(ranks: int, seeds: tuple[int, int]) -> None:
    """None stands still, and values are those of the same Python run eagerly."""
    program = ["-m", "tests.mpi.oracle_job", *map(str, seeds)]
    variables = {"CG_DEVICE": "fake", "CG_TIMEOUT": "200"}
    ended = run(ranks, program, variables=variables, seconds=800, warm=True)
    assert ended.code == 0, ended.output
    agreeing = counts_of_agreement(ended.output)
    assert len(agreeing) == ranks
    assert set(agreeing) != {0}
