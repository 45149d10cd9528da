"""Find the process manager that has started this rank, and end the rank when it ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

from ..environment.ancestors import inheritors, runs_python
from ..environment.config import environment
from ..environment.detect import Launch
from . import failure


def find(launch: Launch) -> int | None:
    """Find the process of `hydra_pmi_proxy`, `prterun`, `slurmstepd` or the like above this rank.

    Returns:
        Its number; None if it cannot be seen, or has ended, so that another process is the parent.
        None also in a process that a rank's Python program has started: it inherits the rank's
        variables.
    """
    between, manager = inheritors({launch.variable: environment()[launch.variable]})
    return None if manager <= 1 or any(map(runs_python, between)) else manager


def follow(manager: int) -> None:
    """End this rank, and what it has started, when its process manager ends.

    Then no process reads the rank's output or would end the rank. The kernel's own means,
    PR_SET_PDEATHSIG, follows a thread of the parent, which may be a wrapper.
    """
    try:
        descriptor = os.pidfd_open(manager)
        # Launchers give a rank a process group, to end the processes that it has started.
        has_group = os.getpgid(manager) != os.getpgrp()
    except OSError:  # an old kernel, or a sandbox
        return
    threading.Thread(
        target=_follow, args=(descriptor, has_group), name="cg-manager", daemon=True
    ).start()


def _follow(manager: int, has_group: bool) -> None:
    wait = select.poll()
    wait.register(manager, select.POLLIN)
    wait.poll()
    with contextlib.suppress(OSError, ValueError):  # our output may have gone to it
        failure.say("the launcher's process manager on this machine has ended, and so does this")
    if has_group:
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
