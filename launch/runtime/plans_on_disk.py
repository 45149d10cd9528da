"""Write a compiled step's plan to a file, and read a rank's part of it for a step traced anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...backends.agreement.gather import gather
from ...backends.base import World
from ...ir.ops.module import Module
from ...ir.text.diagnostics import IRError
from ...ir.text.differences import grouped, named
from ...ir.text.plan_file import PlanFile, PlanFileError
from ...ir.text.printer import format_module
from ...ir.text.stored_plan import StoredPlan
from ...ir.verify.verifier import verify_program
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
        PlanFileError: the programs are of a file themselves, which was changed since it was loaded.
    """
    path = Path(file)  # on all ranks, so that a wrong type is an error on all
    plan = PlanFile(module, format_module(traced), facts, _devices(world))
    failure: OSError | PlanFileError | None = None
    if world.rank == 0:
        partial = path.with_name(f".{path.name}.partial")
        try:
            with partial.open("wb") as written:
                written.writelines(plan.encoded())
            partial.replace(path)
        except OSError as error:
            failure = OSError(f"rank 0 could not write {file}: {error}")
        except PlanFileError as error:
            failure = error
        if failure is not None:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    failure = gather(world, "save a plan", failure)[0]
    if failure is not None:
        raise failure


@dataclass(frozen=True)
class _PartReport:
    """What a rank has come to with its part of a file: the digest of the plan, or an error."""

    digest: str = ""
    error: OSError | PlanFileError | None = None


def read_plan(file: Path | str, world: World, signatures: int, is_driven: bool) -> StoredPlan:
    """Read the part of a plan that this process runs; collective.

    Each rank reads its own program, and checks that it is as it was proven, and well formed. Ranks
    compare the digest of the whole, so they have checked every program of one and the same file.

    Args:
        file: its name, by which every rank sees it.
        world: all ranks.
        signatures: how many the step was lowered for.
        is_driven: whether one rank starts executions; then each rank reads all programs, since who
            takes part, and by which channels, depends on all.

    Raises:
        OSError: a rank could not read it.
        PlanFileError: it is no plan; or was changed since it was proven; or is for other ranks, for
            other devices, or for another number of signatures; or ranks have read different ones.
    """
    path, plan = Path(file), None
    try:
        plan = StoredPlan.open(path)
        _check_fits(plan, file, world, signatures)
        if is_driven:
            plan.module.programs = list(plan.module.programs)
        for rank in filter(world.plays, range(world.size)):
            verify_program(plan.module, plan.module.program_of(rank))
        report = _PartReport(plan.digest)
    except OSError as error:
        advice = "every rank reads its own part, so put it where all of them see it"
        words = f"rank {world.rank} could not read {file}: {error}; {advice}"
        report = _PartReport(error=OSError(words))
    except PlanFileError as error:
        report = _PartReport(error=error)
    except IRError as error:  # somebody has made the digests as well
        wrong = f"{file} has programs with an error; save it again:\n{error}"
        report = _PartReport(error=PlanFileError(wrong))
    reports = gather(world, "load a plan", report)
    for failure in (report.error for report in reports):
        if failure is not None:
            raise failure
    groups = grouped([report.digest for report in reports])
    if len(groups) > 1:
        shown = ", and ".join(
            f"{digest[:12]} on {named(ranks)}" for digest, ranks in groups.items()
        )
        raise PlanFileError(
            f"{file} is not the same plan on all ranks: it has the digest {shown}. Put one file "
            "where all ranks see it"
        )
    assert plan is not None, "this rank has no error"
    return plan


def _check_fits(plan: StoredPlan, file: Path | str, world: World, signatures: int) -> None:
    """Return if a plan is for ranks and devices like those of a world.

    Raises:
        PlanFileError: it is not.
    """
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


def check_same_step(plan: StoredPlan, traced: Module, file: Path | str) -> None:
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
    if fabrics is None:
        return {}
    facts = fabrics.ranks, fabrics.reduces, fabrics.rendezvous
    return dict(zip(("ranks", "reduces", "rendezvous"), facts, strict=True))


def _shown(devices: Mapping[str, str]) -> str:
    if not devices:
        return "ranks without devices"
    return f"devices with the fabrics {json.dumps(devices, sort_keys=True)}"
