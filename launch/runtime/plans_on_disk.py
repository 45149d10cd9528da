"""Write a compiled step's plan to a file, and read it for a step that was traced anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...backends.agreement.gather import gather
from ...backends.base import World
from ...ir.ops.module import Module
from ...ir.text.files import NotTextError, read_text
from ...ir.text.plan_file import PlanFile, PlanFileError
from ...ir.text.printer import format_module
from ..world.devices import fabrics_of


def write_plan(
    file: Path | str,
    module: Module,
    traced: Module,
    facts: Mapping[str, Any],
    world: World,
) -> None:
    """Write a plan; the file appears when it is complete. Rank 0 writes. Collective.

    Args:
        file: its name.
        module: the scheduled programs.
        traced: the module that they carry out.
        facts: the options that a trace for them needs.
        world: all ranks.

    Raises:
        OSError: rank 0 could not write.
    """
    path = Path(file)  # on all ranks, so that a wrong type is an error on all
    plan = PlanFile(module, format_module(traced), facts, _devices(world))
    failure = ""
    if world.rank == 0:
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(str(plan), encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            failure = str(error)
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    failure = gather(world, "save a plan", failure)[0]
    if failure:
        raise OSError(f"rank 0 could not write {file}: {failure}")


def read_plan(file: Path | str, world: World, signatures: int) -> PlanFile:
    """Read a plan, which rank 0 sees. Collective.

    Args:
        file: its name.
        world: all ranks.
        signatures: how many the step was lowered for.

    Raises:
        OSError: rank 0 could not read it.
        PlanFileError: it is no plan; or was changed since it was proven; or is for other ranks, for
            other devices, or for another number of signatures.
        IRError: its programs have an error.
    """
    path, text, failure = Path(file), "", ""
    if world.rank == 0:
        try:
            text = read_text(path)
        except (OSError, NotTextError) as error:
            failure = str(error)
    text, failure = gather(world, "load a plan", (text, failure))[0]
    if failure:
        raise OSError(f"rank 0 could not read {file}: {failure}")
    plan = PlanFile.of(text, str(file))
    if not plan.is_proven:
        raise PlanFileError(
            f"{file} was changed since its programs were proven. Prove it again: "
            f"cg-opt {file} > new.plan"
        )
    if signatures > 1:
        raise PlanFileError(
            f"{file} is for one signature, and the step was lowered for {signatures}: load what "
            "Lowered.apart() returns one by one"
        )
    if plan.module.world != world.size:
        raise PlanFileError(
            f"{file} is a plan for {plan.module.world} ranks, and there are {world.size}"
        )
    devices = _devices(world)
    if plan.devices != devices:
        raise PlanFileError(
            f"{file} is for {_shown(plan.devices)}, and here are {_shown(devices)}: save a plan on "
            "ranks like these"
        )
    return plan


def check_same_step(plan: PlanFile, traced: Module, file: Path | str) -> None:
    """Return if a plan is one of a step.

    Args:
        plan: that was read.
        traced: the step, as this script has it.
        file: of the plan.

    Raises:
        PlanFileError: the script does something else; the message has the first line that differs.
    """
    here = format_module(traced)
    lines = zip_longest(plan.traced.splitlines(), here.splitlines(), fillvalue="(nothing)")
    for number, (saved, own) in enumerate(lines, 1):
        if saved != own:
            raise PlanFileError(
                f"{file} is a plan of another step than {traced.name}, as this script has it. The "
                f"first line of the trace that differs is line {number}:\n"
                f"  the plan:    {saved.strip()}\n"
                f"  this script: {own.strip()}\n"
                "Compile the step and save its plan again"
            )


def _devices(world: World) -> dict[str, str]:
    """The facts of ranks' devices, by which passes choose transports; empty without devices."""
    fabrics = fabrics_of(world)
    return {} if fabrics is None else asdict(fabrics)


def _shown(devices: Mapping[str, str]) -> str:
    if not devices:
        return "ranks without devices"
    return f"devices with the fabrics {json.dumps(devices, sort_keys=True)}"
