"""Interpreters that have imported torch and cg, of which ranks are forked: they start in no time.

    python warm.py serve DESCRIPTOR        such an interpreter, and the socket where it is asked
    mpiexec -n 2 python warm.py PROGRAM    what stands for `python PROGRAM` in a job

The launcher of MPI is real, as are the variables and the socket that it gives a rank. The process
that it starts hands these to an interpreter, waits for the fork, and ends as that has ended. When
it is killed, so is the fork. The interpreter has imported torch, what tracing makes it import, and
the home of each public name of cg. A fork does again what cg does of a process when it is imported:
hooks for failures, cores, threads. A program without a launcher is forked in the same way.

Ranks with an even number are forked of one interpreter, and the others of another: strings have
other hashes there, as they do in processes that were started apart. A program that depends on the
order of a set still fails.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import sys
import types
from typing import Any, NoReturn

INTERPRETERS = "WARM_INTERPRETERS"
"""The variable with their addresses, in the abstract namespace."""
ALONE = "WARM_ALONE"
"""The variable of a program that no launcher of MPI has started."""
DESCRIPTORS = 16
THRESHOLDS = (50_000, 10, 50)
"""Of Python's collector, in tests and ranks: a trace makes thousands of objects that live long."""
MODULES = (
    "numpy",
    "torch",
    "torch._dynamo.config",  # which torch.fx imports in its first trace
    "torch.export",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.symbolic_shapes",
)


def ask(program: list[str]) -> NoReturn:
    """Have a program run by a fork of an interpreter, and end as it ends."""
    addresses = os.environ.pop(INTERPRETERS).split(os.pathsep)
    rank, descriptors = 0, [0, 1, 2]
    if os.environ.pop(ALONE, None) is None:
        if "PMI_FD" not in os.environ:  # another launcher than MPICH's may look at the process
            os.execv(sys.executable, [sys.executable, *program])
        rank = int(os.environ["PMI_RANK"])
        descriptors.append(int(os.environ["PMI_FD"]))
    environ = dict(os.environ)
    text = json.dumps([program, environ, os.getcwd(), descriptors]).encode()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(f"\0{addresses[rank % len(addresses)]}")
        sent = array.array("i", descriptors)
        link.sendmsg([len(text).to_bytes(8)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
        link.sendall(text)
        ended = int.from_bytes(_received(link, 8))
    code = os.waitstatus_to_exitcode(ended)
    if code < 0:
        with contextlib.suppress(OSError):  # nobody can handle SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _received(link: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        more = link.recv(count - len(content))
        if not more:
            raise EOFError("the other end has gone")
        content += more
    return content


def serve(listener: socket.socket) -> list[str]:
    """Fork a rank for each that asks, until standard input ends; returns in the forks alone.

    Returns:
        The program that the fork is to run, and its arguments.
    """
    import gc
    import importlib
    import select

    for name in MODULES:
        importlib.import_module(name)
    package = importlib.import_module("cg")
    for name in package.__all__:
        getattr(package, name)  # which imports its home
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    links: dict[int, tuple[socket.socket, int]] = {}
    """By the descriptor of a fork's process: who has asked for it, and its number."""
    poll = select.poll()
    poll.register(0)
    poll.register(listener, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == 0:
                for _, process in links.values():
                    _kill(process)
                os._exit(0)
            if ready == listener.fileno():
                link, _ = listener.accept()
                request, received = _request(link)
                process = os.fork()
                if process == 0:
                    for other, _ in links.values():
                        other.close()
                    for descriptor in links:
                        os.close(descriptor)
                    listener.close()
                    link.close()
                    return _become(*request, received, own)
                for descriptor in received:
                    os.close(descriptor)
                watched = os.pidfd_open(process)
                links[watched] = (link, process)
                poll.register(watched, select.POLLIN)
                poll.register(link, select.POLLIN)
            elif ready in links:
                link, process = links.pop(ready)
                _, ended = os.waitpid(process, 0)
                poll.unregister(ready)
                poll.unregister(link)
                os.close(ready)
                with link:
                    _tell(link, ended)
            else:  # whoever has asked is no more
                for link, process in links.values():
                    if link.fileno() == ready:
                        poll.unregister(link)
                        poll.register(link, 0)
                        _kill(process)


def _tell(link: socket.socket, ended: int) -> None:
    with contextlib.suppress(OSError):
        link.sendall(ended.to_bytes(8))


def _kill(process: int) -> None:
    """End a fork, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def _request(link: socket.socket) -> tuple[Any, list[int]]:
    found = array.array("i")
    head, ancillary, _, _ = link.recvmsg(8, socket.CMSG_SPACE(DESCRIPTORS * found.itemsize))
    for _, _, content in ancillary:
        found.frombytes(content)
    head += _received(link, 8 - len(head))
    return json.loads(_received(link, int.from_bytes(head))), list(found)


def _become(
    program: list[str],
    environ: dict[str, str],
    folder: str,
    descriptors: list[int],
    received: list[int],
    own: list[str],
) -> list[str]:
    """Make a fork what the process that has asked for it would be."""
    import fcntl

    import numpy as np
    import torch

    from cg.launch.world.bootstrap import prepare

    os.setsid()  # the launcher gives each rank a process group
    aside = [fcntl.fcntl(each, fcntl.F_DUPFD, 100) for each in received]
    for each in received:
        os.close(each)
    for target, each in zip(descriptors, aside, strict=True):
        os.dup2(each, target)
        os.close(each)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    given = environ.get("PYTHONPATH", "").split(os.pathsep)
    if given != own:
        sys.path[:] = [*filter(None, given), *(each for each in sys.path[1:] if each not in own)]
        torch._import_device_backends()  # those of the path, as torch does when it is imported
    else:
        del sys.path[0]
    np.random.seed()  # each process draws a state of its own
    prepare()
    return program


def run(program: list[str]) -> None:
    """Run a program as `python PROGRAM` does."""
    import importlib.util

    main = types.ModuleType("__main__")
    if program[0] == "-m":
        sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(program[1])
        assert spec is not None
        assert spec.origin is not None
        main.__spec__, main.__package__, file = spec, spec.parent, spec.origin
        sys.argv[:] = [file, *program[2:]]
    else:
        file = program[0]
        sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
        sys.argv[:] = program
    main.__file__ = file
    sys.modules["__main__"] = main
    with open(file, encoding="utf-8") as source:
        code = compile(source.read(), file, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        run(serve(socket.socket(fileno=int(sys.argv[2]))))
    else:
        ask(sys.argv[1:])
