"""Close ports of launchers and MPI libraries that a job on one machine does not need.

These ports listen on all networks, without a password.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

from ..environment.detect import Launch

_SO_ATTACH_FILTER = 26
_RETURN = 0x06


class _FilterInstruction(ctypes.Structure):
    """An instruction of the classic Berkeley packet filter (linux/filter.h)."""

    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )


def is_on_one_machine(launch: Launch) -> bool:
    """True if the launcher's variables say that all ranks are on this machine."""
    return launch.size is not None and launch.size == launch.local_size


def without_network(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for ranks of one machine, which keep MPI from listening for other machines.

    They are those of MPICH, whose UCX would listen on each network, and of Open MPI. Transports
    that the user has chosen stay.
    """
    chosen = {}
    if not environ.keys() & {"UCX_TLS", "UCX_NET_DEVICES"}:
        chosen["UCX_TLS"] = "^tcp"
    if not any(name.startswith(("OMPI_MCA_btl", "OMPI_MCA_pml")) for name in environ):
        chosen["OMPI_MCA_btl"] = "^tcp"
    return chosen


def close_control_port(manager: int) -> None:
    """Close the port at which Hydra waits for its process managers to new connections.

    Hydra's `mpiexec` takes connections from everywhere, and no option changes that. A connection
    that sends half a word stops it. On one machine the only process manager has connected when a
    rank starts. Ranks inherit the socket, so they can give it a filter that drops every packet.
    Connections that it has taken stay as they are.

    Args:
        manager: the process above this rank, on whose command line the port is.
    """
    port = _control_port(manager)
    if port is None:
        return
    for descriptor in filter(is_socket, map(int, os.listdir("/proc/self/fd"))):
        with socket.socket(fileno=os.dup(descriptor)) as shared:
            is_tcp = shared.family in (socket.AF_INET, socket.AF_INET6)
            listens = is_tcp and shared.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and shared.getsockname()[1] == port:
                _drop_everything(shared)


def _control_port(manager: int) -> int | None:
    try:
        words = Path(f"/proc/{manager}/cmdline").read_bytes().decode().split("\0")
        return int(words[words.index("--control-port") + 1].rpartition(":")[2])
    except (OSError, ValueError, IndexError):
        return None


def is_socket(descriptor: int) -> bool:
    """True if a descriptor of this process is open, and is a socket's."""
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _drop_everything(shared: socket.socket) -> None:
    program = _FilterInstruction(_RETURN, 0, 0, 0)  # 0 bytes of each packet are kept
    filter_ = struct.pack("HP", 1, ctypes.addressof(program))
    try:
        shared.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
    except OSError:
        return
