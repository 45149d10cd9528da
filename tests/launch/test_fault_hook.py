"""A program on one device that reads a number of it after a kernel has failed it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cg

LOOKUP = "        return torch.nn.functional.embedding(at, self.rows)"
ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import torch
import cg
from cg.launch.world import world as worlds
from cg.launch.world.single_rank_world import SingleRankWorld
from tests.backends.devices.patience import ASSERTED, loose_device

@cg.actor
class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.ones(4, 2))

    def forward(self, at):
        return torch.nn.functional.embedding(at, self.rows)

device = loose_device()
with worlds.use_world(SingleRankWorld(device)):
    table = Table.on(0)()
    step = cg.trace(lambda at: table.forward(at))
    at = torch.arange(3)
    compiled = step.lower(at).compile()
    compiled(at)
    device.fail(ASSERTED)
    device.check()  # as float(...) does
"""


def test_an_uncaught_error_of_a_device_is_one_message(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    package = Path(cg.__file__).resolve().parent
    found = package.parent if package.name == "cg" else package / ".dev"
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": f"{found}{os.pathsep}{ROOT}", "CG_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("the device has failed in execution 0 of step "), done.stderr
    assert done.stderr.count("device-side assert triggered") == 1
    line = PROGRAM.splitlines().index(LOOKUP) + 1
    assert f"an embedding at {program}:{line}, in forward: it takes 0 to 3\n" in done.stderr
    assert "Traceback" not in done.stderr
