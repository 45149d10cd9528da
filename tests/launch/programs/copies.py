"""One of several processes that do not know each other; says how it takes that.

Arguments: what the process does, a folder, and how many processes there are.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE, STDOUT

MODE, FOLDER, COPIES = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
PATIENCE = 60.0


def say(text: str) -> None:
    """Write in one piece, which that of another process cannot part."""
    os.write(1, f"{text}\n".encode())


def meet() -> None:
    """Wait for the other copies: a launcher ends them when one has failed."""
    (FOLDER / str(os.getpid())).touch()
    until = time.monotonic() + PATIENCE
    while len(list(FOLDER.iterdir())) < COPIES and time.monotonic() < until:
        time.sleep(0.05)


def alone() -> None:
    """Uses the world."""
    import cg

    try:
        say(f"size={cg.world_size()}")
    except cg.WorldError as error:
        say(f"refused: {error}")
        meet()
        raise


def parent() -> None:
    """Starts a program that uses the world, and then uses it itself; says what the former wrote."""
    program = [sys.executable, __file__, "alone", *sys.argv[2:]]
    child = subprocess.run(program, check=True, text=True, stdout=PIPE, stderr=STDOUT)
    for line in child.stdout.splitlines():
        say(f"child: {line}")
    alone()


def late() -> None:
    """Asks for other ranks when the world has begun."""
    import cg

    before = cg.world_size()
    os.environ["CG_RANKS"] = str(before)
    say(f"size={cg.world_size()}")
    os.environ["CG_RANKS"] = str(before + 1)
    try:
        cg.world_size()
    except cg.WorldError as error:
        say(f"refused: {error}")
    del os.environ["CG_RANKS"]
    cg.barrier()


globals()[MODE]()
