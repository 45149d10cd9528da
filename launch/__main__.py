"""The launcher: `python -m cg.launch -n 8 train.py --steps 100`."""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .environment.config import THREAD_VARIABLES, Config, ConfigError, environment, table
from .job.host_slots import HostSlots, ends_well
from .job.job import Job
from .job.launcher import Flavour, Launcher, LaunchError, command, find, on_hosts, variables
from .job.restarts import TOLD, Fault, RestartPolicy, Start, Supervisor
from .job.slurm import check_srun, for_daemons, is_elsewhere, requeues
from .world.cores import allowed_cpus, core_count, cpu_quota, read_cores, thread_settings
from .world.shared_memory import shortage

BAD_USAGE = 2
"""Exit code where nothing was started."""

DESCRIPTION = """\
Start PROGRAM on N ranks under MPI, each with its share of the cores.

Finds the mpirun beside this Python, or else on PATH; works as root and with more ranks than
cores. When a rank fails, or on Ctrl-C, the whole job ends; with --restarts a job that has failed
starts again, and a program goes on from its newest checkpoint. One rank needs no MPI."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher and return the job's exit code; see `--help`."""
    options = _parser().parse_args(arguments)
    if options.help_env:
        print(table())
        return 0
    try:
        return _run(options)
    except (LaunchError, ConfigError) as error:
        print(f"cg.launch: {error}", file=sys.stderr)
        return BAD_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cg.launch",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-n", "--ranks", metavar="N", help="how many ranks to start")
    add("-m", "--module", action="store_true", help="PROGRAM is a module, as in python -m")
    add("--virtual", action="store_true", help="no MPI: one process plays all ranks")
    add("--hosts", metavar="A:2,B:2", help="start ranks on these machines, so many on each")
    add("--hostfile", metavar="FILE", help="the same from a file, as the launcher reads it")
    add("--mpirun", metavar="PATH", help="the launcher to use")
    add("--mpi-arg", metavar="ARG", action="append", default=[], help="pass ARG to it (repeatable)")
    add("--restarts", metavar="N", help="start a job that has failed again, up to N times")
    add("--elastic", metavar="MIN:MAX", help="on so many ranks, as many as are left")
    add("--timeout", metavar="S", help="seconds that a rank waits for another; 0: for ever")
    add("--dump", metavar="DIR", help="write what compilation does into DIR")
    add("--passes", metavar="LIST", help="switch passes off: --passes=-overlap,-cse")
    add("--no-thread-cap", action="store_true", help="leave thread pools as they are")
    add("--no-affinity", action="store_true", help="do not bind ranks to cores")
    add("--no-bind-devices", action="store_true", help="do not select devices by local rank")
    add("--device", metavar="KIND", help="where actors live: auto, cpu, fake, or one such as cuda")
    add(
        "-x",
        "--env",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help="carry a variable to all ranks, also on other machines (repeatable)",
    )
    add("-v", "--verbose", action="store_true", help="print the command on standard error")
    add("--help-env", action="store_true", help="describe the environment variables, and exit")
    add("program", metavar="PROGRAM", nargs="?", help="the script that every rank runs")
    add("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _run(options: argparse.Namespace) -> int:
    ranks = _rank_count(options.ranks)
    policy = RestartPolicy.of(options.restarts, options.elastic, ranks)
    inherited = {name: v for name, v in environment().items() if name not in (*TOLD, "CG_RANKS")}
    request = _Request(options, _program(options), _variables(options, inherited), inherited)
    Config.from_environ({**inherited, **request.ours})  # complain here, not on every rank
    if options.virtual and request.names_hosts:
        raise LaunchError("--virtual plays all ranks in one process: leave out the hosts")
    if policy.ranks is not None:
        _check_elastic(request)
    before = requeues(inherited)
    if request.is_alone(ranks) and not policy.most:
        start = request.start(ranks)
        sys.stdout.flush()
        told = {"CG_RESTARTS": str(before)}
        os.execve(start.command[0], list(start.command), {**start.environment, **told})
    with Job() as job, tempfile.TemporaryDirectory(prefix="cg-hosts-") as folder:

        def start_after(fault: Fault | None) -> Start:
            if fault is None or policy.ranks is None:
                return request.start(ranks)
            if not request.names_hosts:
                return request.start(policy.left(fault, None))
            hosts = HostSlots.of(options.hosts, options.hostfile)
            left = hosts.answering(request.answers, Path(folder))
            job.end_descendants()
            return request.start(policy.left(fault, left.slots), left)

        return Supervisor(job, policy, start_after, before).run()


@dataclass(frozen=True)
class _Request:
    """A job that a user asks for.

    Attributes:
        options: of the command line.
        program: the command line of each rank.
        ours: the variables that the options stand for.
        inherited: the environment of this process, without what is told to ranks alone.
    """

    options: argparse.Namespace
    program: Sequence[str]
    ours: Mapping[str, str]
    inherited: Mapping[str, str]

    @property
    def names_hosts(self) -> bool:
        return self.options.hosts is not None or self.options.hostfile is not None

    def is_alone(self, ranks: int) -> bool:
        """True if one process does it, without MPI."""
        is_one = ranks == 1 and self.options.mpirun is None and not self.names_hosts
        return bool(self.options.virtual) or is_one

    @functools.cached_property
    def launcher(self) -> Launcher:
        launcher = find(self.options.mpirun, _beside(), self.inherited.get("PATH", os.defpath))
        if launcher.flavour is Flavour.MPICH and not (self.names_hosts or self.options.mpi_arg):
            check_srun(self.inherited)
        return launcher

    def start(self, ranks: int, hosts: HostSlots | None = None) -> Start:
        """Make a start.

        Args:
            ranks: how many there are to be.
            hosts: where; None: where the options say.

        Raises:
            LaunchError: this machine lacks something.
        """
        ours = dict(self.ours)
        if self.is_alone(ranks):
            ours["CG_RANKS"] = str(ranks)
            _show(self.options, self.program, ours)
            return Start(ranks, self.program, {**self.inherited, **ours}, is_near=True)
        options, launcher, inherited = self.options, self.launcher, self.inherited
        cores = core_count(read_cores(allowed_cpus()), cpu_quota())
        elsewhere = self.names_hosts or is_elsewhere(inherited)
        if not (options.no_thread_cap or options.mpi_arg or elsewhere):
            preset = {name for name in THREAD_VARIABLES if inherited.get(name)}
            ours.update(thread_settings(max(1, cores // ranks), preset))
        if launcher.flavour is Flavour.MPICH and not (elsewhere or options.mpi_arg):
            short = shortage(ranks, {**inherited, **ours}, others_began=False)
            if short is not None:
                raise LaunchError(short)
        names, file = (options.hosts, options.hostfile) if hosts is None else hosts.options
        line = command(
            launcher,
            ranks,
            self.program,
            exported=[*ours, *TOLD, *(n for n in ("PYTHONPATH",) if n in inherited)],
            oversubscribe=ranks > cores and not elsewhere,
            leave_unbound=not options.no_affinity,
            extra=[*on_hosts(launcher, names, file), *options.mpi_arg],
        )
        _show(options, line, ours, launcher)
        return Start(ranks, line, {**self._of_launcher, **ours}, is_near=not elsewhere)

    def answers(self, host: str) -> bool:
        """True if the launcher can start a program on a host."""
        extra = [*on_hosts(self.launcher, host, None), *self.options.mpi_arg]
        return ends_well(command(self.launcher, 1, ["true"], extra=extra), self._of_launcher)

    @property
    def _of_launcher(self) -> dict[str, str]:
        return {**for_daemons(self.inherited), **variables(self.launcher, os.geteuid() == 0)}


def _check_elastic(request: _Request) -> None:
    if request.options.virtual:
        raise LaunchError("--virtual plays all ranks in one process: leave out --elastic")
    if is_elsewhere(request.inherited) and not request.names_hosts:
        raise LaunchError("--elastic asks hosts if they answer: name them by --hosts A:2,B:2")


def _rank_count(text: str | None) -> int:
    if text is None:
        raise LaunchError("say how many ranks to start: -n N")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise LaunchError(f"-n {text}: the number of ranks is a whole number of at least 1")
    return int(text)


def _program(options: argparse.Namespace) -> list[str]:
    """The command line of each rank."""
    if options.program is None:
        raise LaunchError("say what to run: python -m cg.launch -n N script.py ...")
    if options.module:
        return [sys.executable, "-m", options.program, *options.arguments]
    path = Path(options.program)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise LaunchError(f"{path} is a directory; give a script")
    if not path.exists():
        raise LaunchError(f"{path}: no such script (in {Path.cwd()})")
    return [sys.executable, options.program, *options.arguments]


def _variables(options: argparse.Namespace, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that the options stand for."""
    chosen: dict[str, str] = {}
    for item in options.env:
        name, equals, value = item.partition("=")
        if not name or not (equals or name in inherited):
            raise LaunchError(f"-x {item}: {name or 'the name'} is not set; use -x NAME=VALUE")
        chosen[name] = value if equals else inherited[name]
    for name, value in (
        ("CG_TIMEOUT", options.timeout),
        ("CG_DUMP", options.dump and str(Path(options.dump).absolute())),
        ("CG_PASSES", options.passes),
        ("CG_THREAD_CAP", options.no_thread_cap and "0"),
        ("CG_AFFINITY", options.no_affinity and "0"),
        ("CG_BIND_DEVICES", options.no_bind_devices and "0"),
        ("CG_DEVICE", options.device),
    ):
        if value:
            chosen[name] = value
    return chosen


def _beside() -> list[Path]:
    """The folders of the scripts of this Python's packages: its virtual environment's first."""
    python = Path(sys.executable)
    return list(dict.fromkeys([python.parent, python.resolve().parent]))


def _show(
    options: argparse.Namespace,
    line: Sequence[str],
    ours: Mapping[str, str],
    launcher: Launcher | None = None,
) -> None:
    if not options.verbose:
        return
    if launcher is not None:
        print(f"cg.launch: {launcher.flavour.value}: {launcher.version}", file=sys.stderr)
    assignments = [f"{name}={shlex.quote(value)}" for name, value in sorted(ours.items())]
    print("cg.launch: " + " ".join([*assignments, shlex.join(line)]), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
