"""Find the MPI launcher, and write the command line with which it starts the ranks."""

from __future__ import annotations

import enum
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = ("mpirun", "mpiexec")
VERSION_SECONDS = 20


class LaunchError(RuntimeError):
    """The job cannot be started as asked; the message says what to change."""


class Flavour(enum.Enum):
    """Families of launchers that take different options."""

    MPICH = "MPICH"
    INTEL = "Intel MPI"
    OPEN_MPI = "Open MPI"
    OTHER = "unknown MPI"


_SIGNS = (
    (Flavour.OPEN_MPI, r"Open MPI|OpenRTE|PRRTE|prterun"),
    (Flavour.INTEL, r"Intel\(R\) MPI"),
    (Flavour.MPICH, r"HYDRA|MPICH"),
)


_HOST = re.compile(
    r"(?:[A-Za-z0-9_+^][A-Za-z0-9_.@+%-]*|\[[0-9A-Fa-f:.]+\])(?::(?:0*[1-9][0-9]{0,8}|\*))?"
)
"""A host, with the number of its ranks. Open MPI has names such as `+n0` and `^north`, and `*`."""
_OPTION = re.compile(r"(?:^|[\s=])-")
"""A word or a value in a line of a file of hosts that a program would take for an option."""
_HOST_HELP = (
    "a host is a name or an address that begins with no hyphen, with :N behind it for N ranks, at "
    "least 1"
)

_HOST_OPTIONS = {
    Flavour.OPEN_MPI: ("--host", "--hostfile"),
    Flavour.INTEL: ("-hosts", "-f"),
    Flavour.MPICH: ("-hosts", "-f"),
}


@dataclass(frozen=True)
class Launcher:
    """An MPI launcher that is installed."""

    path: Path
    flavour: Flavour
    version: str
    """The first line that it says about itself."""


def find(explicit: str | None, beside: Sequence[Path], search_path: str) -> Launcher:
    """The launcher to use: the one asked for, else beside this Python, else on the path.

    Beside comes first since the wheels of MPICH and Open MPI put it there together with the
    library that mpi4py loads.

    Args:
        explicit: a path or a name, or None.
        beside: directories to look into first.
        search_path: the value of PATH.

    Raises:
        LaunchError: there is none, or it does not run.
    """
    if explicit is not None:
        path = shutil.which(explicit, path=search_path)
        if path is None:
            raise LaunchError(f"--mpirun {explicit}: no such program")
        return identify(Path(path))
    for directory in [*map(str, beside), search_path]:
        for name in NAMES:
            if path := shutil.which(name, path=directory):
                return identify(Path(path))
    raise LaunchError(
        "no mpirun beside this Python nor on PATH. Install an MPI (pip install mpi4py mpich), say "
        "where it is (--mpirun PATH), or let one process play all ranks (--virtual)"
    )


def identify(path: Path) -> Launcher:
    """Identify the launcher at `path` by its `--version`.

    Raises:
        LaunchError: it does not run.
    """
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version does not work: {error}") from error
    text = (done.stdout + done.stderr).strip()
    flavour = next((family for family, sign in _SIGNS if re.search(sign, text)), Flavour.OTHER)
    return Launcher(path, flavour, text.partition("\n")[0].strip())


def on_hosts(launcher: Launcher, hosts: str | None, file: str | None) -> list[str]:
    """The launcher's options for the machines to start ranks on; none if the user names none.

    Args:
        launcher: which one.
        hosts: names with commas between them, each with `:N` for N ranks if there are several.
        file: lists them, in the launcher's own format.

    Raises:
        LaunchError: both are given, or something in them is no host, or the launcher's option for
            them is not known.
    """
    if hosts is None and file is None:
        return []
    if hosts is not None and file is not None:
        raise LaunchError("--hosts and --hostfile both say where to start ranks: give one of them")
    names = _HOST_OPTIONS.get(launcher.flavour)
    if names is None:
        raise LaunchError(
            f"{launcher.path}'s option for hosts is not known: give it by "
            "--mpi-arg, instead of --hosts and --hostfile"
        )
    if hosts is not None:
        for host in hosts.split(","):
            if not _HOST.fullmatch(host):
                raise LaunchError(f"--hosts '{hosts}': '{host}' is no host; {_HOST_HELP}: a:2,b:2")
        return [names[0], hosts]
    _check_host_file(Path(str(file)))
    return [names[1], str(file)]


def _check_host_file(path: Path) -> None:
    """Refuse a file with a line that names no host: a launcher waits for ever, or passes it to ssh.

    The launcher's own words follow the host, such as `slots=2`.

    Raises:
        LaunchError: it has such a line, or no host at all, or cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise LaunchError(f"--hostfile {path}: {error.strerror}; give a file of hosts") from error
    texts = {number: line.partition("#")[0].strip() for number, line in enumerate(lines, 1)}
    if not any(texts.values()):
        raise LaunchError(f"--hostfile {path} names no host; write one in each line, such as a:2")
    for number, text in texts.items():
        host, *words = text.split(maxsplit=1) or [""]
        if text and not (_HOST.fullmatch(host) and not any(map(_OPTION.search, words))):
            raise LaunchError(
                f"--hostfile {path}: line {number}, '{text}', is no host; {_HOST_HELP}, and no "
                "word or value behind it begins with a hyphen either"
            )


def command(
    launcher: Launcher,
    ranks: int,
    program: Sequence[str],
    *,
    exported: Sequence[str] = (),
    oversubscribe: bool = False,
    leave_unbound: bool = False,
    extra: Sequence[str] = (),
) -> list[str]:
    """The launcher's command line.

    Args:
        launcher: which one.
        ranks: how many ranks to start.
        program: what each rank runs.
        exported: names of variables to carry to other machines; Hydra carries all.
        oversubscribe: True if there may be more ranks than cores.
        leave_unbound: True if the launcher is to leave ranks unbound; Hydra always does.
        extra: further options for the launcher.
    """
    options = ["-n", str(ranks)]
    if launcher.flavour is Flavour.OPEN_MPI:
        if oversubscribe:
            options += ["--map-by", ":OVERSUBSCRIBE"]
        if leave_unbound:
            options += ["--bind-to", "none"]
        for name in exported:
            options += ["-x", name]
    return [str(launcher.path), *options, *extra, *program]


def variables(launcher: Launcher, as_root: bool) -> Mapping[str, str]:
    """Variables that the launcher itself needs: Open MPI refuses to run as root without them."""
    if launcher.flavour is Flavour.OPEN_MPI and as_root:
        return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {}
