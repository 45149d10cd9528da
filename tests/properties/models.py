"""Random models, trained by compiled steps and by plain PyTorch in one process.

A program is drawn from numbers alone: a model of blocks that users have, cut into stages; where the
stages are, and how they are laid out; what trains them. Plain PyTorch runs the same stages one
after the other, in a loop over the same microbatches. Losses, outputs, gradients, parameters and
buffers are compared after each step. What cg refuses by an error of its own counts as refused.

    python -m tests.properties.models 0 1000
"""

from __future__ import annotations

import gc
import random
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_map

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.values.plan import (
    Sharding,
)

from ..tracer.groups.training import cut_out, region_of
from .blocks import BLOCKS, LENGTH, VOCABULARY, WIDTH, Digits
from .recipes import Number

ANYWHERE = tuple(BLOCKS)
WRITERS = ("Running", "Counted")
"""Blocks that write to buffers; a group of ranks refuses them where they are trained."""
ON_MESHES = tuple(name for name in BLOCKS if name not in WRITERS)
MESSAGES = ("tensor", "tuple", "dict", "dataclass", "nested", "surplus")
"""What a stage gives to the next one."""
DTYPES = (torch.float64, torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-8, torch.float32: 5e-4, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Of what is as large as 1, or as the largest element."""
HOMES = {
    "interleaved": (0, 1, 0, 1),
    "looped-bfs": (0, 1, 0, 1),
    "zb-v": (0, 1, 1, 0),
    "dualpipe-v": (0, 1, 1, 0),
}
"""The place of each stage, under schedules that want several in certain places."""
GRIDS = ((2, 1), (1, 2), (2, 2), (3, 1))
BEHIND = ("scale", "detach", "center", "write", "twice", "mask")
"""What a step may do to what a stage gives."""
OPTIONAL = ("overlap", "cse", "dce", "fuse-accumulation")
"""Passes that may be switched off."""
REFUSALS = (cg.TraceError, cg.IRError, cg.ScheduleError)


@dataclass(frozen=True)
class Spec:
    """A stage.

    Attributes:
        blocks: their names and variants.
        gives: the form of what it gives to the next one.
        is_remat: whether its forward is computed again in the backward.
        is_wide: whether it is in float32 at least.
        behind: what the step does to what it gives.
    """

    blocks: tuple[tuple[str, int], ...]
    gives: str
    is_remat: bool
    is_wide: bool
    behind: str


@dataclass(frozen=True)
class Place:
    """Where stages are, and how they are laid out.

    Attributes:
        homes: for each stage the number of its rank or mesh.
        grid: sizes along dp and tp of a mesh; None for ranks.
        plan: `megatron`, `rows`, `whole` or `random`.
        cuts: numbers that choose what a random plan cuts.
        is_stored: whether parameters are cut along dp where they rest.
        keep: for how long they stay gathered.
        is_mixed: whether the last of several stages is on a rank, where others are on meshes.
    """

    homes: tuple[int, ...]
    grid: tuple[int, int] | None
    plan: str
    cuts: tuple[int, ...]
    is_stored: bool
    keep: str
    is_mixed: bool

    @property
    def world(self) -> int:
        size = 1 if self.grid is None else self.grid[0] * self.grid[1]
        return size * (max(self.homes) + 1)


@dataclass(frozen=True)
class Program:
    """A training.

    Attributes:
        seed: of weights and data.
        dtype: of the model.
        embedding: the variant of an embedding, or None for inputs that are real numbers.
        is_tied: whether the head is the embedding.
        stages, place: the model, and where it is.
        loss: the name of a loss, and its variant.
        ending: how losses become one backward, or several.
        skips: whether the last stage takes what the first one gives, too.
        repeats: whether the first stage is called once more at the end.
        microbatches, rows: how many, and of how many rows.
        schedule: its name.
        optimizer: its name.
        clip: the kind of norm by which gradients are clipped, or None.
        keeps_zeros: whether gradients are set to zero and not to None.
        update_every: in how many steps parameters are updated.
        steps: how many there are.
        infers: whether a step without gradients follows.
        evaluates: whether that is in evaluation mode.
        resizes: whether the last step has more rows, for which the step is compiled once more.
        inputs: the rank whose inputs count; None for all.
        by_name: whether methods are called with keywords.
        side: the stage whose values have a loss of their own, or None.
        rising: whether losses count more from microbatch to microbatch.
        passes: switches, as in `-overlap,-cse`.
        loop: over `microbatches`; or over `chunks`, which are nothing to a schedule; or with
            `updates` in each of them.
        teaches: whether values without gradients, of the same weights, have a part in the loss.
        is_counted: whether losses are divided by the number of labels of the whole batch.
        averages: whether a traced method keeps an average of weights, behind the update.
        looks_again: whether the step ends with outputs of the new weights.
        has_grads: whether there are gradients before the first step.
        shares: whether stages of one rank have the same blocks.
    """

    seed: int
    dtype: torch.dtype
    embedding: int | None
    is_tied: bool
    stages: tuple[Spec, ...]
    place: Place
    loss: tuple[str, int]
    ending: str
    skips: bool
    repeats: bool
    microbatches: int
    rows: int
    schedule: str
    optimizer: str
    clip: float | None
    keeps_zeros: bool
    update_every: int
    steps: int
    infers: bool
    evaluates: bool
    resizes: bool
    inputs: int | None
    by_name: bool
    side: int | None
    rising: bool
    passes: str
    loop: str
    teaches: bool
    is_counted: bool
    averages: bool
    looks_again: bool
    has_grads: bool
    shares: bool

    @property
    def tolerance(self) -> float:
        names = {name for spec in self.stages for name, _ in spec.blocks}
        found = TOLERANCE[self.dtype]
        return max(found, TOLERANCE[torch.bfloat16]) if "Autocast" in names else found


def draw_program(number: Number) -> Program:
    """A program, drawn from numbers."""

    def some(of: Sequence[Any]) -> Any:
        return of[number(0, len(of) - 1)]

    def coin(of: int = 2) -> bool:
        return number(1, of) == of

    kind = some(("rank", "pipeline", "pipeline", "mesh", "mesh"))
    schedule = some(cg.schedules.names()) if kind != "rank" and coin() else some(("gpipe", "1f1b"))
    grid = some(GRIDS) if kind == "mesh" else None
    if kind == "rank":
        homes: tuple[int, ...] = (0,) * number(1, 2)
    elif schedule in HOMES:
        homes = HOMES[schedule] if kind == "pipeline" else (0,) * number(1, 2)
        schedule = schedule if kind == "pipeline" else "1f1b"
    elif kind == "mesh":
        homes = tuple(range(number(1, 2)))
    elif schedule.startswith("zb") or coin():
        homes = tuple(range(some((2, 2, 3, 4))))
    else:
        homes = tuple(number(0, 2) for _ in range(number(2, 3)))
        homes = tuple(sorted(set(homes)).index(home) for home in homes)
    place = Place(
        homes=homes,
        grid=grid,
        plan=some(("megatron", "megatron", "rows", "whole", "random")),
        cuts=tuple(number(0, 999) for _ in range(number(1, 2))),
        is_stored=coin(3) and grid is not None and grid[0] > 1,
        keep=some(("task", "step")),
        is_mixed=grid is not None and len(homes) > 1 and coin(3),
    )
    names = ANYWHERE if grid is None or coin(12) else ON_MESHES
    most = 1 if len(homes) > 2 else 2
    drawn = [
        tuple((some(names), number(0, 10**6)) for _ in range(number(0 if at else 1, most)))
        for at in range(len(homes))
    ]
    behind = BEHIND if grid is None else BEHIND[:-1]
    stages = tuple(
        Spec(
            blocks=each,
            gives=some(MESSAGES),
            is_remat=coin(8) and not writes(each),
            is_wide=coin(4),
            behind=some(behind) if coin(3) else "nothing",
        )
        for each in drawn
    )
    embedding = number(0, 99) if coin() else None
    is_tied = embedding is not None and coin(3) and not writes(drawn[0])
    endings = ("mean", "mean", "sum", "two", "inside")[: 4 if is_tied else 5]
    is_basic = schedule in ("gpipe", "1f1b", "auto")
    return Program(
        seed=number(0, 999),
        dtype=some(DTYPES),
        embedding=embedding,
        is_tied=is_tied,
        stages=stages,
        place=place,
        loss=(some(tuple(LOSSES)), number(0, 999)),
        ending=some(endings),
        skips=len(homes) > 1 and coin(5),
        repeats=len(homes) > 1 and is_basic and coin(8),
        microbatches=number(1, 4) if kind != "pipeline" else some((2, 4)),
        rows=max(2, grid[0] if grid else 1) + number(0, 1),
        schedule=schedule,
        optimizer=some(tuple(OPTIMIZERS)),
        clip=some((2.0, 2.0, 1.0, float("inf"))) if coin(3) else None,
        keeps_zeros=coin(4),
        update_every=2 if coin(5) else 1,
        steps=some((2, 2, 3)),
        infers=coin(5),
        evaluates=coin(),
        resizes=coin(8),
        inputs=number(0, place.world - 1) if kind == "pipeline" and coin(5) else None,
        by_name=coin(4),
        side=number(0, len(homes) - 1) if grid is None and coin(5) else None,
        rising=coin(5),
        passes=",".join(f"-{name}" for name in OPTIONAL if coin(6)),
        loop=some(("chunks", "updates")) if is_basic and coin(5) else "microbatches",
        teaches=coin(8),
        is_counted=coin(6),
        averages=coin(6),
        looks_again=coin(8),
        has_grads=coin(8),
        shares=grid is None and coin(3),
    )


def writes(blocks: Sequence[tuple[str, int]]) -> bool:
    """True if some of these blocks may write to their actor's state."""
    return any(name in (*WRITERS, "Wrapped") for name, _ in blocks)


def program_of(seed: int) -> Program:
    """The program of a seed."""
    return draw_program(random.Random(seed).randint)


# What a stage gives to the next.


@dataclass
class Moving:
    """Hidden values, and something beside them."""

    h: Tensor
    aux: Tensor


torch.export.register_dataclass(Moving)


def pack(h: Tensor, form: str) -> Any:
    """Hidden values in the form in which a stage gives them."""
    aux = h.mean(-1)
    if form == "tuple":
        return h, aux
    if form == "dict":
        return {"aux": aux, "h": h}
    if form == "dataclass":
        return Moving(h, aux)
    if form == "nested":
        return [(h,), {"aux": aux, "none": None, "count": 3}]
    if form == "surplus":  # of which nothing but the first is used
        return h, {"unused": h.sin(), "indices": h.argmax(-1), "detached": h.detach()}
    return h


def unpack(given: Any, form: str) -> Tensor:
    """The hidden values of what a stage was given."""
    if form == "tuple":
        return given[0] + 0.1 * given[1].unsqueeze(-1)  # type: ignore[no-any-return]
    if form == "dict":
        return given["h"] * torch.sigmoid(given["aux"])[..., None]  # type: ignore[no-any-return]
    if form == "dataclass":
        return given.h - given.aux[..., None]  # type: ignore[no-any-return]
    if form == "nested":
        return given[0][0] * given[1]["count"]  # type: ignore[no-any-return]
    if form == "surplus":
        return given[0]  # type: ignore[no-any-return]
    return given  # type: ignore[no-any-return]


# Losses of logits [rows, LENGTH, VOCABULARY] and target int64 [rows, LENGTH], -100 where there is
# none in it.


def _wanted(logits: Tensor, target: Tensor) -> Tensor:
    return functional.one_hot(target.clamp(min=0), VOCABULARY).to(logits.dtype)


def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    digits = Digits(variant)
    smoothing = (0.0, 0.0, 0.1)[digits.take(3)]
    chosen = weight if digits.take(3) == 2 else None
    ignored, reduction = (-100, 0)[digits.take(4) == 3], ("mean", "mean", "sum")[digits.take(3)]
    if ignored == 0:
        target = target.clamp(min=0)
    inputs, labels = (logits.flatten(0, 1), target.flatten())
    if digits.take(3) == 2:
        inputs, labels = logits.transpose(1, 2), target
    return functional.cross_entropy(
        inputs,
        labels,
        chosen,
        ignore_index=ignored,
        label_smoothing=smoothing,
        reduction=reduction,
    )


def soft_labels(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    wanted = _wanted(logits, target) * 0.8 + 0.2 / VOCABULARY
    smoothing = (0.0, 0.1)[variant % 2]
    return functional.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(0, 1), label_smoothing=smoothing
    )


def nll(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    chosen = weight if variant % 2 else None
    return functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), target.flatten(), chosen)


def masked(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return loss.sum() / (target != -100).sum()


def mse(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    if variant % 3 == 2:
        there = (target != -100)[..., None]
        return ((logits - _wanted(logits, target)) ** 2 * there).sum() / there.sum()
    return functional.mse_loss(
        logits, _wanted(logits, target), reduction=("mean", "sum")[variant % 3]
    )


def bce(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    wanted = _wanted(logits, target)
    if variant % 3 == 0:
        return functional.binary_cross_entropy(logits.sigmoid(), wanted)
    chosen = weight if variant % 3 == 1 else None
    return functional.binary_cross_entropy_with_logits(logits, wanted, pos_weight=chosen)


def robust(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    wanted = _wanted(logits, target)
    kinds: tuple[Callable[..., Tensor], ...] = (
        functional.huber_loss,
        lambda x, y: functional.huber_loss(x, y, delta=0.5, reduction="sum"),
        lambda x, y: functional.smooth_l1_loss(x, y, beta=0.5),
        functional.l1_loss,
        lambda x, y: functional.soft_margin_loss(x, 2 * y - 1),
        lambda x, y: functional.multilabel_soft_margin_loss(x.flatten(0, 1), y.flatten(0, 1)),
    )
    return kinds[variant % len(kinds)](logits, wanted)


def divergence(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    wanted = (_wanted(logits, target) * 2).log_softmax(-1)
    given = logits.log_softmax(-1)
    if variant % 3 == 0:
        return functional.kl_div(given, wanted, reduction="batchmean", log_target=True)
    if variant % 3 == 1:
        return functional.kl_div(given, wanted.exp(), reduction="sum")
    return (given.exp() * given).sum(-1).mean()


def others(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    wanted, flat = _wanted(logits, target), logits.flatten(0, 1)
    kinds: tuple[Callable[[], Tensor], ...] = (
        lambda: ((logits - wanted).square() / (functional.softplus(logits) + 0.1)).mean(),
        lambda: functional.poisson_nll_loss(logits, wanted),
        lambda: functional.multi_margin_loss(flat, target.clamp(min=0).flatten()),
        lambda: functional.cosine_embedding_loss(
            flat, wanted.flatten(0, 1), torch.ones_like(flat[:, 0])
        ),
        lambda: functional.triplet_margin_loss(flat, wanted.flatten(0, 1), flat.flip(-1)),
        lambda: functional.hinge_embedding_loss(flat, 2 * wanted.flatten(0, 1) - 1),
        lambda: functional.margin_ranking_loss(
            flat[:, 0], flat[:, 1], torch.ones_like(flat[:, 0]), 0.1
        ),
        lambda: logits.logsumexp(-1).square().mean() + logits.std(-1).mean(),
        lambda: (
            logits.amax(-1) - logits.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        ).mean(),
    )
    return kinds[variant % len(kinds)]()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    function.__name__: function
    for function in (
        cross_entropy,
        soft_labels,
        nll,
        masked,
        mse,
        bce,
        robust,
        divergence,
        others,
    )
}


def _eps(parameters: list[nn.Parameter]) -> float:
    """Large where rounding would decide on the sign of an update."""
    return 1e-6 if parameters[0].dtype == torch.float64 else 1e-2


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=_eps(p)),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, eps=_eps(p), amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=max(1e-4, _eps(p))),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=max(1e-4, _eps(p))),
}

SCHEDULERS: tuple[Callable[[torch.optim.Optimizer], Any], ...] = (
    lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, 8),
    lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
)


@cg.actor
class Part(nn.Module):
    """A stage; the same class is the actor, and what plain PyTorch trains.

    Attributes:
        found: the gradients that the last update has found, by name.
    """

    def __init__(self, program: Program, at: int, other: Part | None = None) -> None:
        super().__init__()
        torch.manual_seed(1000 * program.seed + at)
        spec = program.stages[at]
        is_last = at == len(program.stages) - 1
        self.loss_kind, self.variant = program.loss
        self.takes, self.gives = (program.stages[at - 1].gives if at else "tensor"), spec.gives
        self.every, self.keeps_zeros = program.update_every, program.keeps_zeros
        self.calls = 0
        if at == 0:
            self.entry = embed(program.embedding, program.is_tied)
        self.blocks = nn.ModuleList(BLOCKS[name](Digits(v)) for name, v in spec.blocks)
        if is_last:
            self.norm = nn.LayerNorm(WIDTH)
            self.head = None if program.is_tied else nn.Linear(WIDTH, VOCABULARY)
            self.register_buffer("weights", torch.linspace(0.5, 1.5, VOCABULARY))
            self.register_buffer("average", torch.zeros(WIDTH))
        self.dtype = program.dtype
        if spec.is_wide and program.dtype != torch.float64:
            self.dtype = torch.float32
        self.to(self.dtype)
        if other is not None and self.dtype == other.dtype:
            self.blocks = other.blocks
        self.found: dict[str, Tensor | None] = {}
        trained = [p for p in self.parameters() if p.requires_grad]
        for parameter in trained if program.has_grads else ():
            parameter.grad = torch.full_like(parameter, 0.01)
        self.optimizer = OPTIMIZERS[program.optimizer](trained) if trained else None
        self.scheduler = None
        if self.optimizer is not None and program.seed % 3:
            self.scheduler = SCHEDULERS[program.seed % 3](self.optimizer)

    def weight(self) -> Tensor:
        return self.entry.weight  # type: ignore[no-any-return]

    def enter(self, x: Tensor, mask: Tensor) -> Any:
        x = x.to(self.dtype) if x.is_floating_point() else x
        return pack(self._through(self.entry(x), mask), self.gives)

    def forward(self, given: Any, mask: Tensor) -> Any:
        return pack(self._through(unpack(given, self.takes), mask), self.gives)

    def join(self, given: Any, skip: Any, form: str, mask: Tensor) -> Any:
        h = unpack(given, self.takes) + unpack(skip, form)
        return pack(self._through(h, mask), self.gives)

    def again(self, given: Any, form: str, mask: Tensor) -> Tensor:
        return self._through(unpack(given, form), mask)

    def side(self, given: Any) -> Tensor:
        return unpack(given, self.gives).square().mean()

    def keep(self) -> None:
        with torch.no_grad():
            self.average.lerp_(self.norm.weight, 0.25)

    def _through(self, h: Tensor, mask: Tensor) -> Tensor:
        h = h.to(self.dtype)
        for block in self.blocks:
            h = block(h, mask)
        return h

    def score(self, h: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        h = self.norm(h.to(self.dtype))
        logits = self.head(h) if weight is None else functional.linear(h, weight.to(h.dtype))
        return LOSSES[self.loss_kind](logits, target, self.weights, self.variant)

    @cg.opaque  # also where it has no optimizer, as nothing is trained
    def update(self) -> None:
        self.found = {
            n: None if p.grad is None else p.grad.clone() for n, p in self.named_parameters()
        }
        self.calls += 1
        if self.optimizer is None or self.calls % self.every:
            return
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.keeps_zeros)
        if self.scheduler is not None:
            self.scheduler.step()


def embed(variant: int | None, is_tied: bool) -> nn.Module:
    """What takes the inputs of the model."""
    if variant is None:
        return nn.Linear(WIDTH, WIDTH)
    digits = Digits(variant)
    return nn.Embedding(
        VOCABULARY,
        WIDTH,
        padding_idx=(None, None, 0)[digits.take(3)],
        scale_grad_by_freq=digits.take(3) == 2,
        max_norm=1.0 if digits.take(10) == 9 and not is_tied else None,  # which writes to it
    )


def batch(program: Program, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, a mask of bool, and labels, of which some are missing."""
    generator = torch.Generator().manual_seed(7919 * program.seed + step)
    is_larger = program.resizes and step == program.steps - 1
    rows = (program.rows + is_larger) * program.microbatches
    shape = (rows, LENGTH)
    if program.embedding is None:
        x = torch.randn((*shape, WIDTH), generator=generator, dtype=torch.float64)
        x = x.to(program.dtype)
    else:
        x = torch.randint(VOCABULARY, shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[:, 0] = mask[:, -1] = True
    target = torch.randint(VOCABULARY, shape, generator=generator)
    target[:, 1][torch.rand(rows, generator=generator) < 0.5] = -100
    return x, mask, target


def through(
    program: Program, stages: Sequence[Any], x: Tensor, mask: Tensor, wrap: Any
) -> tuple[Tensor, Any]:
    """The stages, one after the other, in what a step and plain PyTorch have in common.

    Returns:
        Hidden values; and the loss of a stage's own values, or None.
    """
    first: Any = None
    given: Any = None
    side = None
    for at, stage in enumerate(stages):
        is_joint = program.skips and at == len(stages) - 1
        if at == 0:
            arguments = {"x": x, "mask": mask}
        elif is_joint:
            arguments = {"given": given, "skip": first, "form": program.stages[0].gives}
            arguments["mask"] = mask
        else:
            arguments = {"given": given, "mask": mask}
        method = getattr(stage, "enter" if at == 0 else "join" if is_joint else "forward")
        method = wrap(method) if program.stages[at].is_remat else method
        given = method(**arguments) if program.by_name else method(*arguments.values())
        if program.stages[at].behind == "twice":  # the same weights on other values
            other = method(**arguments) if program.by_name else method(*arguments.values())
            given = tree_map(lambda a, b: a + 0.5 * b if _is_hidden(a) else a, given, other)
        given = tree_map(lambda leaf: behind(program.stages[at].behind, leaf, mask), given)  # noqa: B023
        first = given if at == 0 else first
        if program.side == at:
            side = stage.side(given)
    if program.repeats:
        return stages[0].again(given, program.stages[-1].gives, mask), side
    return _first(given), side


def behind(what: str, leaf: Any, mask: Tensor) -> Any:
    """What a step does by torch's functions to a leaf of what a stage gives."""
    if not _is_hidden(leaf) or not leaf.is_floating_point():
        return leaf
    if what == "scale":
        return 0.5 * leaf + leaf.sin()
    if what == "detach":
        return leaf.detach()
    if what == "center":
        return leaf - leaf.mean(-1, keepdim=True)
    if what == "write":
        fresh = leaf * 1.0
        fresh[:, 0] = 0.25
        fresh[..., 1:3] = leaf[..., :2]
        return fresh
    if what == "mask":
        return torch.where(mask[..., None], leaf, leaf.new_zeros(()))
    return leaf


def _first(given: Any) -> Tensor:
    return next(leaf for leaf in tree_flatten(given)[0] if _is_hidden(leaf))  # type: ignore[no-any-return]


def _is_hidden(leaf: Any) -> bool:
    return getattr(leaf, "ndim", 0) == 3


@dataclass(frozen=True)
class Way:
    """The functions that a training calls: cg's, or plain PyTorch's."""

    microbatches: Callable[..., Any]
    mean: Callable[..., Tensor]
    backward: Callable[..., None]
    clip: Callable[..., Tensor]
    remat: Callable[..., Any]


def _chunks(trees: tuple[Tensor, ...], count: int) -> Iterator[Any]:
    return zip(*(tree.chunk(count) for tree in trees), strict=True)


def _backward(*losses: Tensor) -> None:
    sum(losses[1:], losses[0]).backward()  # type: ignore[no-untyped-call]


def _clip(stages: Sequence[Part], most: float, norm_type: float) -> Tensor:
    """Torch's clipping; its norm has the type of all parameters, also where gradients lack."""
    parameters = {id(p): p for stage in stages for p in stage.parameters()}
    dtypes = [p.dtype for p in parameters.values() if p.requires_grad]
    norm = nn.utils.clip_grad_norm_(parameters.values(), most, norm_type=norm_type)
    return norm.to(reduce(torch.promote_types, dtypes))


def _alone(method: Any) -> Any:
    return method


COMPILED = Way(cg.microbatches, cg.mean, cg.backward, cg.clip_grad_norm, cg.remat)
PLAIN = Way(_chunks, lambda losses: torch.stack(losses).mean(), _backward, _clip, _alone)


def train(program: Program, stages: Sequence[Any], way: Way, *data: Tensor) -> Any:
    """A step."""
    x, mask, target = data
    weight = stages[0].weight() if program.is_tied and program.loop != "updates" else None
    labels = (target != -100).sum() if program.is_counted else None
    losses, outputs, count = [], [], program.microbatches
    parts = way.microbatches if program.loop == "microbatches" else _chunks
    for mx, mm, mt in parts((x, mask, target), count):
        if program.is_tied and program.loop == "updates":
            weight = stages[0].weight()
        h, side = through(program, stages, mx, mm, way.remat)
        loss = stages[-1].score(h, mt, weight)
        if side is not None:
            loss = loss + 0.1 * side
        if program.teaches:
            with torch.no_grad():
                taught, _ = through(program, stages, mx, mm, _alone)
            loss = loss + (h - 0.5 * taught).square().mean()
        if labels is not None:
            loss = loss / labels
        if program.rising:
            loss = loss * (1 + len(losses))
        if program.ending == "inside" or program.loop == "updates":
            way.backward(loss / count)
        if program.loop == "updates":
            for stage in stages:
                stage.update()
        losses.append(loss)
        outputs.append(h.detach() if way is COMPILED else h.detach().clone())
    total = sum(losses[1:], losses[0]) if program.ending == "sum" else way.mean(losses)
    if program.loop != "updates" and program.ending != "inside":
        way.backward(*((total, losses[0] * 0.5) if program.ending == "two" else (total,)))
    norm = None
    if program.clip is not None:
        norm = way.clip(stages, 0.5, program.clip)
    for stage in stages:
        stage.update()
    if program.averages:
        stages[-1].keep()
    after = None
    if program.looks_again:
        with torch.no_grad():
            after, _ = through(program, stages, x, mask, _alone)
    return {"loss": total.detach(), "outputs": outputs, "norm": norm, "after": after}


def place_stages(program: Program) -> list[Any]:
    """The actors, as users make them."""
    stages: list[Any] = []
    for at, home in enumerate(program.place.homes):
        if program.place.grid is not None:
            stages.append(_on_mesh(program, at, home))
            continue
        other = _sharing(program, at)
        shared = None if other is None else stages[other].local
        stages.append(Part.on(home)(program, at, shared))  # type: ignore[attr-defined]
    return stages


def _sharing(program: Program, at: int) -> int | None:
    """The stage whose blocks a stage has: the first one of its rank."""
    first = program.place.homes.index(program.place.homes[at])
    return first if program.shares and first < at else None


def _on_mesh(program: Program, at: int, home: int) -> Any:
    place = program.place
    assert place.grid is not None
    dp, tp = place.grid
    if place.is_mixed and at == len(place.homes) - 1:
        return Part.on(home * dp * tp)(program, at)  # type: ignore[attr-defined]
    mesh = cg.mesh(range(home * dp * tp, (home + 1) * dp * tp), dp=dp, tp=tp)
    store = cg.cut(0, "dp") if place.is_stored else cg.whole
    return Part.on(mesh, plan=plan_of(program, at), store=store)(program, at)  # type: ignore[attr-defined]


def plain_stages(program: Program) -> list[Part]:
    """The same stages in one process."""
    stages: list[Part] = []
    for at in range(len(program.stages)):
        other = _sharing(program, at)
        stages.append(Part(program, at, None if other is None else stages[other]))
    return stages


def plan_of(program: Program, at: int) -> dict[str, Sharding]:
    """The plan of a stage on a mesh."""
    place, spec = program.place, program.stages[at]
    rows = cg.whole if place.plan == "whole" else cg.cut(0, "dp")
    given = "enter(x)|enter(mask)|forward(given)|forward(mask)|join(given)|join(skip)|join(mask)"
    plan: dict[str, Sharding] = {f"{given}|again(given)|again(mask)|score(h)|score(target)": rows}
    vocabulary = cg.cut(0, "tp") if place.plan == "megatron" else cg.whole
    plan["score(weight)"] = vocabulary
    if place.plan == "megatron":
        for number, (name, _) in enumerate(spec.blocks):
            for keys, sharding in BLOCKS[name].cuts.items():
                paths = (f"blocks.{number}.{key}" for key in keys.split("|"))
                plan["|".join(paths)] = sharding
        if at == 0 and program.embedding is not None:
            plan["entry.weight"] = vocabulary
        if at == len(program.stages) - 1 and not program.is_tied:
            plan["head.*"] = vocabulary
    elif place.plan == "random":
        tensors = dict(Part(program, at).named_parameters())
        for number in place.cuts:
            digits = Digits(number)
            path = sorted(tensors)[digits.take(len(tensors))]
            if tensors[path].ndim:
                axis = "tp" if place.is_stored else ("tp", "dp")[digits.take(2)]
                cut = cg.cut(digits.take(tensors[path].ndim), axis)
                plan.setdefault(path, cut)
    return plan


@dataclass(frozen=True)
class Held:
    """What a plain stage has after a step, by name."""

    found: Mapping[str, Tensor | None]
    grads: Mapping[str, Tensor | None]
    tensors: Mapping[str, Tensor]

    @staticmethod
    def of(part: Part) -> Held:
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in part.named_parameters()}
        named = (*part.named_parameters(), *part.named_buffers())
        return Held(part.found, grads, {name: t.detach().clone() for name, t in named})


@dataclass(frozen=True)
class Moment:
    """What plain PyTorch gave in a step, and has after it."""

    outputs: Any
    stages: Sequence[Held]


class Difference(AssertionError):
    """A compiled program and plain PyTorch differ."""


def train_plain(program: Program) -> tuple[list[Moment], Any]:
    """All steps in plain PyTorch; and what a last one without gradients gives."""
    stages = plain_stages(program)
    moments = []
    for step in range(program.steps):
        outputs = train(program, stages, PLAIN, *batch(program, step))
        moments.append(Moment(outputs, [Held.of(stage) for stage in stages]))
    if program.evaluates:
        for stage in stages:
            stage.eval()
    with torch.no_grad():
        x, mask, _ = batch(program, program.steps)
        return moments, through(program, stages, x, mask, _alone)[0]


def check(program: Program) -> str:
    """Compare a program with plain PyTorch; return `equal`, or why it was not compared.

    Raises:
        Difference: they differ.
    """
    try:
        moments, last = train_plain(program)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"not run: plain PyTorch: {str(error).splitlines()[0][:80]}"
    if not all(bool(moment.outputs["loss"].isfinite()) for moment in moments):
        return "not run: not finite"
    with use_world(VirtualWorld(program.place.world)):
        try:
            stages = place_stages(program)
            compiled = compile_step(program, stages, 0)
        except Exception as error:
            return f"refused: {refusal(error)}"
        for step, moment in enumerate(moments):
            if program.resizes and step == program.steps - 1:
                compiled = compile_step(program, stages, step)
            compare_step(program, stages, compiled(*batch(program, step)), moment, step)
        if program.infers:
            compare_inference(program, stages, last)
    return "equal"


def compile_step(program: Program, stages: Sequence[Any], step: int) -> cg.Compiled:
    """Compile for the batch of a step."""
    place = program.place
    inputs = None if program.inputs is None else cg.on(program.inputs)

    @cg.trace(inputs=inputs)
    def traced(x: Tensor, mask: Tensor, target: Tensor) -> Any:
        return train(program, stages, COMPILED, x, mask, target)

    lowered = traced.lower(*batch(program, step))
    return lowered.compile(
        schedule=cg.schedules.by_name(program.schedule),
        fsdp=cg.fsdp(keep=place.keep) if place.is_stored else None,
        passes=program.passes,
    )


def refusal(error: Exception) -> str:
    """The reason of an error of cg's own, without what differs from program to program; else
    raises the error."""
    if not isinstance(error, REFUSALS):
        raise error
    text = re.sub(r"\d+", "N", str(error).splitlines()[0])
    return f"{type(error).__name__}: {text[:160]}"


def compare_inference(program: Program, stages: Sequence[Any], wanted: Any) -> None:
    """A step without gradients, after the training."""

    @cg.trace
    def infer(x: Tensor, mask: Tensor) -> Any:
        with torch.no_grad():
            return through(program, stages, x, mask, _alone)[0]

    if program.evaluates:
        for stage in stages:
            for _, part, _ in instances(stage):
                part.eval()
    x, mask, _ = batch(program, program.steps)
    hold("the inference", wanted, infer(x, mask), program.tolerance)


def compare_step(
    program: Program, stages: Sequence[Any], outputs: Any, moment: Moment, step: int
) -> None:
    """Hold what a step gave and left against plain PyTorch."""
    tolerance = program.tolerance
    found_by_all = [g for held in moment.stages for g in held.found.values() if g is not None]
    # Sums that cancel leave rounding of what they are made of, as the gradient of keys' biases.
    steepest = max((float(g.abs().max()) for g in found_by_all if g.numel()), default=1.0)
    least = {"found": steepest, "grads": steepest, "tensors": 0.05 * steepest}
    for name, expected in moment.outputs.items():
        # Updated weights differ by rounding, and a norm may enlarge what comes of it.
        is_updated = step > 0 or name == "after"
        enlarged = 4 * tolerance if is_updated else tolerance
        pairs = zip(tree_flatten(expected)[0], tree_flatten(outputs[name])[0], strict=True)
        for number, pair in enumerate(pairs):
            hold(f"step {step}: {name} {number}", *pair, enlarged)
    for stage, held in zip(stages, moment.stages, strict=True):
        for rank, part, cut in instances(stage):
            what = f"step {step}: {stage.name} on rank {rank}"
            mine = Held.of(part)
            for kind in ("found", "grads", "tensors"):
                one, two = getattr(held, kind), getattr(mine, kind)
                if one.keys() != two.keys():
                    raise Difference(f"{what}: {kind} of {two.keys()}, not of {one.keys()}")
                for name in one:
                    pair = cut(name, one[name]), two[name]
                    hold(f"{what}: {kind} {name}", *pair, tolerance, least[kind])


def instances(stage: Any) -> Iterator[tuple[int, Part, Callable[[str, Any], Any]]]:
    """Ranks of a stage, their objects, and how to cut whole tensors like theirs."""
    if stage._group is None:
        yield stage.rank, stage.local, lambda name, tensor: tensor
        return
    for rank, part in stage.instances.items():

        def cut(name: str, tensor: Any, rank: int = rank) -> Any:
            return None if tensor is None else cut_out(tensor, region_of(stage, name, rank))

        yield rank, part, cut


def hold(what: str, wanted: Any, found: Any, tolerance: float, least: float = 1.0) -> None:
    """Raise if two tensors differ by more than rounding, or one is None.

    Args:
        what: names them in the error.
        wanted, found: of plain PyTorch and of the compiled program.
        tolerance: of their largest element.
        least: what counts as the largest if all are smaller; 1 at least.
    """
    if (wanted is None) != (found is None):
        raise Difference(f"{what} is {found}, and in plain PyTorch {wanted}")
    if wanted is None:
        return
    wanted, found = wanted.detach(), found.detach()
    if wanted.dtype != found.dtype or wanted.shape != found.shape:
        kinds = f"{found.dtype} {list(found.shape)}, not {wanted.dtype} {list(wanted.shape)}"
        raise Difference(f"{what} is {kinds}")
    one, two = wanted.double(), found.double()
    finite = one[one.isfinite()]
    largest = max(1.0, least, float(finite.abs().max()) if finite.numel() else 1.0)
    if not torch.allclose(two, one, rtol=0, atol=tolerance * largest, equal_nan=True):
        worst = float((one - two).abs().max())
        raise Difference(f"{what} differs by {worst:.3g}, of {largest:.3g}: {found} not {wanted}")


@contextmanager
def quiet() -> Iterator[None]:
    """One thread, and no warnings of torch's about what blocks do on purpose."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def main(first: int, last: int) -> int:
    """Check the programs of seeds; print findings, and how many there were of each result."""
    tally: Counter[str] = Counter()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)  # traces make cycles by the million
    with quiet():
        for seed in range(first, last):
            try:
                result = check(program_of(seed))
            except Exception as error:
                result = "FINDING"
                print(f"seed {seed}: {type(error).__name__}: {str(error)[:600]}", flush=True)
                if not isinstance(error, Difference):
                    traceback.print_exc(limit=-6)
            tally[result] += 1
            if result.startswith("refused"):
                print(f"seed {seed}: {result}", flush=True)
    for result, count in tally.most_common():
        print(f"{count:5} {result}")
    return tally["FINDING"]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
