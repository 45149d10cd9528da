"""The cases of the tests: what is run of the documented commands, on a number of GPUs."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import cg

from . import programs
from .documented import ROOT, Command, Shown, parse, shown
from .fitting import fit, means
from .left_out import reason

SCHEDULE = "python -m cg.launch -n 2 examples/train_gpt.py --schedule {}"
BESIDES = (
    *(SCHEDULE.format(name) for name in cg.schedules.names()),
    "python -m cg.launch -n 2 examples/train_gpt.py --backend cpu",
    "python -m cg.launch -n 2 examples/train_gpt.py --dp 2 --fsdp task",
)
"""Commands that no page shows, since pages name a value of an option and not all of them."""


@dataclass(frozen=True)
class Case:
    """A command that is run.

    Attributes:
        command: as it is run, but for the options that the tests append.
        shown: as it is documented.
        own: the page that writes its program down; nothing if that is a file of the checkout.
    """

    command: Command
    shown: Shown
    own: str

    @property
    def id(self) -> str:
        """A readable name, for `-k`: the program, what starts it, its options."""
        pages = self.own.replace("docs/", "").replace("/", ".").removesuffix(".md")
        variables = [f"{name}{value}" for name, value in self.command.variables]
        launcher = self.command.launcher.replace("own", "")
        starts = [launcher, f"n{self.command.ranks}"] if self.command.launcher else ["alone"]
        options: list[str] = []
        for word in self.command.arguments:
            if word.startswith("--"):
                options.append(word[2:])
            elif options and options[-1] in ("schedule", "fuse"):
                options[-1] = word
            elif options and options[-1] not in ("model", "data", "steps"):
                options[-1] += word
        options = [each for each in options if each not in ("model", "steps")]
        return "-".join(filter(None, [self.command.name, pages, *variables, *starts, *options]))


@dataclass(frozen=True)
class Left:
    """A command that is not run, with the reason."""

    shown: Shown
    reason: str


def runnable() -> list[tuple[Shown, Command]]:
    """The documented commands that are run, and those besides.

    Raises:
        ValueError: a command is neither left out nor understood.
    """
    lines = [each for each in shown() if reason(each) is None]
    lines += [Shown(text, "tests/gpu/cases.py", 0) for text in BESIDES]
    commands = []
    for line in lines:
        command = parse(line.text)
        if command is None:
            raise ValueError(
                f"{line.place}: '{line.text}' starts no Python program that tests/gpu can run: "
                "teach `parse` in tests/gpu/documented.py, or leave it out by a rule with a reason "
                "in tests/gpu/left_out.py"
            )
        commands.append((line, command))
    return commands


def left_out() -> list[Left]:
    """The documented commands that are not run."""
    return [Left(each, why) for each in shown() if (why := reason(each)) is not None]


def is_module(command: Command) -> bool:
    return command.program[0] == "-m"


def cases(gpus: int) -> list[Case]:
    """All cases for so many GPUs: each command brought down to them, and each one once."""
    chosen: dict[str, Case] = {}
    for line, command in runnable():
        own = ""
        if not is_module(command) and not (ROOT / command.program[-1]).exists():
            own = programs.above(line.file, line.line).page
        for fitted in fitting(line, command, gpus):
            key = f"{means(fitted)} {own}"
            chosen.setdefault(key, Case(fitted, line, own))
    return list(chosen.values())


def fitting(line: Shown, command: Command, gpus: int) -> list[Command]:
    """The command on so many GPUs: none where too little is left of it."""
    fitted = fit(command, gpus)
    if is_module(command) or (ROOT / command.program[-1]).exists():
        return fitted
    program = programs.above(line.file, line.line)
    return [each for each in fitted if program.scales or each.ranks >= command.ranks]


def without_room(gpus: int) -> list[Shown]:
    """The commands of which nothing is left on so many GPUs."""
    return [line for line, command in runnable() if not fitting(line, command, gpus)]


def table(gpus: int) -> list[str]:
    """A line for each command: how it is run, or why it is not."""
    rows = [f"run       {case.shown.place:28} {case.command}" for case in cases(gpus)]
    rows += [f"too large {line.place:28} {line.text}" for line in without_room(gpus)]
    rows += [f"left out  {e.shown.place:28} {e.shown.text}: {e.reason}" for e in left_out()]
    return rows


if __name__ == "__main__":
    print("\n".join(table(int(sys.argv[1]))))
