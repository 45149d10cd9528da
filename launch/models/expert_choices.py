"""The choices of the routers in one forward of a mixture of experts, and limits to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from .capacity import expert_capacity
from .experts import StackedExperts


@dataclass(frozen=True)
class ExpertChoices:
    """The choices of routers in a forward: an entry for each layer that has experts, in order.

    Attributes:
        layers: the paths of the modules of experts, known before the forward.
        experts: how many the layer has.
        ids: integers `[tokens, choices]`.
        taken: bool `[tokens, choices]`, false for choices that are dropped.
        logits: `[tokens, experts]`, of the router; none of routers that transformers cannot record.
    """

    layers: tuple[str, ...] = ()
    experts: list[int] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)
    taken: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def counts(self) -> Tensor:
        """The choices of each expert, with those that are dropped: int64 `[layers, experts]`."""
        return torch.stack(list(map(_counts, self.ids, self.experts)))

    def dropped(self) -> Tensor:
        """The choices of each layer that are dropped: int64 `[layers]`."""
        return torch.stack([(~taken).sum() for taken in self.taken])


def _counts(ids: Tensor, experts: int) -> Tensor:
    return (ids.unsqueeze(-1) == torch.arange(experts, device=ids.device)).sum((0, 1))


@contextmanager
def expert_choices(model: nn.Module, capacity: float | None = None) -> Iterator[ExpertChoices]:
    """Note what the routers of a model of transformers choose in a forward inside the `with` block.

    In a method of an actor on a mesh, tensors are those of the whole batch, so counts are, too.

    ```python
    with cg.expert_choices(self.part, capacity=1.25) as choices:
        moving = self.part(moving, input_ids=ids)
    return moving, choices.counts(), choices.dropped()
    ```

    Args:
        model: a model, or a part of one, that runs once inside of the block.
        capacity: experts take so many choices as `expert_capacity` says; the shares of all others
            are zero. They are not shared out again. None: experts take all.

    Returns:
        The choices, complete when the model has run; empty if the model has no experts.

    Raises:
        ValueError: `capacity` is not positive, or layers are computed again in the backward, behind
            the block.
    """
    if capacity is not None:
        _refuse_checkpoints(model)
    modules = {n: m for n, m in model.named_modules() if _is_stacked(m)}
    record = ExpertChoices(tuple(modules))

    def before_experts(module: Any, args: tuple[Tensor, Tensor, Tensor]) -> Any:
        rows, ids, shares = args
        taken = torch.ones_like(ids, dtype=torch.bool)
        if capacity is not None:
            taken = expert_capacity(ids, module.num_experts, capacity)
            shares = shares * taken
        record.experts.append(module.num_experts)
        record.ids.append(ids)
        record.taken.append(taken)
        return rows, ids, shares

    with ExitStack() as stack:
        for experts in modules.values():
            stack.callback(experts.register_forward_pre_hook(before_experts).remove)
        for router, index in _routers(model):
            note = _Note(record.logits, index)
            stack.callback(router.register_forward_hook(note).remove)
        yield record


def _is_stacked(module: nn.Module) -> bool:
    # A protocol takes ten times as long as a look for one of its names, which few modules have.
    return hasattr(module, "num_experts") and isinstance(module, StackedExperts)


def _refuse_checkpoints(model: nn.Module) -> None:
    """Refuse layers that a backward computes again: behind the block, experts take all choices."""
    for name, module in model.named_modules():
        if module.training and vars(module).get("gradient_checkpointing"):
            raise ValueError(
                f"'{name}' is computed again in the backward (gradient_checkpointing), without the "
                "limits of cg.expert_choices(capacity=...); call gradient_checkpointing_disable(), "
                "and give the actor's method to cg.remat, which computes it all again"
            )


@dataclass(frozen=True)
class _Note:
    """A hook that notes one of a module's results."""

    results: list[Tensor]
    index: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.results.append(output[self.index])


class _RecordsOutputs(Protocol):
    """A model of transformers, which says where tensors are that it can record."""

    _can_record_outputs: Mapping[str, Any]


def _can_record(module: nn.Module) -> TypeGuard[_RecordsOutputs]:
    return hasattr(module, "_can_record_outputs")


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The routers whose logits transformers can record, and where their results have these."""
    recorders = {
        recorder.target_class: recorder.index
        for module in model.modules()
        if _can_record(module) and module._can_record_outputs
        for name, recorder in module._can_record_outputs.items()
        if name == "router_logits"
    }
    for module in model.modules():
        if type(module) in recorders:
            yield module, recorders[type(module)]
