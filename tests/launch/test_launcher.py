"""Finding an MPI launcher, its options, and what the command line says to a wrong call."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cg.launch.__main__ import main
from cg.launch.job.launcher import (
    Flavour,
    Launcher,
    LaunchError,
    command,
    find,
    identify,
    on_hosts,
    variables,
)
from cg.launch.job.shm_cleanup import remove_unused


def fake(directory: Path, name: str, says: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("says", "flavour"),
    [
        ("HYDRA build details:\n    Version: 5.0.2", Flavour.MPICH),
        ("mpirun (Open MPI) 5.0.11", Flavour.OPEN_MPI),
        ("mpiexec (OpenRTE) 4.1.4", Flavour.OPEN_MPI),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.12", Flavour.INTEL),
        ("slurm 23.02.7", Flavour.OTHER),
    ],
)
def test_a_launcher_says_what_it_is(tmp_path: Path, says: str, flavour: Flavour) -> None:
    launcher = identify(fake(tmp_path, "mpirun", says))
    assert launcher.flavour is flavour
    assert launcher.version == says.partition("\n")[0]


def test_the_launcher_beside_python_comes_before_the_path(tmp_path: Path) -> None:
    ours = fake(tmp_path / "venv", "mpiexec", "HYDRA")
    system = fake(tmp_path / "usr", "mpirun", "mpirun (Open MPI) 4.1")
    search = str(system.parent)
    assert find(None, [ours.parent], search).path == ours
    assert find(None, [tmp_path / "none"], search).path == system
    assert find(str(system), [ours.parent], "").path == system
    assert find("mpirun", [ours.parent], search).path == system


def test_no_launcher_is_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"no mpirun .*pip install mpi4py mpich.*--virtual"):
        find(None, [tmp_path], str(tmp_path))
    with pytest.raises(LaunchError, match="--mpirun /nowhere/mpirun: no such program"):
        find("/nowhere/mpirun", [], "")


def test_a_launcher_that_does_not_run_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "mpirun"
    path.write_text("no program")
    path.chmod(0o755)
    with pytest.raises(LaunchError, match="mpirun --version does not work"):
        identify(path)


def test_command_lines() -> None:
    open_mpi = Launcher(Path("/m/mpirun"), Flavour.OPEN_MPI, "")
    line = command(
        open_mpi,
        4,
        ["python", "a.py"],
        exported=["CG_SEED"],
        oversubscribe=True,
        leave_unbound=True,
        extra=["--hostfile", "h"],
    )
    assert " ".join(line) == (
        "/m/mpirun -n 4 --map-by :OVERSUBSCRIBE --bind-to none -x CG_SEED --hostfile h python a.py"
    )
    hydra = Launcher(Path("/m/mpirun"), Flavour.MPICH, "")
    assert command(
        hydra, 4, ["python"], exported=["CG_SEED"], oversubscribe=True, leave_unbound=True
    ) == ["/m/mpirun", "-n", "4", "python"]


def test_options_for_hosts_are_those_of_the_launcher(tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    Path(file).write_text("# two machines\na:2  # the first\n\nb slots=2 max_slots = 4\n")
    open_mpi = Launcher(Path("/m/mpirun"), Flavour.OPEN_MPI, "")
    hydra = Launcher(Path("/m/mpirun"), Flavour.MPICH, "")
    other = Launcher(Path("/m/mpirun"), Flavour.OTHER, "")
    assert on_hosts(open_mpi, "a:2,b:2", None) == ["--host", "a:2,b:2"]
    assert on_hosts(open_mpi, None, file) == ["--hostfile", file]
    assert on_hosts(hydra, "a:2,b:2", None) == ["-hosts", "a:2,b:2"]
    assert on_hosts(hydra, None, file) == ["-f", file]
    assert on_hosts(other, None, None) == []
    with pytest.raises(LaunchError, match="/m/mpirun's option for hosts"):
        on_hosts(other, "a", None)
    with pytest.raises(LaunchError, match="give one of them"):
        on_hosts(hydra, "a", "file")


HOSTS = ["a", "a:2,b:2", "10.0.0.1:4", "me@north-1.example.org", "[fe80::1]:2", "+n0", "a:*"]
NO_HOSTS = [
    "",
    ":2",
    "x:-1",
    "x:0",
    "x:",
    "x:two",
    "x:2:2",
    "x:9999999999",
    "-oProxyCommand=x",
    " ",
]


@pytest.mark.parametrize("flavour", [Flavour.MPICH, Flavour.INTEL, Flavour.OPEN_MPI])
def test_what_is_no_host_is_refused(tmp_path: Path, flavour: Flavour) -> None:
    launcher = Launcher(Path("/m/mpirun"), flavour, "")
    for hosts in HOSTS:
        assert on_hosts(launcher, hosts, None)[1] == hosts
    for host in NO_HOSTS:
        for hosts in (host, f"{host},a:2", f"a:2,{host}"):
            with pytest.raises(LaunchError, match=r"^--hosts '.*' is no host; a host is a name"):
                on_hosts(launcher, hosts, None)


def test_a_file_with_a_line_that_is_no_host_is_refused(tmp_path: Path) -> None:
    launcher, file = Launcher(Path("/m/mpirun"), Flavour.MPICH, ""), tmp_path / "hosts"
    for line in [*filter(str.strip, NO_HOSTS), "a -x", "a slots=-1", "a slots = -1", "\ufeffa"]:
        file.write_text(f"# machines\na:2\n{line}\n", encoding="utf-8")
        with pytest.raises(LaunchError, match=r"hosts: line 3, '.*', is no host; a host is a name"):
            on_hosts(launcher, None, str(file))
    for text in ("", "\n", "# none\n  \n"):
        file.write_text(text)
        with pytest.raises(LaunchError, match="names no host; write one in each line, such as a:2"):
            on_hosts(launcher, None, str(file))
    for path in (tmp_path, tmp_path / "none", ""):
        with pytest.raises(LaunchError, match=r"--hostfile .*; give a file of hosts"):
            on_hosts(launcher, None, str(path))


def test_open_mpi_is_allowed_to_run_as_root() -> None:
    open_mpi = Launcher(Path("/m/mpirun"), Flavour.OPEN_MPI, "")
    hydra = Launcher(Path("/m/mpirun"), Flavour.MPICH, "")
    assert set(variables(open_mpi, as_root=True)) == {
        "OMPI_ALLOW_RUN_AS_ROOT",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    }
    assert variables(open_mpi, as_root=False) == variables(hydra, as_root=True) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.py"], "say how many ranks to start: -n N"),
        (
            ["-n", "1", "--virtual", "--hosts", "a", __file__],
            "--virtual plays all ranks in one process: leave out the hosts",
        ),
        (["-n", "0", "a.py"], "-n 0: the number of ranks is a whole number of at least 1"),
        (["-n", "two", "a.py"], "-n two: the number of ranks is a whole number of at least 1"),
        (["-n", "2"], "say what to run: python -m cg.launch -n N script.py"),
        (["-n", "2", "nowhere.py"], "nowhere.py: no such script (in "),
        (["-n", "2", "/"], "/ is a directory; give a script"),
        (["-n", "2", "-x", "NO_SUCH_NAME", sys.executable], "-x NO_SUCH_NAME: NO_SUCH_NAME is not"),
        (["-n", "2", "-x", "=1", sys.executable], "-x =1: the name is not set"),
        (["-n", "2", "--timeout=-1", sys.executable], "CG_TIMEOUT='-1': it takes a number"),
        (["-n", "2", "--passes", "overlap", sys.executable], "CG_PASSES='overlap': it takes"),
        (["-n", "2", "--mpirun", "/nowhere", sys.executable], "--mpirun /nowhere: no such program"),
    ],
)
def test_a_wrong_call_starts_nothing_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"cg.launch: {message}")


def test_the_variables_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help-env"]) == 0
    assert "| `CG_TIMEOUT` |" in capsys.readouterr().out


def test_only_our_unused_new_segments_are_removed(tmp_path: Path) -> None:
    shared = tmp_path / "dev/shm"
    maps = tmp_path / "proc/17/maps"
    shared.mkdir(parents=True)
    maps.parent.mkdir(parents=True)
    used, unused, other = (
        shared / name for name in ("mpich_shm_1_0", "mpich_shm_2_0", "sm_segment.1")
    )
    for path in (used, unused, other):
        path.touch()
    maps.write_text(f"7f00-7f10 rw-s 00000000 00:1b 42   {used}\n")
    assert remove_unused(unused.stat().st_ctime + 60, tmp_path) == []
    assert remove_unused(unused.stat().st_ctime, tmp_path) == [unused]
    assert used.exists()
    assert other.exists()
