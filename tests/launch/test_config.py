"""Environment variables: what they give, and what a wrong value is told."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from cg.launch.environment.config import (
    VARIABLES,
    Config,
    ConfigError,
    parse_ranks,
    table,
    unknown_variables,
)
from cg.launch.environment.detect import Launch


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Config.from_environ({}) == Config()


def test_every_variable_has_its_field() -> None:
    config = Config.from_environ(
        {
            "CG_RANKS": "4",
            "CG_DUMP": "out/here",
            "CG_DUMP_PASSES": "^split",
            "CG_DUMP_RANKS": "0,2-4",
            "CG_PASSES": "-overlap, +cse",
            "CG_TIMEOUT": "2.5",
            "CG_SEED": "7",
            "CG_THREAD_CAP": "0",
            "CG_AFFINITY": "0",
            "CG_BIND_DEVICES": "0",
            "CG_NCCL_NONBLOCKING": "1",
            "OMP_NUM_THREADS": "3",
            "MKL_NUM_THREADS": "",
        }
    )
    assert (config.ranks, config.dump, config.seed) == (4, Path("out/here"), 7)
    assert config.dump_passes is not None
    assert config.dump_passes.search("split-transfers")
    assert config.dump_ranks == {0, 2, 3, 4}
    assert config.passes == "-overlap,+cse"
    assert config.timeout == 2.5
    assert (config.thread_cap, config.affinity, config.bind_devices) == (False, False, False)
    assert config.nccl_nonblocking
    assert config.preset_threads == {"OMP_NUM_THREADS"}
    assert {variable.field for variable in VARIABLES} <= {field.name for field in fields(Config)}


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_a_variable_set_to_nothing_is_not_set(variable: object) -> None:
    assert Config.from_environ({variable.name: " "}) == Config()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("CG_RANKS", "0", "CG_RANKS='0': it takes a whole number of at least 1"),
        ("CG_RANKS", "four", "CG_RANKS='four': it takes a whole number of at least 1"),
        ("CG_DUMP_PASSES", "(", "CG_DUMP_PASSES='(': it takes a regular expression (missing )"),
        ("CG_DUMP_RANKS", "3-1", "CG_DUMP_RANKS='3-1': it takes ranks such as `0,2-5`, or `all`"),
        ("CG_DUMP_RANKS", "a", "CG_DUMP_RANKS='a': it takes ranks such as `0,2-5`, or `all`"),
        ("CG_PASSES", "overlap", "CG_PASSES='overlap': it takes names of passes, each after a `+`"),
        ("CG_TIMEOUT", "-1", "CG_TIMEOUT='-1': it takes a number of seconds, or 0 for no limit"),
        ("CG_TIMEOUT", "nan", "CG_TIMEOUT='nan': it takes a number of seconds"),
        ("CG_SEED", "-3", "CG_SEED='-3': it takes a whole number of at least 0"),
        ("CG_AFFINITY", "yes", "CG_AFFINITY='yes': it takes `0` or `1`"),
        ("PMI_RANK", "first", "PMI_RANK='first': a launcher sets it to a whole number; unset it"),
    ],
)
def test_a_wrong_value_is_told_what_the_variable_takes(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_environ({name: value})
    assert str(caught.value).startswith(message)


def test_no_limit_and_all_ranks() -> None:
    assert Config.from_environ({"CG_TIMEOUT": "0"}).timeout is None
    assert Config.from_environ({"CG_TIMEOUT": "300"}).given_timeout == 300.0
    assert Config.from_environ({}).given_timeout is None
    assert Config.from_environ({"CG_DUMP_RANKS": "all"}).dump_ranks is None
    assert parse_ranks("5") == {5}


def test_misspelt_variables_are_found() -> None:
    environ = {"CG_RANK": "1", "CG_RANKS": "1", "PATH": "/bin"}
    assert unknown_variables(environ) == ["CG_RANK"]


def test_the_table_has_a_row_for_each_variable() -> None:
    rows = table().splitlines()
    assert len(rows) == 2 + len(VARIABLES)
    for variable, row in zip(VARIABLES, rows[2:], strict=True):
        assert row.startswith(f"| `{variable.name}` | {variable.takes} |")


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "PMIX_RANK": "3",
            },
            Launch("Open MPI", "OMPI_COMM_WORLD_RANK", 3, 8, 1, 2),
        ),
        (
            {
                "PMI_RANK": "0",
                "PMI_SIZE": "4",
                "MPI_LOCALRANKID": "0",
                "MPI_LOCALNRANKS": "4",
                "PMI_FD": "9",
            },
            Launch("Hydra (MPICH or Intel MPI)", "PMI_RANK", 0, 4, 0, 4, pmi_socket=9),
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_STEP_NUM_TASKS": "11",
                "SLURM_LOCALID": "1",
                "SLURM_NODEID": "2",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
            },
            Launch("Slurm", "SLURM_PROCID", 5, 11, 1, 3),
        ),
        (
            {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_JOBID": "4f2a", "SLURM_LOCALID": "1"},
            Launch("Hydra (MPICH or Intel MPI)", "PMI_RANK", 5, 8, 1, None),
        ),
        ({"PMIX_RANK": "2"}, Launch("PMIx", "PMIX_RANK", 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        ({"PATH": "/bin"}, None),
    ],
    ids=["open-mpi", "hydra", "slurm", "pmi-of-others", "pmix", "slurm-batch-script", "none"],
)
def test_the_launcher_is_known_by_its_variables(
    environ: dict[str, str], launch: Launch | None
) -> None:
    assert Config.from_environ(environ).launch == launch
