"""Random models and the steps that train them, compiled by cg or run by plain PyTorch.

The stages of a program are actors; plain PyTorch runs objects of the same class one after the
other, in a loop over the same microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_map

import cg

from .blocks import BLOCKS, LENGTH, VOCABULARY, WIDTH, Digits
from .model_losses import LOSSES, OPTIMIZERS, SCHEDULERS
from .model_programs import Program

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


def unpack(message: Any, form: str) -> Tensor:
    """The hidden values of what a stage is given."""
    if form == "tuple":
        return message[0] + 0.1 * message[1].unsqueeze(-1)  # type: ignore[no-any-return]
    if form == "dict":
        return message["h"] * torch.sigmoid(message["aux"])[..., None]  # type: ignore[no-any-return]
    if form == "dataclass":
        return message.h - message.aux[..., None]  # type: ignore[no-any-return]
    if form == "nested":
        return message[0][0] * message[1]["count"]  # type: ignore[no-any-return]
    if form == "surplus":
        return message[0]  # type: ignore[no-any-return]
    return message  # type: ignore[no-any-return]


@cg.actor
class Part(nn.Module):
    """A stage; the same class is the actor, and what plain PyTorch trains.

    Attributes:
        last_gradients: those by which it was last updated, by name.
    """

    def __init__(self, program: Program, index: int, owner: Part | None = None) -> None:
        super().__init__()
        torch.manual_seed(1000 * program.seed + index)
        spec = program.stages[index]
        is_last = index == len(program.stages) - 1
        self.loss_kind, self.variant = program.loss
        self.input_form = program.stages[index - 1].gives if index else "tensor"
        self.output_form = spec.gives
        self.update_every, self.keeps_zeros = program.update_every, program.keeps_zeros
        self.updates = 0
        if index == 0:
            self.entry = embed(program.embedding, program.is_tied)
        self.blocks = nn.ModuleList(BLOCKS[name](Digits(variant)) for name, variant in spec.blocks)
        if is_last:
            self.norm = nn.LayerNorm(WIDTH)
            self.head = None if program.is_tied else nn.Linear(WIDTH, VOCABULARY)
            self.register_buffer("weights", torch.linspace(0.5, 1.5, VOCABULARY))
            self.register_buffer("average", torch.zeros(WIDTH))
        self.dtype = program.dtype
        if spec.is_wide and program.dtype != torch.float64:
            self.dtype = torch.float32
        self.to(self.dtype)
        if owner is not None and self.dtype == owner.dtype:
            self.blocks = owner.blocks
        self.last_gradients: dict[str, Tensor | None] = {}
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
        return pack(self._run_blocks(self.entry(x), mask), self.output_form)

    def forward(self, message: Any, mask: Tensor) -> Any:
        return pack(self._run_blocks(unpack(message, self.input_form), mask), self.output_form)

    def join(self, message: Any, skip: Any, form: str, mask: Tensor) -> Any:
        h = unpack(message, self.input_form) + unpack(skip, form)
        return pack(self._run_blocks(h, mask), self.output_form)

    def repeat(self, message: Any, form: str, mask: Tensor) -> Tensor:
        return self._run_blocks(unpack(message, form), mask)

    def side_loss(self, message: Any) -> Tensor:
        return unpack(message, self.output_form).square().mean()

    def keep_average(self) -> None:
        with torch.no_grad():
            self.average.lerp_(self.norm.weight, 0.25)

    def _run_blocks(self, h: Tensor, mask: Tensor) -> Tensor:
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
        self.last_gradients = gradients_of(self)
        self.updates += 1
        if self.optimizer is None or self.updates % self.update_every:
            return
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.keeps_zeros)
        if self.scheduler is not None:
            self.scheduler.step()


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the gradients of parameters, by name."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
    }


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


def _unchanged(method: Any) -> Any:
    return method


def run_stages(
    program: Program,
    stages: Sequence[Any],
    x: Tensor,
    mask: Tensor,
    wrap: Callable[[Any], Any] = _unchanged,
) -> tuple[Tensor, Any]:
    """The stages, one after the other, in what a step and plain PyTorch have in common.

    Args:
        wrap: what is done to methods of stages that are computed again in the backward.

    Returns:
        Hidden values; and the loss of a stage's own values, or None.
    """
    first_message: Any = None
    message: Any = None
    side_loss = None
    for index, stage in enumerate(stages):
        spec = program.stages[index]
        name, arguments = _call_of(program, index, message, first_message, x, mask)
        method = wrap(getattr(stage, name)) if spec.is_remat else getattr(stage, name)
        message = method(**arguments) if program.by_name else method(*arguments.values())
        if spec.behind == "twice":  # the same weights on other values
            second = method(**arguments) if program.by_name else method(*arguments.values())
            message = tree_map(lambda a, b: a + 0.5 * b if _is_hidden(a) else a, message, second)
        message = tree_map(lambda leaf: edited(spec.behind, leaf, mask), message)  # noqa: B023
        first_message = message if index == 0 else first_message
        if program.side == index:
            side_loss = stage.side_loss(message)
    if program.repeats:
        return stages[0].repeat(message, program.stages[-1].gives, mask), side_loss
    return _hidden_of(message), side_loss


def _call_of(
    program: Program, index: int, message: Any, first_message: Any, x: Tensor, mask: Tensor
) -> tuple[str, dict[str, Any]]:
    """The method of a stage that a step calls, and the arguments by name."""
    if index == 0:
        return "enter", {"x": x, "mask": mask}
    if program.skips and index == len(program.stages) - 1:
        form = program.stages[0].gives
        return "join", {"message": message, "skip": first_message, "form": form, "mask": mask}
    return "forward", {"message": message, "mask": mask}


def edited(edit: str, leaf: Any, mask: Tensor) -> Any:
    """What a step does by torch's functions to a leaf of what a stage gives."""
    if not _is_hidden(leaf) or not leaf.is_floating_point():
        return leaf
    if edit == "scale":
        return 0.5 * leaf + leaf.sin()
    if edit == "detach":
        return leaf.detach()
    if edit == "center":
        return leaf - leaf.mean(-1, keepdim=True)
    if edit == "write":
        copy = leaf * 1.0
        copy[:, 0] = 0.25
        copy[..., 1:3] = leaf[..., :2]
        return copy
    if edit == "mask":
        return torch.where(mask[..., None], leaf, leaf.new_zeros(()))
    return leaf


def _hidden_of(message: Any) -> Tensor:
    return next(leaf for leaf in tree_flatten(message)[0] if _is_hidden(leaf))  # type: ignore[no-any-return]


def _is_hidden(leaf: Any) -> bool:
    return getattr(leaf, "ndim", 0) == 3


@dataclass(frozen=True)
class Functions:
    """What a training calls: functions of cg, or those of plain PyTorch."""

    microbatches: Callable[..., Any]
    mean: Callable[..., Tensor]
    backward: Callable[..., None]
    clip: Callable[..., Tensor]
    remat: Callable[..., Any]


def _chunks(tensors: tuple[Tensor, ...], count: int) -> Iterator[Any]:
    return zip(*(tensor.chunk(count) for tensor in tensors), strict=True)


def _backward(*losses: Tensor) -> None:
    sum(losses[1:], losses[0]).backward()  # type: ignore[no-untyped-call]


def _clip(stages: Sequence[Part], max_norm: float, norm_type: float) -> Tensor:
    """Torch's clipping; its norm has the type of all parameters, also where gradients lack."""
    parameters = {id(p): p for stage in stages for p in stage.parameters()}
    dtypes = [p.dtype for p in parameters.values() if p.requires_grad]
    norm = nn.utils.clip_grad_norm_(parameters.values(), max_norm, norm_type=norm_type)
    return norm.to(reduce(torch.promote_types, dtypes))


COMPILED = Functions(cg.microbatches, cg.mean, cg.backward, cg.clip_grad_norm, cg.remat)
PLAIN = Functions(_chunks, lambda losses: torch.stack(losses).mean(), _backward, _clip, _unchanged)


def train(
    program: Program, stages: Sequence[Any], functions: Functions, *data: Tensor
) -> dict[str, Any]:
    """A step; what it returns, by name."""
    x, mask, target = data
    updates_inside = program.loop == "updates"
    weight = stages[0].weight() if program.is_tied and not updates_inside else None
    label_count = (target != -100).sum() if program.is_counted else None
    losses, outputs, count = [], [], program.microbatches
    split = functions.microbatches if program.loop == "microbatches" else _chunks
    for microbatch in split((x, mask, target), count):
        if program.is_tied and updates_inside:
            weight = stages[0].weight()
        loss, h = _loss_of(program, stages, functions, weight, *microbatch)
        if label_count is not None:
            loss = loss / label_count
        if program.rising:
            loss = loss * (1 + len(losses))
        if program.ending == "inside" or updates_inside:
            functions.backward(loss / count)
        if updates_inside:
            for stage in stages:
                stage.update()
        losses.append(loss)
        outputs.append(h.detach() if functions is COMPILED else h.detach().clone())
    total = sum(losses[1:], losses[0]) if program.ending == "sum" else functions.mean(losses)
    if not updates_inside and program.ending != "inside":
        functions.backward(*((total, losses[0] * 0.5) if program.ending == "two" else (total,)))
    norm = None
    if program.clip is not None:
        norm = functions.clip(stages, 0.5, program.clip)
    for stage in stages:
        stage.update()
    if program.averages:
        stages[-1].keep_average()
    after = None
    if program.looks_again:
        with torch.no_grad():
            after, _ = run_stages(program, stages, x, mask)
    return {"loss": total.detach(), "outputs": outputs, "norm": norm, "after": after}


def _loss_of(
    program: Program,
    stages: Sequence[Any],
    functions: Functions,
    weight: Tensor | None,
    x: Tensor,
    mask: Tensor,
    target: Tensor,
) -> tuple[Tensor, Tensor]:
    """The loss of a microbatch, and its hidden values behind the last stage."""
    h, side_loss = run_stages(program, stages, x, mask, functions.remat)
    loss = stages[-1].score(h, target, weight)
    if side_loss is not None:
        loss = loss + 0.1 * side_loss
    if program.teaches:
        with torch.no_grad():
            teacher_h, _ = run_stages(program, stages, x, mask)
        loss = loss + (h - 0.5 * teacher_h).square().mean()
    return loss, h
