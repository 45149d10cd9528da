"""The model of `llama_model` in torch.distributed.pipelining, on the ranks of a job of cg."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from llama_model import Cut, Part, Placing, Shape, cross_entropy
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

import cg

SCHEDULES = {
    "line": ("ScheduleGPipe", "Schedule1F1B"),
    "vee": ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"),
    "loop": (
        "ScheduleInterleaved1F1B",
        "ScheduleInterleavedZeroBubble",
        "ScheduleLoopedBFS",
    ),
}
"""By how their stages lie on ranks."""


def join(device: torch.device, nodes: int, patience: float) -> None:
    """Start torch.distributed on the ranks of cg's world; collective.

    Args:
        device: of this rank; NCCL for GPUs, Gloo for the host.
        nodes: how many machines there are.
        patience: seconds after which what hangs is an error.
    """
    rank, size = cg.rank(), cg.world_size()
    limit = timedelta(seconds=patience)
    host = "127.0.0.1" if nodes == 1 else socket.gethostname()
    store = None
    if rank == 0:
        store = dist.TCPStore(host, 0, size, True, limit, wait_for_workers=False)
    host, port = cg.allgather((host, store.port if store is not None else 0))[0]
    if store is None:
        store = dist.TCPStore(host, port, size, False, limit)
    gpu = device.type != "cpu"
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=limit,
        device_id=device if gpu else None,
    )


def leave() -> None:
    """End it, if it has been started."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_parts(shape: Shape, cut: Cut, placing: Placing, device: str) -> dict[int, Part]:
    """The stages of this rank."""
    return {stage: Part(shape, cut[stage], device) for stage in placing.mine(cg.rank())}


def make_run(
    name: str,
    parts: dict[int, Part],
    placing: Placing,
    shape: Shape,
    microbatches: int,
    device: torch.device,
) -> Callable[[Tensor, Tensor], Tensor | None]:
    """A step of a schedule of torch: forward and backward, and the mean loss on the last rank.

    The loss is divided by the number of microbatches, so that gradients need not be scaled again.
    """
    count = len(placing.ranks)
    stages = [_stage(part, index, count, shape, device) for index, part in parts.items()]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets) / microbatches

    of_one = placing.name == "line"
    schedule: Any = getattr(schedules, name)(
        stages[0] if of_one else stages, microbatches, loss_fn=loss_of, scale_grads=False
    )
    has_option = "return_outputs" in inspect.signature(schedule.step).parameters
    options = {"return_outputs": False} if has_option else {}

    def run(x: Tensor, y: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        arguments = (x,) if 0 in parts else ()
        if count - 1 not in parts:
            schedule.step(*arguments, **options)
            return None
        schedule.step(*arguments, target=y, losses=losses, **options)
        return torch.stack([loss.detach() for loss in losses]).sum()

    return run


def _stage(part: Part, index: int, count: int, shape: Shape, device: torch.device) -> Any:
    """A stage whose shapes are given, so that none have to be found out by running it."""
    hidden = torch.empty(1, shape.sequence, shape.width, dtype=torch.bfloat16, device="meta")
    tokens = torch.empty(1, shape.sequence, dtype=torch.int64, device="meta")
    logits = torch.empty(1, shape.sequence, shape.vocabulary, dtype=torch.bfloat16, device="meta")
    takes = tokens if index == 0 else hidden.clone().requires_grad_()
    gives = logits if index == count - 1 else hidden
    return pipelining.PipelineStage(
        part, index, count, device, input_args=(takes,), output_args=(gives.requires_grad_(),)
    )
