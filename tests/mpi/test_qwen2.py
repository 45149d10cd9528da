"""Qwen2 on 8 ranks, as pipeline, data and tensor parallel, and against DTensor and FSDP2."""

from __future__ import annotations

import re

import pytest

from .jobs import ROOT, needs_mpi, run

pytest.importorskip("transformers")
pytestmark = [*needs_mpi, pytest.mark.slow, pytest.mark.timeout(600)]


def test_losses_and_traffic() -> None:
    """The script asserts both; see there."""
    script = str(ROOT / "benchmarks" / "qwen2_groups.py")
    ended = run(8, [script, "--steps", "20"], seconds=500)
    assert ended.code == 0, ended.output
    assert len(re.findall(r": 20 losses differ by \S+ at most", ended.output)) == 5, ended.output
    assert len(re.findall(r"has no more collectives or bytes than", ended.output)) == 2
