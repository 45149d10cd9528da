"""Run a documented command on a device, cut short, and read the losses that it leaves.

The device is one argument: `cuda`, `cpu`, or another value of CG_DEVICE. So what runs on GPUs is
tried out on hosts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ..mpi import jobs
from . import programs
from .cases import Case, is_module
from .documented import ROOT, Command

SECONDS = 270.0
"""The longest that a command may take; the tests' own limit is behind it."""

VARIABLES = {"CG_TIMEOUT": "120"}
"""A rank that waits so long for another one says where each of them is."""

STEPS = 8
"""Of a training: device graphs are captured in the third execution, and replayed from then on."""

SHORT = {
    "train_gpt": f"--steps {STEPS} --batch 16 --microbatches 8 --width 48 --validate-every 4 "
    "--save-every 4 --sample 12 --out run",
    "finetune": f"--steps {STEPS} --batch 8 --microbatches 4 --length 32 --windows 60 --rate 1e-3 "
    "--evaluate-every 4 --save-every 4 --sample 4 --prompt hello --out run",
    "clip": "--steps 12 --batch 12 --width 32 --vision 2 --text 1",
}
"""What is appended to a program's arguments: argparse takes the last of two equal options."""

NEEDS = {
    "train_gpt": ("matplotlib", "tqdm"),
    "finetune": ("matplotlib", "tqdm", "transformers"),
    "serve": ("aiohttp", "prometheus_client", "transformers"),
    "--lora": ("peft",),
}
"""Packages that a program or an option imports."""

TOLERANCE, TOLERANCE_BF16 = 1e-3, 2e-2
"""How far losses may be from those of the host, as a share: sums are rounded in another order."""

WITHOUT_EFFECT = ("--schedule", "--backend", "--fuse", "--pp", "--dp", "--ep", "--cp", "--tp")
"""Options of trainings that do not change what is computed."""

FLAGS_WITHOUT_EFFECT = ("--sequence-parallel", "--fsdp", "auto", "step", "task")
"""Further words of such options."""


@dataclass(frozen=True)
class Played:
    """A command that has run.

    Attributes:
        losses: in the order in which the program gives them; of programs of pages, all numbers
            with a point that they print, sorted.
        output: of all ranks.
    """

    losses: list[float]
    output: str


def skip_if_lacking(case: Case) -> None:
    """Skip a command that needs a package or a launcher which is not there."""
    words = (case.command.name, *case.command.arguments)
    wanted = [package for word in words for package in NEEDS.get(word, ())]
    absent = [package for package in wanted if importlib.util.find_spec(package) is None]
    if absent:
        pytest.skip(f"'{case.command}' needs {', '.join(absent)}, which is not installed")
    if case.command.launcher == "mpirun" and mpirun() is None:
        pytest.skip("there is no mpirun beside this Python or on PATH")
    if case.command.ranks > 1 and jobs.launcher() is None:
        pytest.skip("there is no mpiexec beside this Python or on PATH: pip install mpich")
    if "--fuse" in words and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler for TorchInductor")


def mpirun() -> str | None:
    """The mpirun beside this Python, or else on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def prepare(case: Case, folder: Path, model: Path) -> Command:
    """The command with files of `folder` for those that it names, cut short."""
    command = case.command
    if not is_module(command) and not (ROOT / command.program[-1]).exists():
        program = programs.above(case.shown.file, case.shown.line)
        programs.write(program, folder / command.program[-1])
    elif not is_module(command):
        command = replace(command, program=(str(ROOT / command.program[-1]),))
    notes = folder / "notes.jsonl"
    notes.write_text("".join(f'{{"text": "note {n}: {"abc " * 40}"}}\n' for n in range(40)))
    files = {"DIR": str(model), "notes.jsonl": str(notes)}
    words = [files.get(word, word) for word in command.arguments]
    return replace(command, arguments=(*words, *SHORT.get(command.name, "").split()))


def play(command: Command, folder: Path, device: str) -> Played:
    """Run a prepared command in a folder to its end.

    One that goes on from a checkpoint runs twice: first as if there were none to go on from.

    Raises:
        AssertionError: it fails, or takes too long.
    """
    if "--resume" in command.arguments:
        rest = tuple(word for word in command.arguments if word != "--resume")
        play(replace(command, arguments=rest), folder, device)
        command = replace(command, arguments=(*command.arguments, "--steps", str(2 * STEPS)))
    output = _run(command, folder, device)
    return Played(read(command, folder, output), output)


def _run(command: Command, folder: Path, device: str) -> str:
    variables = {**VARIABLES, "CG_DEVICE": device, **dict(command.variables)}
    if variables["CG_DEVICE"] == "cuda":
        variables["CG_DEVICE"] = device
    words = line(command)
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=jobs.environment(variables),
        cwd=ROOT if is_module(command) else folder,
        start_new_session=True,
    )
    ended = jobs.finish(process, SECONDS)
    assert ended.code == 0, f"{' '.join(words)}\n{ended.output}"
    return ended.output


def line(command: Command) -> list[str]:
    """The words of a command, with this Python and the mpirun beside it."""
    number = ["-n", str(command.ranks)]
    words = [sys.executable, *command.program, *command.arguments]
    if command.launcher == "mpirun":
        return [str(mpirun()), *number, *words]
    if command.launcher == "cg.launch":
        return [sys.executable, "-m", "cg.launch", *number, *words[1:]]
    return [*words, *(number if command.launcher == "own" else ())]


def reference(case: Case) -> Case:
    """What a command's losses are compared with: one process that plays its ranks, on the host.

    Of trainings it is one rank without a schedule or groups, so that many commands share it.
    """
    command = replace(case.command, launcher="", ranks=1)
    if command.name in ("train_gpt", "finetune"):
        for option in WITHOUT_EFFECT:
            command = command.without(option)
        words = tuple(w for w in command.arguments if w not in FLAGS_WITHOUT_EFFECT)
        return replace(case, command=replace(command, variables=(), arguments=words))
    ranks = dict(case.command.variables).get("CG_RANKS", str(case.command.ranks))
    return replace(case, command=replace(command, variables=(("CG_RANKS", ranks),)))


def tolerance(command: Command) -> float:
    return TOLERANCE_BF16 if "--bf16" in command.arguments else TOLERANCE


def read(command: Command, folder: Path, output: str) -> list[float]:
    """The losses that a program has written or printed."""
    if command.name in ("train_gpt", "finetune"):
        figures = json.loads((folder / "run" / "figures.json").read_text())
        assert "\n---" in output, f"there is no sample:\n{output}"
        steps = command.arguments[len(command.arguments) - command.arguments[::-1].index("--steps")]
        assert len(figures["losses"]) == int(steps), output
        return [*figures["losses"], *(loss for _, loss in figures["validation"])]
    if command.name == "clip":
        if "--check" in command.arguments:
            (worst,) = re.findall(r"gradients differ .* by (\S+)$", output, re.MULTILINE)
            assert float(worst) < TOLERANCE, output
            return []
        rows = re.findall(r"^(?:\d\+\d|all) +(\S+) +(\S+) +\d+  ", output, re.MULTILINE)
        return [float(loss) for row in rows for loss in row]
    if command.name == "zero_bubble":
        (row,) = re.findall(r"^loss (\S+), after \d+ steps (\S+)$", output, re.MULTILINE)
        return [float(loss) for loss in row]
    return sorted({float(number) for number in re.findall(r"-?\d+\.\d+", output)})
