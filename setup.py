"""Builds wheels. `setup.cfg` says what is in them; this, which of it can be machine code.

    pip install . --config-settings=--global-option=--compiled

makes machine code of the modules below, by mypyc. That needs a C compiler and Python's headers.
The source is the same, and so is what it does; see docs/design/0033-compiled-modules.md.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

OPTION = "--compiled"

PACKAGES = ("ir", "tracer", "passes", "backends", "launch")

COMPILED = (
    "backends/program/type_checks.py",
    "backends/driven/executions.py",
    "backends/program/engine.py",
    "backends/program/executor.py",
    "backends/driven/graphs.py",
    "backends/driven/commands.py",
    "backends/driven/execution_launcher.py",
    "backends/driven/instance.py",
    "backends/program/instructions.py",
    "backends/driven/outcomes.py",
    "backends/driven/rank_scheduler.py",
    "backends/program/instruction_info.py",
    "backends/timing/tallies.py",
    "backends/program/ticket_locks.py",
    "backends/cpu/control/control.py",
    "backends/cpu/waiting/contention.py",
    "backends/cpu/memory/layout.py",
    "backends/cpu/queues/local_receiver.py",
    "backends/cpu/queues/local_sender.py",
    "backends/cpu/queues/messages.py",
    "backends/cpu/queues/object_ports.py",
    "backends/cpu/queues/ports.py",
    "backends/cpu/control/command_ring.py",
    "backends/cpu/control/rank_status.py",
    "backends/cpu/control/serving.py",
    "backends/devices/accelerator.py",
    "backends/devices/programs/capture.py",
    "backends/devices/programs/executable.py",
    "backends/devices/programs/tensor_memory.py",
    "backends/devices/stream_order.py",
    "backends/devices/programs/instance.py",
    "backends/devices/output_buffers.py",
    "launch/api/selection.py",
)
"""Modules that every execution goes through, and that no user extends or replaces."""

NATIVE = "cg.backends.cpu.memory._cells"
"""Modules that are written in C."""

FLAGS = ["-std=c11", "-O2", "-Wall"]


class BuildPy(build_py):
    """Leaves this file out of the package, whose root is the checkout's."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package, but for this file."""
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if module[:2] != ("cg", "setup")]


def extensions() -> list[Extension]:
    """The compiled modules, made of a copy of the sources under the package's name."""
    from mypyc.build import mypycify  # only who compiles has it

    top = Path("build/mypyc")
    shutil.rmtree(top, ignore_errors=True)
    source = top / "source" / "cg"
    for package in PACKAGES:
        shutil.copytree(package, source / package)
    shutil.copy("__init__.py", source)
    config = top / "mypy.ini"
    config.write_text(f"[mypy]\nmypy_path = {source.parent}\n")
    options = [
        f"--config-file={config}",
        "--explicit-package-bases",
        "--follow-imports=silent",
        # What torch and others say of their types changes nothing in the code that is made.
        "--no-site-packages",
        "--ignore-missing-imports",
    ]
    modules = [str(source / module) for module in COMPILED]
    compiled = mypycify(
        [*options, *modules],
        opt_level="2",
        group_name="cg",
        target_dir=str(top),
    )
    return [
        *compiled,
        Extension(NATIVE, ["backends/cpu/memory/_cells.c"], extra_compile_args=FLAGS),
    ]


COMMANDS = {"build_py": BuildPy}


def main() -> None:
    """Build what the command line asks for."""
    if OPTION not in sys.argv:
        setup(cmdclass=COMMANDS)
        return
    sys.argv.remove(OPTION)
    # A front end asks first what building needs, and installs it.
    if "egg_info" in sys.argv:
        setup(cmdclass=COMMANDS, setup_requires=["mypy[mypyc]"])
    else:
        setup(cmdclass=COMMANDS, ext_modules=extensions())


if __name__ == "__main__":
    main()
