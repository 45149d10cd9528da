"""A communicator from a package of its own: examples/mailbox, installed as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ..backends.conformance_cases import cases
from .jobs import ROOT, environment, needs_mpi, run

# By what is installed: whoever looks for the module `pip` turns setuptools' distutils off for this
# process (Python 3.11), and with it the compilers that look for a C++ compiler.
INSTALLED = {distribution.name for distribution in metadata.distributions()}

pytestmark = [
    *needs_mpi,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not {"pip", "setuptools"} <= INSTALLED,
        reason="the package is installed by pip and setuptools, and one of them is missing",
    ),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip has installed the package into."""
    folder = tmp_path_factory.mktemp("site")
    source = folder / "source"
    source.mkdir()
    for file in (ROOT / "examples" / "mailbox").iterdir():
        if file.is_file():
            (source / file.name).write_bytes(file.read_bytes())
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target"]
    command = [sys.executable, "-m", "pip", "install", *options, str(folder / "site"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_it_conforms_and_serves_a_step(installed: Path) -> None:
    path = os.pathsep.join([str(installed), environment()["PYTHONPATH"], str(ROOT)])
    job = ["-m", "tests.mpi.mailbox_job"]
    ended = run(2, job, variables={"PYTHONPATH": path}, seconds=90, warm=True)
    assert ended.code == 0, ended.output
    count = sum(case.ranks <= 2 for case in cases())
    for rank in range(2):
        assert f"rank {rank}: {count} cases conform" in ended.output
        assert f"rank {rank}: a step by ['None', 'mailbox', 'mailbox']" in ended.output
        assert f"rank {rank}: ValueError, a negative sum" in ended.output
        assert f"rank {rank}: called again" in ended.output
