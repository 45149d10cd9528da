"""The stages of a model that draws tokens, and their graphs on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import cg

from .checks import check_chunks
from .defaults import HOSTS, balanced
from .draft import Draft
from .gated import GatedGraphs
from .model import PROMPT, Guards, Stage, ranges
from .parts import Model
from .pools import Pool
from .requests import How, Limits
from .settings import Options
from .variants import AnySize, DecodeSize, PrefillSize
from .work import SLOT, TOKEN


class StageGraphs(GatedGraphs[AnySize]):
    """The stages of a model, and their graphs; made on all ranks.

    Attributes:
        device: of this rank's stage.
        limits: with what the models' parts allow.

    Args:
        draft: that proposes tokens, if a model does.
    """

    def __init__(
        self, model: Model, limits: Limits, options: Options, draft: Model | None = None
    ) -> None:
        super().__init__(options)
        count = cg.world_size() // options.ways.ranks
        # Rank 0 decides: another rank may have an accelerator where this one has none.
        parts = cg.allgather(cut(model, count, options))[0]
        self.device = own_device()
        check_chunks(options.chunks, options.ways, self.device.type in HOSTS)
        pool = Pool(limits.blocks, options.block_size, options.kv_float8, options.cp)
        self.stages = [
            make_stage(model, layers, pool, limits.requests, options, stage, self.device)
            for stage, layers in enumerate(parts)
        ]
        # The draft lies on one rank, and its blocks are whole there.
        whole = Pool(limits.blocks, limits.block_size, options.kv_float8)
        self.draft = None if draft is None else make_draft(draft, whole, options, self.device)
        parts_here = (one.part for stage in self.stages for one in stage.instances.values())
        goes_on = all(cg.allgather(all(part.goes_on for part in parts_here)))
        self.limits = replace(limits, goes_on=goes_on)
        self._decode = decode_step(self.stages, limits, options.via)
        self._prefill = prefill_step(self.stages, self.draft, options.via)
        self._verify = verify_step(self.stages, self.draft, options.via)

    def lower(self, size: AnySize) -> list[cg.Lowered]:
        try:
            return self._lowered(size)
        except cg.LayoutError as error:
            if self._options.cp == 1:
                raise
            raise ValueError(
                f"--cp {self._options.cp} gives ranks some of the tokens of a chunk, and the "
                f"model's code cannot work on them alone, so leave it out: {error}"
            ) from error

    def _lowered(self, size: AnySize) -> list[cg.Lowered]:
        limits = self.limits
        if isinstance(size, DecodeSize):
            examples = [size.example(limits, group) for group in range(limits.groups)]
            return list(self._decode.lower_many(examples).apart())
        step = self._prefill if isinstance(size, PrefillSize) else self._verify
        return list(step.lower_many([size.example(limits)]).apart())


@cg.actor
class Probe(nn.Module):
    """Lies where the actors of its rank do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("here", torch.zeros(1))


def own_device() -> torch.device:
    """The device that this rank's actors lie on; collective."""
    probes = [Probe.on(rank)() for rank in range(cg.world_size())]
    device: torch.device = probes[cg.rank()].local.here.device
    return device


class Zeros:
    """Zeros for tensors that a stage has left on the meta device, in memory of the rank's device.

    An actor is made on the host, which has no room for the pools of a device. A host's pages are
    taken when they are first written to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def tensors(
        self, instance: object, wanted: Mapping[str, Tensor], actor: str
    ) -> Mapping[str, Zeros]:
        """This source, for each tensor.

        Raises:
            ValueError: a tensor without memory is of no pool and no record; zeros would be wrong.
        """
        others = [name for name in wanted if not name.startswith(("pool", "state", "records."))]
        if others:
            raise ValueError(f"{actor} has no weights for {', '.join(others)}")
        return dict.fromkeys(wanted, self)

    def read(self, region: Sequence[Sequence[tuple[int, int]]], dtype: torch.dtype) -> Tensor:
        """Zeros of the size of a region: runs of indices for each dimension."""
        shape = [sum(stop - start for start, stop in runs) for runs in region]
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self._device)
        pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(pages).view(dtype).view(shape)


def cut(model: Model, stages: int, options: Options) -> list[range]:
    """The layers of each stage: `Options.layers`, or a cut that balances decode steps.

    Raises:
        ValueError: there are fewer layers than stages, or `Options.layers` do not fit.
    """
    on_host = not torch.accelerator.is_available()
    sizes = options.layers or balanced(model, stages, options.dtype, on_host)
    return ranges(model.layers, stages, sizes)


def make_stage(
    model: Model,
    layers: range,
    pool: Pool,
    requests: int,
    options: Options,
    stage: int,
    device: torch.device,
) -> cg.ActorHandle:
    """A stage on its rank, or cut over its ranks; `device` is this rank's."""
    ways, guards = options.ways, Guards(options.clamp, options.debug_bounds)
    zeros = Zeros(device)
    if ways.ranks == 1:
        make = Stage.on(stage, init=zeros)
        return make(model, layers, pool, requests, options.dtype, guards=guards)
    ranks = range(stage * ways.ranks, (stage + 1) * ways.ranks)
    mesh = cg.mesh(ranks, cp=ways.cp, ep=ways.ep, tp=ways.tp)
    pools = {"pool*": cg.cut(1, "tp")}
    if ways.cp > 1:
        pools = {"pool*": cg.cut(0, "cp") & cg.cut(2, "tp"), "prefill(x)": cg.cut(1, "cp")}
    plan = cg.plan(pools) | model.plan(layers, "ep" if ways.ep > 1 else None)
    make = Stage.on(mesh, plan=plan, init=zeros)
    return make(model, layers, pool, requests, options.dtype, ways, guards=guards)


def make_draft(model: Model, pool: Pool, options: Options, device: torch.device) -> cg.ActorHandle:
    """The draft on the rank of the first stage, whose device it has; `device` is this rank's."""
    guards = Guards(options.clamp, options.debug_bounds)
    make = Draft.on(0, init=Zeros(device))
    return make(model, range(model.layers), pool, 0, options.dtype, guards=guards)


def decode_step(stages: Sequence[cg.ActorHandle], limits: Limits, via: str = "auto") -> cg.Step:
    """The step of decode batches; each group has a carry of its own."""
    zeros = torch.zeros(limits.slots + 1, dtype=torch.int64)
    carries = [cg.carry(zeros, on=0) for _ in range(limits.groups)]

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def decode(batch: Tensor, masks: Tensor | None, how: int, group: int) -> Any:
        carried = carries[group]
        tokens, slot = batch[:, TOKEN], batch[:, SLOT]
        x = torch.where(tokens < 0, carried.get(slot), tokens)
        for stage in stages:
            x = cg.via(stage.decode(x, batch, masks, how), via)
        carried.set(x[0] if how & How.SCORED else x, slot)
        return x

    return decode


def prefill_step(
    stages: Sequence[cg.ActorHandle], draft: cg.ActorHandle | None = None, via: str = "auto"
) -> cg.Step:
    """The step of chunks of prompts, which a draft reads as well."""

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def prefill(batch: Tensor, masks: Tensor | None, tokens: int, width: int, how: int) -> Any:
        x = batch[:, PROMPT : PROMPT + tokens]
        if draft is not None:  # for what it writes to its pools
            draft.prefill(x, batch, None, tokens, width, int(How.GREEDY))
        for stage in stages:
            x = cg.via(stage.prefill(x, batch, masks, tokens, width, how), via)
        return x

    return prefill


def verify_step(
    stages: Sequence[cg.ActorHandle], draft: cg.ActorHandle | None = None, via: str = "auto"
) -> cg.Step:
    """The step of rows with proposals; it gives the ids that were verified, and `Stage.verify`'s.

    The ids of a batch are the last known token of each row, and those that are proposed. If a draft
    proposes them, the first two are the last two known tokens instead.
    """

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def verify(batch: Tensor, tokens: int, how: int) -> Any:
        ids = batch[:, PROMPT : PROMPT + tokens]
        if draft is not None:
            known = ids[:, :2]
            ids = torch.cat([known[:, 1:], draft.propose(known, batch, tokens, how)], 1)
        x = ids
        for stage in stages:
            x = cg.via(stage.verify(x, batch, tokens, how), via)
        return (ids, *x) if how & How.SCORED else (ids, x)

    return verify
