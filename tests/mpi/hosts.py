"""Several hosts out of one: each with a network, a name, processes and shared memory of its own.

    python hosts.py HOST,HOST... COMMAND...    run a command on the head of such a network

The head is one more host, where the command finds an `ssh` that reaches the others. What sets them
up is the first process of a PID namespace that holds all of them: when it ends, Linux ends whatever
runs there and takes the networks away. The machine's own network is not touched. As on a cluster,
hosts have files in common, but neither `/dev/shm` nor `$TMPDIR`. Being of one kernel, they have its
boot id, clocks and cores in common as well, which those of a cluster do not.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

HEAD = "head"
SUBNET = "10.77.0"
PORT = 22
READY = "ready"
ISOLATED = ("--uts", "--net", "--ipc", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child")
SECONDS = 20
"""How long setting up may take."""


def command(names: Sequence[str], program: Sequence[str]) -> list[str]:
    """The command that runs `program` on the head of hosts of these names."""
    return [sys.executable, __file__, ",".join(names), *program]


def missing() -> str:
    """Why there can be no such hosts here; nothing if there can."""
    for tool in ("unshare", "ip", "mount", "hostname"):
        if shutil.which(tool) is None:
            return f"emulated hosts need `{tool}`"
    script = (
        "hostname head && mount -t tmpfs tmpfs /dev/shm && ip link add net0 type bridge"
        " && ip link add name plug0 type veth peer name end0"
    )
    tried = subprocess.run(
        [*unshare(), "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if tried.returncode == 0:
        return ""
    return f"emulated hosts need namespaces, which are not permitted here: {tried.stderr.strip()}"


def unshare() -> list[str]:
    """The command before one that gets namespaces of its own."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, *ISOLATED]


def _address(index: int) -> str:
    return f"{SUBNET}.{index + 1}"


def _be_head(names: Sequence[str], program: Sequence[str]) -> int:
    """Set up this host and the others, and run the program; its exit code."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        everyone = [HEAD, *names]
        table = "".join(f"{_address(i)} {name}\n" for i, name in enumerate(everyone))
        hosts = Path(folder, "hosts")
        hosts.write_text(f"127.0.0.1 localhost\n{table}")
        _do("mount", "--bind", str(hosts), "/etc/hosts")
        _do("hostname", HEAD)
        _do("ip", "link", "set", "lo", "up")
        _do("ip", "link", "add", "net0", "type", "bridge")
        _do("ip", "address", "add", f"{_address(0)}/24", "dev", "net0")
        _do("ip", "link", "set", "net0", "up")
        local = Path(folder, "local")
        local.mkdir()
        for index, name in enumerate(names, start=1):
            _start(name, index, local)
        tools = Path(folder, "bin")
        tools.mkdir()
        ssh = tools / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" --ssh "$@"\n')
        ssh.chmod(0o755)
        path = os.pathsep.join([str(tools), os.environ["PATH"]])
        process = subprocess.Popen(program, env={**os.environ, "PATH": path, "TMPDIR": str(local)})
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _frame: process.send_signal(number))
        return process.wait()


def _start(name: str, index: int, local: Path) -> None:
    """Start a host, and plug it in."""
    host = subprocess.Popen(
        ["unshare", *ISOLATED, sys.executable, __file__, "--host", name, str(index), str(local)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C is for the program alone
    )
    assert host.stdin is not None
    assert host.stdout is not None
    assert host.stdout.readline().strip() == READY, f"host {name} has not started"
    plug, end = f"plug{index}", f"end{index}"
    _do("ip", "link", "add", plug, "type", "veth", "peer", "name", end)
    _do("ip", "link", "set", end, "netns", str(host.pid))
    _do("ip", "link", "set", plug, "master", "net0", "up")
    host.stdin.write(f"{end}\n")
    host.stdin.flush()
    assert host.stdout.readline().strip() == READY, f"host {name} has no network"


def _be_host(name: str, index: int, local: str) -> None:
    """Run what comes over the network, as a server of ssh does."""
    _do("hostname", name)
    for folder in ("/dev/shm", local):
        _do("mount", "-t", "tmpfs", "tmpfs", folder)
    _do("ip", "link", "set", "lo", "up")
    print(READY, flush=True)
    end = sys.stdin.readline().strip()
    _do("ip", "link", "set", end, "name", "eth0")
    _do("ip", "address", "add", f"{_address(index)}/24", "dev", "eth0")
    _do("ip", "link", "set", "eth0", "up")
    with socket.create_server((_address(index), PORT)) as server:
        print(READY, flush=True)
        while True:
            link, _ = server.accept()
            threading.Thread(target=_serve, args=(link,), daemon=True).start()


def _serve(link: socket.socket) -> None:
    text = b""
    while not text.endswith(b"\0"):
        text += link.recv(1)
    given = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    line = ["sh", "-c", text[:-1].decode()]
    with link:
        subprocess.run(line, stdin=link, stdout=link, stderr=link, env=given, cwd="/", check=False)


def _ssh(arguments: Sequence[str]) -> int:
    """`ssh [-option...] HOST COMMAND...`, without encryption or exit codes."""
    words = list(arguments)
    while words[0].startswith("-"):
        words.pop(0)
    try:
        link = socket.create_connection((words[0], PORT), SECONDS)
    except OSError as error:
        print(f"ssh: {words[0]}: {error}", file=sys.stderr)
        return 255
    link.settimeout(None)
    link.sendall(" ".join(words[1:]).encode() + b"\0")
    threading.Thread(target=_send_input, args=(link,), daemon=True).start()
    while content := link.recv(65536):
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
    return 0


def _send_input(link: socket.socket) -> None:
    while content := os.read(0, 65536):
        link.sendall(content)
    link.shutdown(socket.SHUT_WR)


def _isolate(program: Sequence[str]) -> int:
    """Run a program in namespaces of its own, where it gets our signals; its exit code."""
    process = subprocess.Popen([*unshare(), *program])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def forward(number: int, _frame: FrameType | None) -> None:
        for child in children.read_text().split():
            os.kill(int(child), number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    return process.wait()


def _do(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


def main(words: Sequence[str]) -> int:
    if words[0] == "--ssh":
        return _ssh(words[1:])
    if words[0] == "--host":
        _be_host(words[1], int(words[2]), words[3])
        return 0
    if words[0] == "--head":
        return _be_head(words[1].split(","), words[2:])
    return _isolate([sys.executable, __file__, "--head", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
