"""Whole jobs under the launcher: whatever a rank does, the job ends, with its code and message.

Ranks are forks of an interpreter that has imported torch where a test says nothing of signals, of
process managers, of ports or of what a job leaves behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cg.launch.job.launcher import Flavour, find

from ..mpi import warm as interpreting
from ..mpi.hosts import missing, unshare
from ..mpi.jobs import environment, of_interpreters
from .conftest import PROGRAMS, Job, Launch, Start

pytestmark = pytest.mark.timeout(180)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
"""With a port that the system chooses."""
FAILURE = r"\[rank 1\] ValueError: this rank is bad"


def mpi_launcher() -> tuple[Path, Flavour]:
    launcher = find(None, [Path(sys.executable).parent], os.environ["PATH"])
    return launcher.path, launcher.flavour


def test_ranks_talk_and_leave_nothing(launch: Launch) -> None:
    job = launch(3, "behave.py", "talk", "3")
    assert job.finish() == 0, job.output
    assert job.segments() == []
    share = max(1, len(os.sched_getaffinity(0)) // 3)
    assert job.output.count(f"threads={share}\n") == 3


@pytest.mark.parametrize("mode", ["early", "early_asleep", "in_collective", "asleep"])
def test_an_exception_on_one_rank_ends_the_job(launch: Launch, mode: str) -> None:
    job = launch(2, "behave.py", mode, warm=mode != "asleep")
    assert job.finish() == 1, job.output
    assert re.search(FAILURE, job.output)
    assert "behave.py" in job.output
    assert "[rank 0]" not in job.output


def test_a_rank_that_ends_with_code_0_in_the_middle_ends_the_job(launch: Launch) -> None:
    job = launch(2, "behave.py", "vanish")
    assert job.finish() != 0, job.output
    in_the_middle = (
        r"the job has ended in the middle of its work, on rank [01, ]+: .*os\._exit\(0\)"
    )
    # MPICH's launcher reports success; others, or the waiting rank, notice it by themselves.
    noticed = "the program of rank 1 has ended", "finaliz", "TERMINATION"
    assert re.search(in_the_middle, job.output) or any(word in job.output for word in noticed)


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("size", ["1m", "16m"])
def test_a_small_shared_memory_ends_the_job_with_a_reason(size: str, tmp_path: Path) -> None:
    launcher, flavour = mpi_launcher()
    if flavour is not Flavour.MPICH:
        pytest.skip("other MPIs say so themselves")
    script = tmp_path / "talk.py"
    script.write_text("import cg\ncg.rank()\n")
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    starts = (([str(launcher)], [sys.executable]), ([sys.executable, "-m", "cg.launch"], []))
    for start, python in starts:
        done = subprocess.run(
            [*unshare(), "sh", "-c", mount, "sh", *start, "-n", "2", *python, script],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode in (1, 2), done.stdout
        assert f"/dev/shm has {size[:-1]} MiB" in done.stdout
        assert "--shm-size=1g" in done.stdout
        assert "Segmentation fault" not in done.stdout


def test_an_exception_in_a_thread_ends_the_job(launch: Launch) -> None:
    job = launch(2, "behave.py", "in_thread", warm=True)
    assert job.finish() == 1, job.output
    assert "[rank 1] in thread helper:" in job.output
    assert re.search(FAILURE, job.output)


def test_an_exception_ends_the_job_where_the_program_has_its_own_hook(launch: Launch) -> None:
    job = launch(2, "behave.py", "hook_replaced", warm=True)
    assert job.finish() == 1, job.output
    assert "ValueError: this rank is bad" in job.output


@pytest.mark.parametrize("mode", ["exit_three", "exit_three_early", "raise_exit"])
def test_the_code_of_one_ranks_exit_is_the_jobs(launch: Launch, mode: str) -> None:
    job = launch(2, "behave.py", mode, warm=True)
    assert job.finish() == 3, job.output


def test_an_exit_that_is_caught_does_not_end_the_job(launch: Launch) -> None:
    job = launch(2, "behave.py", "catch", warm=True)
    assert job.finish() == 0, job.output
    assert job.output.count("caught=3") == 2


def test_a_rank_that_leaves_early_is_named(launch: Launch) -> None:
    job = launch(2, "behave.py", "leave", warm=True)
    assert job.finish() == 1, job.output
    assert re.search(
        r"rank 0 waits in barrier at \S+behave.py:\d+, but the program of rank 1 has ended. "
        "Every rank must make the same calls in the same order",
        job.output,
    )


def test_ranks_in_different_calls_are_told_so(launch: Launch) -> None:
    job = launch(2, "behave.py", "diverge", options=["--timeout", "4"], warm=True)
    assert job.finish() == 1, job.output
    assert re.search(r"barrier at \S+behave.py:\d+", job.output)
    assert "Every rank must make the same calls in the same order" in job.output


@pytest.mark.parametrize("call", ["allgather", "broadcast from rank 0"])
def test_messages_of_a_barrier_are_no_values(launch: Launch, call: str) -> None:
    job = launch(2, "behave.py", "mix", call.split()[0], warm=True)
    assert job.finish() == 1, job.output
    assert re.search(
        rf"refused=rank 1 (is|waits) in {call} at \S+behave.py:\d+, "
        r"but rank 0 (is )?in (a )?barrier",
        job.output,
    )


def test_a_rank_that_does_not_come_is_named(launch: Launch) -> None:
    job = launch(3, "behave.py", "late", options=["--timeout", "2"], warm=True)
    assert job.finish() == 1, job.output
    assert re.search(
        r"gave up barrier at \S+behave.py:\d+ after 2 s: rank 1 did not come. Look at what is "
        "slow or stuck there; CG_TIMEOUT sets the limit",
        job.output,
    )


def test_a_rank_that_outstays_the_others_is_an_error(launch: Launch) -> None:
    job = launch(2, "behave.py", "outstay", options=["--timeout", "2"], warm=True)
    assert job.finish() == 1, job.output
    assert "[rank 0] the program of rank 0 ended 2 s ago, but another rank's still" in job.output


def test_a_rank_that_never_starts_is_waited_for_no_longer_than_the_deadline(launch: Launch) -> None:
    job = launch(2, "behave.py", "never_start", options=["--timeout", "1"], warm=True)
    assert job.finish() != 0, job.output  # that of the launcher, if it had to end the other rank
    # Open MPI's launcher sees by itself that a rank has ended without initialising.
    assert "_initialise_on_every_rank" in job.output or "init" in job.output


def test_ranks_that_see_an_accelerator_of_their_own_each_take_it(launch: Launch) -> None:
    job = launch(2, "behave.py", "see_one", "a", "b", options=["--device", "cuda"], warm=True)
    assert job.finish() == 0, job.output
    assert job.output.count("device=cuda:0") == 2, job.output
    assert "CG_DEVICE" not in job.output


def test_ranks_that_see_the_same_accelerator_stay_on_the_host_and_one_says_so(
    launch: Launch,
) -> None:
    job = launch(2, "behave.py", "see_one", "a", "a", options=["--device", "auto"], warm=True)
    assert job.finish() == 0, job.output
    assert job.output.count("device=None") == 2, job.output
    assert job.output.count("[rank 0] CG_DEVICE=auto leaves actors on the host: 2 ranks") == 1
    assert job.output.count("CG_DEVICE=auto") == 1, job.output


def test_ranks_may_end_at_different_times(launch: Launch) -> None:
    job = launch(2, "behave.py", "skew", warm=True)
    assert job.finish() == 0, job.output


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_launcher_ends_the_job(launch: Launch, number: signal.Signals) -> None:
    job = launch(2, "behave.py", "wait")
    job.wait_for("ready", 2)
    job.process.send_signal(number)
    assert job.finish() == 128 + number, job.output
    assert f"cg.launch: {number.name} ended all 2 ranks" in job.output


def plain(start: Start, *program: str | Path, warm: bool = False, **variables: str) -> Job:
    """Start a program by the MPI's own launcher; `warm` as for `launch`."""
    if warm:
        program = (sys.executable, interpreting.__file__, *program)
        variables |= of_interpreters()
    path, flavour = mpi_launcher()
    root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    options = ["--map-by", ":OVERSUBSCRIBE"] if flavour is Flavour.OPEN_MPI else []
    return start([path, "-n", "2", *options, *program], **dict.fromkeys(root, "1"), **variables)


def test_ctrl_c_reaches_ranks_under_plain_mpirun(start: Start) -> None:
    job = plain(start, sys.executable, "-u", PROGRAMS / "behave.py", "wait")
    job.wait_for("ready", 2)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.finish() != 0, job.output


def test_a_rank_that_is_killed_ends_the_job(launch: Launch) -> None:
    job = launch(2, "behave.py", "wait")
    job.wait_for("ready", 2)
    victim = re.search(r"process=0:(\d+)", job.output)
    assert victim is not None
    os.kill(int(victim[1]), signal.SIGKILL)
    assert job.finish() in (9, 137), job.output


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_process_manager_that_is_killed_ends_the_job(
    launch: Launch, number: signal.Signals
) -> None:
    job = launch(2, "behave.py", "with_child")
    job.wait_for("ready", 2)
    for manager in job.managers():
        os.kill(manager, number)
    assert job.finish() != 0, job.output


@pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param([], marks=pytest.mark.slow, id=""),  # one process less than with a shell
        pytest.param(["sh", "-c", '"$@"; exit $?', "sh"], id="wrapped"),
    ],
)
def test_a_process_manager_that_is_killed_ends_the_job_under_plain_mpirun(
    start: Start, wrapper: list[str]
) -> None:
    job = plain(start, *wrapper, sys.executable, "-u", PROGRAMS / "behave.py", "with_child")
    job.wait_for("ready", 2)
    for manager in job.managers():
        os.kill(manager, signal.SIGKILL)
    assert job.finish() != 0, job.output


def test_nohup_keeps_the_launcher_from_the_end_of_a_terminal(
    launch: Launch, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = launch(2, "behave.py", "until", str(end), warm=True)
    finally:
        signal.signal(signal.SIGHUP, previous)
    job.wait_for("ready", 2)
    job.process.send_signal(signal.SIGHUP)
    end.touch()
    assert job.finish() == 0, job.output


@pytest.mark.parametrize("by", [pytest.param("cg.launch", marks=pytest.mark.slow), "mpirun"])
def test_garbage_at_every_port_neither_ends_nor_stalls_a_job(
    launch: Launch, start: Start, tmp_path: Path, by: str
) -> None:
    end = tmp_path / "end"
    program = [sys.executable, "-u", PROGRAMS / "behave.py", "until", end]
    mine = by == "cg.launch"
    job = launch(2, "behave.py", "until", str(end)) if mine else plain(start, *program)
    job.wait_for("ready", 2)
    taken = []
    for address, port in job.ports():
        for garbage in (b"", b"\0", b"\xff" * 64, bytes(range(256)) * 16):
            with contextlib.suppress(OSError):
                link = socket.create_connection(("127.0.0.1", port), timeout=0.5)
                taken.append((address, port, link))
                link.sendall(garbage)
    if mpi_launcher()[1] is Flavour.MPICH:
        assert not taken, "a port takes connections"
    end.touch()  # the job ends while the connections stay
    assert job.finish() == 0, job.output
    for _, _, link in taken:
        link.close()


def test_the_jobs_folder_and_its_files_are_the_users_own(launch: Launch) -> None:
    job = launch(2, "behave.py", "modes", warm=True)
    assert job.finish() == 0, job.output
    assert job.output.count("mode=700\n") == 2, job.output
    assert job.output.count("mode=600\n") == 4, job.output


@pytest.mark.slow  # `test_foreign` knows its variables
def test_copies_that_torchrun_starts_are_refused_and_what_they_start_goes_on(
    start: Start, tmp_path: Path
) -> None:
    torchrun = [*TORCHRUN, "--nproc-per-node", "2"]
    job = start([*torchrun, PROGRAMS / "copies.py", "parent", tmp_path, "2"])
    assert job.finish() != 0, job.output
    assert job.output.count("child: size=1\n") == 2, job.output
    assert len(re.findall("child: .*Let MPI start the ranks", job.output)) == 2, job.output
    for number in range(2):
        refused = f"refused: torchrun started this process as number {number} of 2 (RANK, WORLD"
        assert refused in job.output
    assert "Let MPI start the ranks: python -m cg.launch -n 2 " in job.output


@pytest.mark.slow  # `test_foreign` knows its variables
def test_one_process_of_torchrun_is_a_world(start: Start, tmp_path: Path) -> None:
    torchrun = [*TORCHRUN, "--nproc-per-node", "1"]
    job = start([*torchrun, PROGRAMS / "copies.py", "alone", tmp_path, "1"])
    assert job.finish() == 0, job.output
    assert "size=1\n" in job.output


def test_the_variables_of_torch_in_a_job_of_mpi_mean_nothing(start: Start, tmp_path: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    job = plain(start, PROGRAMS / "copies.py", "alone", tmp_path, "2", warm=True, **variables)
    assert job.finish() == 0, job.output
    assert job.output.count("size=2\n") == 2, job.output


def test_ranks_that_are_asked_for_late_are_refused(launch: Launch, tmp_path: Path) -> None:
    job = launch(2, "copies.py", "late", str(tmp_path), "2", warm=True)
    assert job.finish() == 0, job.output
    assert job.output.count("size=2\n") == 2
    assert job.output.count("refused: CG_RANKS=3 has been set after the world had begun") == 2


def test_killing_the_launcher_ends_the_job(launch: Launch) -> None:
    job = launch(2, "behave.py", "wait")
    job.wait_for("ready", 2)
    job.process.kill()
    assert job.finish() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("options", "ranks"), [(["-n", "4", "--virtual"], 4), (["-n", "1"], 1)], ids=["virtual", "one"]
)
def test_one_process_needs_no_mpi(start: Start, options: list[str], ranks: int) -> None:
    job = start([sys.executable, "-m", "cg.launch", *options, PROGRAMS / "behave.py", "virtual"])
    assert job.finish() == 0, job.output
    assert f"virtual={ranks} False" in job.output


def test_plain_python_plays_the_ranks_that_it_is_told_to(start: Start) -> None:
    job = start([sys.executable, PROGRAMS / "behave.py", "virtual"], CG_RANKS="3")
    assert job.finish() == 0, job.output
    assert "virtual=3 False" in job.output


def test_virtual_ranks_under_an_mpi_launcher_are_an_error(start: Start) -> None:
    job = plain(start, PROGRAMS / "behave.py", "talk", warm=True, CG_RANKS="5")
    assert job.finish() == 1, job.output
    assert "CG_RANKS=5 asks for ranks in one process" in job.output


def test_a_library_that_does_not_exist_is_an_error(launch: Launch) -> None:
    job = launch(2, "behave.py", "talk", "2", warm=True, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert job.finish() == 1, job.output
    assert "but MPI cannot be loaded" in job.output
    assert "pip install mpi4py mpich" in job.output
