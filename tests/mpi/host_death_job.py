"""A job on two hosts, of which one dies in the first start.

    python host_death_job.py FLAG    on the head of the hosts north and south (`hosts.py`)

starts the same program on ranks of both. A rank on south makes the file FLAG, upon which the head
kills that host.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FLAG = Path(sys.argv[1])


def play_head() -> int:
    where = ["--hosts", "north:2,south:2", "--restarts", "2", "--elastic", "2:4"]
    words = ["-m", "cg.launch", "-n", "4", *where, "--timeout", "40", __file__, str(FLAG)]
    job = subprocess.Popen([sys.executable, *words])
    while not FLAG.exists() and job.poll() is None:
        time.sleep(0.05)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        line = path.read_bytes().split(b"\0")
        if line[0] == b"unshare" and b"south" in line and b"--host" in line:
            os.kill(int(path.parent.name), signal.SIGKILL)  # its processes end with it
            print("south is killed", flush=True)
    return job.wait()


def play_rank() -> None:
    import torch

    import cg

    @cg.actor
    class Worker:
        @cg.opaque(fake=lambda self, x: x)
        def work(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    workers = [Worker.on(rank)() for rank in range(cg.world_size())]

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        for worker in workers:
            x = worker.work(x)
        return x

    total = float(step(torch.zeros(1)))
    host = os.uname().nodename
    print(f"start {cg.restarts()} on {host}: {cg.world_size()} ranks, {total:g}", flush=True)
    if cg.restarts() == 0:
        if cg.rank() == cg.world_size() - 1:
            FLAG.touch()
        cg.barrier()
        while True:
            step(torch.zeros(1))


if "PMI_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
    play_rank()
else:
    sys.exit(play_head())
