"""cg: a distributed PyTorch step, traced over actors, compiled to one static schedule per rank.

The public names, and nothing else. They are loaded on first use, so that `cg-opt` and `cg-sim`,
which need only the IR, start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .launch.bootstrap import prepare as _prepare

if TYPE_CHECKING:
    from .backends.errors import (
        CapacityError,
        DeadlockError,
        ExecutionLost,
        PlanMismatch,
        RemoteError,
        StepTimeout,
        TransportError,
    )
    from .backends.fuse import FuseError
    from .backends.futures import Future
    from .ir.costs import Costs, Link
    from .ir.diagnostics import IRError
    from .ir.types import Place
    from .launch.api import Lowered, Step, actor, allgather, barrier, measure, on, trace
    from .launch.carry import carry
    from .launch.compiled import Compiled
    from .launch.config import ConfigError
    from .launch.optimistic import Optimistic
    from .launch.profiling import profile
    from .launch.waiting import WorldError
    from .launch.world import rank, world_size
    from .passes import schedules
    from .tracer.actors import ActorError, ActorHandle, remat
    from .tracer.clipping import clip_grad_norm
    from .tracer.collectives import (
        all_gather,
        all_reduce,
        all_to_all,
        broadcast,
        reduce_scatter,
    )
    from .tracer.errors import TraceError
    from .tracer.gradients import backward
    from .tracer.microbatches import mean, microbatches
    from .tracer.opaque import opaque
    from .tracer.trace import InputError
    from .tracer.values import OBJECT as object  # noqa: N811 - users write cg.object
    from .tracer.via import via

# Where each public name lives: room.module, and the name there if it is another.
_HOMES = {
    # Writing a program
    "actor": "launch.api",
    "trace": "launch.api",
    "opaque": "tracer.opaque",
    "carry": "launch.carry",
    "remat": "tracer.actors",
    "on": "launch.api",
    "object": "tracer.values:OBJECT",
    "microbatches": "tracer.microbatches",
    "mean": "tracer.microbatches",
    "backward": "tracer.gradients",
    "clip_grad_norm": "tracer.clipping",
    "all_reduce": "tracer.collectives",
    "all_gather": "tracer.collectives",
    "reduce_scatter": "tracer.collectives",
    "all_to_all": "tracer.collectives",
    "broadcast": "tracer.collectives",
    "via": "tracer.via",
    # The world
    "rank": "launch.world",
    "world_size": "launch.world",
    "barrier": "launch.api",
    "allgather": "launch.api",
    # What compiling gives
    "schedules": "passes:schedules",
    "Step": "launch.api",
    "Lowered": "launch.api",
    "Compiled": "launch.compiled",
    "Optimistic": "launch.optimistic",
    "profile": "launch.profiling",
    "Future": "backends.futures",
    "ActorHandle": "tracer.actors",
    "Place": "ir.types",
    # What it costs
    "measure": "launch.api",
    "Costs": "ir.costs",
    "Link": "ir.costs",
    # What can go wrong
    "TraceError": "tracer.errors",
    "IRError": "ir.diagnostics",
    "InputError": "tracer.trace",
    "RemoteError": "backends.errors",
    "CapacityError": "backends.errors",
    "ExecutionLost": "backends.errors",
    "StepTimeout": "backends.errors",
    "PlanMismatch": "backends.errors",
    "DeadlockError": "backends.errors",
    "TransportError": "backends.errors",
    "FuseError": "backends.fuse",
    "ActorError": "tracer.actors",
    "WorldError": "launch.waiting",
    "ConfigError": "launch.config",
}

__all__ = [
    "actor",
    "trace",
    "opaque",
    "carry",
    "remat",
    "on",
    "object",
    "microbatches",
    "mean",
    "backward",
    "clip_grad_norm",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "via",
    "rank",
    "world_size",
    "barrier",
    "allgather",
    "schedules",
    "Step",
    "Lowered",
    "Compiled",
    "Optimistic",
    "profile",
    "Future",
    "ActorHandle",
    "Place",
    "measure",
    "Costs",
    "Link",
    "TraceError",
    "IRError",
    "InputError",
    "RemoteError",
    "CapacityError",
    "ExecutionLost",
    "StepTimeout",
    "PlanMismatch",
    "DeadlockError",
    "TransportError",
    "FuseError",
    "ActorError",
    "WorldError",
    "ConfigError",
]


# Under an MPI launcher: hold thread pools to this rank's cores before torch is loaded, bind it, and
# see to it that an exception ends the whole job. Does nothing otherwise.
_prepare()


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'cg' has no attribute '{name}'")
    module, _, other = home.partition(":")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), other or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
