"""Ranks that are forks of a warm interpreter are what ranks are that `python` has started."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from cg.launch.job.launcher import Flavour, find

from .jobs import launcher, needs_mpi, run

needs_mpich = pytest.mark.skipif(
    launcher() is None
    or find(None, [Path(sys.executable).parent], os.environ["PATH"]).flavour is not Flavour.MPICH,
    reason="another launcher starts ranks cold",
)
pytestmark = [*needs_mpi, needs_mpich, pytest.mark.timeout(250)]

PROGRAM = """
import os, pickle, sys, time
class Thing: pass
same = type(pickle.loads(pickle.dumps(Thing()))) is Thing
said = [sys.argv[1:], __name__, os.environ["GIVEN"], "torch" in sys.modules, "cg" in sys.modules]
os.write(1, f"{said} {same} hash={hash('a')}\\n".encode())
if sys.argv[1] == "leave":
    open(f"{__file__}.{os.getpid()}", "w").close()
    until = time.monotonic() + 60
    # The first that leaves ends the job, and the other may not have said anything.
    while len(os.listdir(os.path.dirname(__file__))) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    sys.exit(3)
"""


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("leave", 3)])
def test_a_program_finds_what_it_expects(tmp_path: Path, how: str, code: int) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    ended = run(2, [str(file), how], seconds=80, variables={"GIVEN": "x"}, warm=True)
    assert ended.code == code, ended.output
    line = f"[['{how}'], '__main__', 'x', True, True] True hash="
    assert ended.output.count(line) == 2, ended.output
    # What depends on the order of a set differs between ranks, as it may between processes.
    assert len(set(re.findall(r"hash=(-?\d+)", ended.output))) == 2
