"""Compiles the mock of HCCL with the system's C compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

MOCK = Path(__file__).with_name("mock")
STANDIN = Path(__file__).with_name("standin")

COMPILER = shutil.which("cc") or shutil.which("gcc")

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="the mock of HCCL is C, and there is no C compiler: install gcc"
)


def build(folder: Path, *options: str) -> Path:
    """The mock as `libhccl.so` in `folder`; the compiler holds it against the prototypes."""
    assert COMPILER is not None
    target = folder / "libhccl.so"
    sources = [str(file) for file in sorted(MOCK.glob("*.c"))]
    flags = ["-shared", "-fPIC", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command = [COMPILER, *flags, *options, "-o", str(target), *sources]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return target
