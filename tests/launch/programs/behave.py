"""One rank of a job that goes well or badly, as its argument says."""

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

from cg.launch.environment.detect import detect
from cg.launch.world.bootstrap import prepare

prepare()

import torch  # noqa: E402  (it comes after the threads are capped)

from cg.backends.devices import find  # noqa: E402
from cg.launch.world.waiting import WorldError  # noqa: E402
from cg.launch.world.world import world  # noqa: E402

MODE = sys.argv[1]
LAUNCH = detect(os.environ)
RANK = LAUNCH.rank if LAUNCH is not None else 0
BAD = 1
LONG = 600.0


def say(text: str) -> None:
    """Write a line in one piece, which that of another rank cannot part."""
    os.write(1, f"{text}\n".encode())


def fail() -> None:
    raise ValueError("this rank is bad")


def early() -> None:
    """Fails before this rank has started MPI, in which the others wait."""
    if RANK == BAD:
        fail()
    world()


def early_asleep() -> None:
    """Fails while no rank has started MPI."""
    if RANK == BAD:
        fail()
    time.sleep(LONG)


def in_collective() -> None:
    world().barrier()
    if RANK == BAD:
        fail()
    world().barrier()


def asleep() -> None:
    world().barrier()
    if RANK == BAD:
        fail()
    time.sleep(LONG)


def vanish() -> None:
    """Ends like a rank that is through, while the others wait for it."""
    world().barrier()
    if RANK == BAD:
        os._exit(0)
    world().barrier()


def in_thread() -> None:
    world()
    if RANK == BAD:
        threading.Thread(target=fail, name="helper").start()
    time.sleep(LONG)


def hook_replaced() -> None:
    world()
    sys.excepthook = sys.__excepthook__
    if RANK == BAD:
        fail()
    world().barrier()


def exit_three() -> None:
    world()
    if RANK == BAD:
        sys.exit(3)
    world().barrier()


def exit_three_early() -> None:
    if RANK == BAD:
        sys.exit(3)
    world()


def raise_exit() -> None:
    world()
    if RANK == BAD:
        raise SystemExit(3)


def leave() -> None:
    world()
    if RANK != BAD:
        world().barrier()


def diverge() -> None:
    if RANK == BAD:
        world().broadcast("x", BAD)
    else:
        world().barrier()
    world().barrier()


def late() -> None:
    world()
    if RANK == BAD:
        time.sleep(LONG)
    world().barrier()


def outstay() -> None:
    world()
    if RANK == BAD:
        time.sleep(LONG)


def never_start() -> None:
    if RANK != BAD:
        world()


def skew() -> None:
    world()
    time.sleep(0.3 * RANK)


def wait() -> None:
    world()
    say(f"ready process={RANK}:{os.getpid()}")
    if RANK == BAD:
        time.sleep(LONG)
    world().barrier()


def until() -> None:
    """Works until a file is there."""
    ours = world()
    say(f"ready process={RANK}:{os.getpid()}")
    while not ours.broadcast(Path(sys.argv[2]).exists(), 0):
        time.sleep(0.01)


def with_child() -> None:
    """Waits, with a process of its own that would outlive it."""
    subprocess.Popen(["sleep", str(LONG)])
    wait()


def modes() -> None:
    """Says who may read the files of the job's folder."""
    world().barrier()
    folder = Path(os.environ["CG_RANK_REGISTRY"])
    for path in (folder, *folder.iterdir()):
        say(f"mode={stat.S_IMODE(path.stat().st_mode):o}")
    world().barrier()


def catch() -> None:
    world()
    try:
        sys.exit(3)
    except SystemExit as error:
        say(f"caught={error.code}")
    world().barrier()


def talk() -> None:
    ours = world()
    ours.barrier()
    large = b"y" * 100_000
    assert ours.broadcast({"a": 1} if RANK == 0 else None, 0) == {"a": 1}
    assert ours.broadcast(large if RANK == 1 else None, 1) == large
    assert ours.allgather("r" * RANK) == ["r" * rank for rank in range(ours.size)]
    assert ours.allgather(large * RANK) == [large * rank for rank in range(ours.size)]
    assert ours.size == int(sys.argv[2])
    assert list(ours.nodes) == [0] * ours.size
    assert ours.rank == RANK
    assert [rank for rank in range(ours.size) if ours.plays(rank)] == [RANK]
    assert not ours.is_virtual
    assert (ours.local_rank, ours.local_size) == (RANK, ours.size)  # type: ignore[attr-defined]
    assert ours.local_ranks == tuple(range(ours.size))  # type: ignore[attr-defined]
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/mpich" in line:
            say(f"segment={line.split()[5]}")
    say(f"threads={os.environ.get('OMP_NUM_THREADS')}")


def mix() -> None:
    """Rank 0 is in a barrier, whose messages are none, and the other gathers or receives values."""
    ours = world()
    if RANK == 0:
        ours.barrier()
        time.sleep(LONG)
    try:
        ours.broadcast(None, 0) if sys.argv[2] == "broadcast" else ours.allgather("mine")
    except WorldError as error:
        say(f"refused={error}")
        raise


def see_one() -> None:
    """Each rank sees one accelerator, which the arguments name by rank."""
    named = type("Properties", (), {"uuid": sys.argv[2 + RANK]})
    torch.get_device_module = lambda kind: type(
        "Module", (), {"get_device_properties": staticmethod(lambda index: named)}
    )
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: 1
    torch.accelerator.current_accelerator = lambda: torch.device("cuda", 0)
    torch.accelerator.set_device_index = lambda index: None
    find.MAKERS["cuda"] = lambda index: f"cuda:{index}"
    say(f"device={world().device}")
    world().barrier()


def virtual() -> None:
    ours = world()
    assert ours.is_virtual
    say(f"virtual={ours.size} {'mpi4py' in sys.modules}")


globals()[MODE]()
