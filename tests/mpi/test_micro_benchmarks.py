"""The micro-benchmarks work: each case runs once, and nothing is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_case_runs() -> None:
    command = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-disable", "-q"]
    ended = subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "skipped" not in ended.stdout, ended.stdout
