"""cg: a distributed PyTorch step, traced over actors, compiled to one static schedule per rank.

The public names, and nothing else. They are loaded on first use, so that `cg-opt` and `cg-sim`,
which need only the IR, start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .launch.world.bootstrap import prepare as _prepare

if TYPE_CHECKING:
    from .backends.driven.futures import Future
    from .backends.errors import (
        CapacityError,
        DeadlockError,
        ExecutionLost,
        PeerLost,
        PlanMismatch,
        RemoteError,
        StepTimeout,
        TransportError,
    )
    from .backends.fusion.fuse import FuseError
    from .backends.streams.library import CommunicationError
    from .ir.pipeline.costs import Costs, Link
    from .ir.text.diagnostics import IRError
    from .ir.text.plan_file import PlanFileError
    from .ir.types import Place
    from .launch.api.api import actor, allgather, barrier, fsdp, load_plan, measure, on, trace
    from .launch.api.carry import carry
    from .launch.api.compiled import Compiled
    from .launch.api.lowered import Lowered
    from .launch.api.optimistic import Optimistic
    from .launch.api.step_function import Step
    from .launch.checkpoints.checkpoint import (
        load_checkpoint,
        newest_checkpoint,
        save_checkpoint,
    )
    from .launch.checkpoints.weights import pretrained
    from .launch.environment.config import ConfigError
    from .launch.measure.profiling import profile
    from .launch.models.capacity import expert_capacity
    from .launch.models.cut_layers import cut_layers
    from .launch.models.empty_weights import empty_weights
    from .launch.models.expert_choices import expert_choices
    from .launch.quantized.quantized_layers import keep_quantized
    from .launch.quantized.readers import quantization
    from .launch.world.devices import DeviceError
    from .launch.world.waiting import WorldError
    from .launch.world.world import rank, restarts, world_size
    from .passes import schedules
    from .passes.schedules.orders.base import ScheduleError
    from .tracer.errors import TraceError
    from .tracer.function.groups import plans
    from .tracer.graph.layouts.cases import LayoutError
    from .tracer.graph.layouts.rules.einsum import layout_rule
    from .tracer.method.experts.expert_products import expert_linear
    from .tracer.method.saving_marks import keep, offload, recompute
    from .tracer.record.actors.actors import ActorError, ActorHandle, remat
    from .tracer.record.intrinsics.asked_layouts import layout
    from .tracer.record.intrinsics.clipping import clip_grad_norm
    from .tracer.record.intrinsics.collectives import (
        all_gather,
        all_reduce,
        all_to_all,
        broadcast,
        gather,
        reduce_scatter,
        scatter,
    )
    from .tracer.record.intrinsics.gradients import backward
    from .tracer.record.intrinsics.microbatches import mean, microbatches
    from .tracer.record.intrinsics.via import via
    from .tracer.record.session.inputs import InputError
    from .tracer.values.opaque import opaque
    from .tracer.values.values import OBJECT as object  # noqa: N811 - users write cg.object

# Where each public name lives: room.module, and the name there if it is another.
_HOMES = {
    # Writing a program
    "actor": "launch.api.api",
    "trace": "launch.api.api",
    "opaque": "tracer.values.opaque",
    "carry": "launch.api.carry",
    "remat": "tracer.record.actors.actors",
    "keep": "tracer.method.saving_marks",
    "offload": "tracer.method.saving_marks",
    "recompute": "tracer.method.saving_marks",
    "mesh": "tracer.values.mesh",
    "plan": "tracer.values.plan",
    "plans": "tracer.function.groups:plans",
    "cut": "tracer.values.plan",
    "whole": "tracer.values.plan",
    "fsdp": "launch.api.api",
    "float8": "tracer.values.plan",
    "layout": "tracer.record.intrinsics.asked_layouts",
    "layout_rule": "tracer.graph.layouts.rules.einsum",
    "expert_linear": "tracer.method.experts.expert_products",
    "on": "launch.api.api",
    "object": "tracer.values.values:OBJECT",
    "microbatches": "tracer.record.intrinsics.microbatches",
    "mean": "tracer.record.intrinsics.microbatches",
    "backward": "tracer.record.intrinsics.gradients",
    "clip_grad_norm": "tracer.record.intrinsics.clipping",
    "all_reduce": "tracer.record.intrinsics.collectives",
    "all_gather": "tracer.record.intrinsics.collectives",
    "reduce_scatter": "tracer.record.intrinsics.collectives",
    "all_to_all": "tracer.record.intrinsics.collectives",
    "broadcast": "tracer.record.intrinsics.collectives",
    "gather": "tracer.record.intrinsics.collectives",
    "scatter": "tracer.record.intrinsics.collectives",
    "via": "tracer.record.intrinsics.via",
    # Models of other libraries
    "cut_layers": "launch.models.cut_layers",
    "expert_capacity": "launch.models.capacity",
    "expert_choices": "launch.models.expert_choices",
    "empty_weights": "launch.models.empty_weights",
    "keep_quantized": "launch.quantized.quantized_layers",
    "quantization": "launch.quantized.readers",
    "pretrained": "launch.checkpoints.weights",
    "save_checkpoint": "launch.checkpoints.checkpoint",
    "load_checkpoint": "launch.checkpoints.checkpoint",
    "newest_checkpoint": "launch.checkpoints.checkpoint",
    # The world
    "rank": "launch.world.world",
    "world_size": "launch.world.world",
    "restarts": "launch.world.world",
    "barrier": "launch.api.api",
    "allgather": "launch.api.api",
    "save": "launch.checkpoints.actor_files",
    "load": "launch.checkpoints.actor_files",
    # What compiling gives
    "schedules": "passes:schedules",
    "Step": "launch.api.step_function",
    "load_plan": "launch.api.api",
    "Lowered": "launch.api.lowered",
    "Compiled": "launch.api.compiled",
    "Optimistic": "launch.api.optimistic",
    "profile": "launch.measure.profiling",
    "Future": "backends.driven.futures",
    "ActorHandle": "tracer.record.actors.actors",
    "Place": "ir.types",
    # What it costs
    "measure": "launch.api.api",
    "Costs": "ir.pipeline.costs",
    "Link": "ir.pipeline.costs",
    # What can go wrong
    "TraceError": "tracer.errors",
    "LayoutError": "tracer.graph.layouts.cases",
    "IRError": "ir.text.diagnostics",
    "PlanFileError": "ir.text.plan_file",
    "ScheduleError": "passes.schedules.orders.base",
    "InputError": "tracer.record.session.inputs",
    "RemoteError": "backends.errors",
    "CapacityError": "backends.errors",
    "ExecutionLost": "backends.errors",
    "StepTimeout": "backends.errors",
    "PlanMismatch": "backends.errors",
    "DeadlockError": "backends.errors",
    "TransportError": "backends.errors",
    "PeerLost": "backends.errors",
    "CommunicationError": "backends.streams.library",
    "FuseError": "backends.fusion.fuse",
    "ActorError": "tracer.record.actors.actors",
    "WorldError": "launch.world.waiting",
    "ConfigError": "launch.environment.config",
    "DeviceError": "launch.world.devices",
}

__all__ = [
    "actor",
    "trace",
    "opaque",
    "carry",
    "remat",
    "keep",
    "offload",
    "recompute",
    "mesh",
    "plan",
    "plans",
    "cut",
    "whole",
    "fsdp",
    "float8",
    "layout",
    "layout_rule",
    "expert_linear",
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
    "gather",
    "scatter",
    "via",
    "cut_layers",
    "expert_capacity",
    "expert_choices",
    "empty_weights",
    "keep_quantized",
    "quantization",
    "rank",
    "world_size",
    "restarts",
    "barrier",
    "allgather",
    "save",
    "load",
    "pretrained",
    "save_checkpoint",
    "load_checkpoint",
    "newest_checkpoint",
    "schedules",
    "Step",
    "load_plan",
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
    "LayoutError",
    "IRError",
    "PlanFileError",
    "ScheduleError",
    "InputError",
    "RemoteError",
    "CapacityError",
    "ExecutionLost",
    "StepTimeout",
    "PlanMismatch",
    "DeadlockError",
    "TransportError",
    "PeerLost",
    "CommunicationError",
    "FuseError",
    "ActorError",
    "WorldError",
    "ConfigError",
    "DeviceError",
]


# Under an MPI launcher: hold thread pools to this rank's cores before torch is loaded, bind it, and
# see to it that an exception ends the whole job. Does nothing otherwise.
_prepare()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version(__name__)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'cg' has no attribute '{name}'")
    module, _, other = home.partition(":")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), other or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
