"""Data parallel and fully sharded training of Llama layers, against DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from llama_model import LLAMA, SMALL, Shape
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cg

from .bench import Bench, Run, close
from .block import Block

LAYERS, ROWS = 8, 2
"""Rows are those of each rank."""


class Stack(nn.Module):
    """Layers, and the mean of the squares of what comes out. x: [batch, sequence, width]."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape, device, dtype) for _ in range(shape.layers))

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.layer(x, block.cos, block.sin)
        return x.float().square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x)


cg.actor(Stack)


def replicas(bench: Bench) -> None:
    """Forward and backward with all reductions; gradients are dropped between steps."""
    wide = replace(LLAMA, layers=LAYERS, width=2048, heads=16, hidden=5632)
    shape = replace(SMALL, layers=2) if bench.is_small else wide
    dtype = torch.bfloat16 if bench.is_gpu else torch.float32
    generator = torch.Generator().manual_seed(1)
    size = (ROWS * cg.world_size(), shape.sequence, shape.width)
    x = torch.randn(*size, generator=generator).to(bench.device, dtype)
    for kind, rival in (("data parallel", "DDP"), ("fully sharded", "FSDP2")):
        theirs, step = _peer(bench, kind, shape, dtype, x)
        actor, compiled = _compiled(bench, kind, shape, dtype, x)
        tolerance = 0.05 if bench.is_gpu else 1e-4
        losses = cg.allgather(float(step()))
        close(compiled(x), torch.tensor(sum(losses) / len(losses)), tolerance, kind)
        if kind == "data parallel":
            name = "blocks.0.layer.down.weight"
            right = dict(theirs.module.named_parameters())[name].grad
            close(dict(actor.local.named_parameters())[name].grad, right, tolerance, name)
        arms: dict[str, Run] = {
            "cg": _dropping(partial(compiled, x), [actor.local]),
            rival: _dropping(step, [theirs]),
        }
        what = f"{kind}, {shape.layers} layers of width {shape.width}"
        bench.compare("replicas", what, arms, inner=3)
        compiled.close()


def _dropping(run: Run, modules: Sequence[nn.Module]) -> Run:
    def go() -> object:
        made = run()
        for module in modules:
            module.zero_grad()
        return made

    return go


def _compiled(
    bench: Bench, kind: str, shape: Shape, dtype: torch.dtype, x: Tensor
) -> tuple[Any, Any]:
    store = cg.cut(0, "dp") if kind == "fully sharded" else cg.whole
    plan = {"loss(x)": cg.cut(0, "dp")}
    place = cg.mesh(dp=cg.world_size())
    actor = Stack.on(place, plan=plan, store=store)(shape, bench.device, dtype)  # type: ignore[attr-defined]

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = actor.loss(x)
        cg.backward(loss)
        return loss

    return actor, step.lower(x).compile(fuse=bench.fuse)


def _peer(bench: Bench, kind: str, shape: Shape, dtype: torch.dtype, x: Tensor) -> tuple[Any, Run]:
    model: Any = Stack(shape, bench.device, dtype)
    if bench.compiles:
        for block in model.blocks:
            block.layer.compile()
    if kind == "fully sharded":
        for block in model.blocks:
            fully_shard(block.layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    own = x.chunk(cg.world_size())[cg.rank()].contiguous()

    def step() -> Tensor:
        loss: Tensor = model(own)
        loss.backward()
        return loss

    return model, step
