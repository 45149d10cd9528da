"""Prepare a process before torch is imported: failure hooks, cores, threads, heap."""

from __future__ import annotations

import io
import sys
import warnings
from typing import TextIO

from ...backends.devices.environment import VARIABLES
from ..environment.config import Config, config, environment, export, unknown_variables
from ..environment.detect import Launch
from ..job import failure
from ..job import listening_ports as ports
from ..job import process_manager as manager
from ..job.rank_registry import RankRegistry
from . import allocator, cores


def prepare() -> Config:
    """Make this process ready to be a rank; called when the package is imported.

    If no MPI launcher has started the process, it only reads the environment. It needs neither
    torch nor MPI, and talks to no other rank.

    Raises:
        ConfigError: an environment variable has a value that it does not take.
    """
    settings = config()
    for name in unknown_variables(environment()):
        warnings.warn(f"{name} is set, but there is no such setting", stacklevel=2)
    if settings.launch is not None:
        write_whole_lines(sys.stdout)
        failure.install(settings.launch, registry_of(settings))
        if settings.device != "cpu":
            preset = environment()
            export({name: value for name, value in VARIABLES.items() if name not in preset})
        keep_to_share(settings, settings.launch)
        if settings.keep_memory and not settings.preset_malloc:
            allocator.keep_freed_memory()
        above = manager.find(settings.launch)
        if above is not None:
            manager.follow(above)  # by a thread, bound as this one is
            if ports.is_on_one_machine(settings.launch):
                ports.close_control_port(above)
    return settings


def registry_of(settings: Config) -> RankRegistry | None:
    """The registry in which the launcher looks for this process, if there is one."""
    return None if settings.rank_registry is None else RankRegistry(settings.rank_registry)


def write_whole_lines(stream: TextIO | None) -> None:
    """Write each line at once and in one piece, since other ranks write to the same terminal.

    A pipe to the launcher would keep lines until the end. Under `python -u` the stream stays as it
    is: the user has asked for every argument of a `print` to be written by itself.
    """
    if isinstance(stream, io.TextIOWrapper) and not stream.write_through:
        stream.reconfigure(line_buffering=True)


def keep_to_share(settings: Config, launch: Launch) -> None:
    """Bind this process to its cores and cap its threads, if settings and launcher allow it."""
    if launch.local_rank is None or launch.local_size is None:
        return
    quota = cores.cpu_quota()
    allowed = cores.allowed_cpus()
    usable = cores.read_cores(allowed)
    above = cores.parent_cpus()
    machine = usable if above is None else cores.read_cores(above)
    count = cores.core_count(usable, quota)
    is_free = allowed == above
    if settings.affinity and is_free and cores.should_bind(count, launch.local_size):
        cores.bind(cores.share(usable, launch.local_rank, launch.local_size))
    if settings.thread_cap:
        fair = cores.core_count(machine, quota) // launch.local_size
        cores.cap_threads(max(1, min(fair, count)), settings.preset_threads)
