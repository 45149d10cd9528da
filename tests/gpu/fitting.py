"""A command that asks for more ranks than there are GPUs, brought down to so many.

The axes of a group (`--pp`, `--dp`, `--ep`, `--cp`, `--tp`) are brought down with it. Where they
ask for more than there is, one command becomes several, each with as many of its axes as fit.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from .documented import Command

AXES = ("--pp", "--dp", "--ep", "--cp", "--tp")

WHOLE = ("finetune",)
"""Programs whose axes make up all ranks; those of the others make up a group of a pipeline."""


def fit(command: Command, gpus: int) -> list[Command]:
    """The command on at most so many ranks; several if its axes do not fit together.

    None are left if an option needs more ranks than there are. A command whose ranks are played by
    one process, on the host, stays as it is.
    """
    if command.ranks <= gpus or dict(command.variables).get("CG_RANKS"):
        return [command]
    asked = {axis: int(command.option(axis) or 1) for axis in AXES}
    given = [axis for axis in AXES if command.option(axis) is not None]
    if not given:
        return [replace(command, ranks=gpus)]
    sizes = [[n for n in range(1, asked[axis] + 1) if asked[axis] % n == 0] for axis in given]
    tried = [dict(zip(given, each, strict=True)) for each in itertools.product(*sizes)]
    largest = max(n for each in tried if (n := math.prod(each.values())) <= gpus)
    chosen = [each for each in tried if math.prod(each.values()) == largest]
    ranks = largest if command.name in WHOLE else gpus // largest * largest
    fitted = [_with(replace(command, ranks=ranks), each) for each in chosen]
    return [each for each in fitted if not _is_refused(each)]


def _with(command: Command, sizes: dict[str, int]) -> Command:
    """The command with these sizes in place of its own; a group of one rank is not named."""
    words = list(command.arguments)
    for axis, size in sizes.items():
        words[words.index(axis) + 1] = str(size)
    command = replace(command, arguments=tuple(words))
    for axis in ("--dp", "--ep", "--cp", "--tp"):
        command = command.without(axis) if sizes.get(axis) == 1 else command
    return command


def _is_refused(command: Command) -> bool:
    """Whether the program does not take what is left of its axes."""
    copies = [command.option(axis) or "1" for axis in ("--dp", "--cp")]
    has_tokens = "--sequence-parallel" in command.arguments
    if has_tokens and (command.option("--tp") or "1") == "1":
        return True
    return "--fsdp" in command.arguments and copies == ["1", "1"]


def means(command: Command) -> str:
    """What a command does, in a text that is equal for commands that do the same.

    Who starts the ranks counts, but for a single one, which needs no launcher.
    """
    if command.option("--pp") == str(command.ranks):
        command = command.without("--pp")
    if command.option("--schedule") == "1f1b":
        command = command.without("--schedule")
    if command.ranks == 1 and command.launcher != "own":
        command = replace(command, launcher="cg.launch")
    return str(command)
