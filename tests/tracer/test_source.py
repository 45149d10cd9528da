"""Which files are the user's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from cg.backends.program import executor
from cg.tracer.source import is_user_file


@pytest.mark.parametrize(
    "file",
    [
        executor.__file__,
        "build/mypyc/source/cg/backends/executor.py",  # as machine code has it in tracebacks
        torch.nn.modules.linear.__file__,
        asyncio.__file__,
        "<cg a0.f #0>",
    ],
)
def test_files_of_others(file: str) -> None:
    assert not is_user_file(file)


@pytest.mark.parametrize(
    "file", [__file__, "train.py", str(Path(torch.__file__).parents[1] / "other" / "model.py")]
)
def test_files_of_users(file: str) -> None:
    assert is_user_file(file)
