"""Shows on a machine with NPUs what no other machine can: `python -m cg.backends.hccl.selftest`.

First it looks at what this process finds: the library, its functions, torch_npu. Then it starts
ranks, each on an NPU of its own, which compare steps by HCCL with plain PyTorch. The last thing
that it prints is a table; the exit code is 0 if every line of it passed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch

from ..devices import npu
from .abi import LAYOUTS, check_layouts
from .symbols import load

RANKS = "cg.launch.tools.hccl_selftest"
"""The module that runs on the ranks; it prints lines that begin with `ROW`."""

ROW = "selftest: "

Check = Callable[[], str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m cg.backends.hccl.selftest", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("-n", "--ranks", type=int, default=2, help="NPUs to use, 2 by default")
    parser.add_argument("--library", help="the libhccl.so, if not CANN's own")
    options = parser.parse_args(arguments)
    local: dict[str, Check] = {
        "structures lie as in C": _layouts,
        "torch_npu": _torch_npu,
        "library and functions": lambda: _library(options.library),
        f"at least {options.ranks} NPUs": lambda: _enough(options.ranks),
    }
    rows = [_row(name, check) for name, check in local.items()]
    if all(row.startswith("pass") for row in rows):
        rows += _on_ranks(options.ranks, options.library)
    else:
        rows.append("skip | steps on the NPUs | something above is missing")
    print("\nresult | check | details\n" + "\n".join(rows))
    return 0 if all(row.startswith("pass") for row in rows) else 1


def _row(name: str, check: Check) -> str:
    try:
        return f"pass | {name} | {check()}"
    except Exception as error:  # whatever it is, it is what the table is to show
        return f"FAIL | {name} | {type(error).__name__}: {' '.join(str(error).split())}"


def _layouts() -> str:
    check_layouts(LAYOUTS)
    return ", ".join(
        f"{structure.__name__} {ctypes.sizeof(structure)} bytes" for structure in LAYOUTS
    )


def _torch_npu() -> str:
    npu.make(0)
    module = importlib.import_module("torch_npu")
    return f"version {getattr(module, '__version__', 'unknown')}, torch {torch.__version__}"


def _library(path: str | None) -> str:
    symbols = load(path)
    missing = symbols.missing()
    return f"{symbols.path}, " + (f"without {', '.join(missing)}" if missing else "all functions")


def _enough(ranks: int) -> str:
    try:
        count = int(torch.get_device_module("npu").device_count())
    except RuntimeError as error:  # torch does not know the kind
        raise RuntimeError("torch_npu, which knows how many there are, is not there") from error
    if count < ranks:
        raise RuntimeError(f"there are {count}; ask for fewer by -n")
    return f"{count} found"


def _on_ranks(ranks: int, library: str | None) -> list[str]:
    """The rows that ranks print; their other output is shown as it comes."""
    environment = ["-x", f"HCCL_SO_PATH={library}"] if library else []
    command = [sys.executable, "-m", "cg.launch", "-n", str(ranks), "-x", "CG_DEVICE=npu"]
    with subprocess.Popen(
        [*command, *environment, "-m", RANKS], stdout=subprocess.PIPE, text=True
    ) as process:
        rows = []
        for line in process.stdout or ():
            if line.startswith(ROW):
                rows.append(line.removeprefix(ROW).rstrip())
            else:
                print(line, end="", flush=True)
    outcome = "pass" if process.returncode == 0 else "FAIL"
    return [*rows, f"{outcome} | all ranks ended | exit code {process.returncode}"]


if __name__ == "__main__":
    sys.exit(main())
