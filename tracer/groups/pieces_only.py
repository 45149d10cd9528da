"""Refuse work on pieces that would be other work on the whole: norms, and optimizers that use them.

An opaque method of an actor on a mesh runs on each rank with its pieces. An optimizer that works
element by element does there what it does to the whole tensors. A norm of a piece is not that of
the whole, and ranks would scale by different numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..functions.interface import Bodies, Body, RankBodies
from .group import GroupActor

_LOOKS = 3
"""In how many calls of an opaque method torch functions are looked at."""

_NORMS: frozenset[Any] = frozenset(
    {
        torch.norm,
        torch.Tensor.norm,
        torch.linalg.norm,
        torch.linalg.vector_norm,
        torch.linalg.matrix_norm,
        torch._foreach_norm,
    }
)

_NOT_ELEMENTWISE: tuple[type, ...] = (
    torch.optim.LBFGS,
    torch.optim.Adafactor,
    torch.optim.SparseAdam,
    *((torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()),
)


def refuse_optimizers(trainers: Iterable[object], actor: str) -> None:
    """Refuse optimizers that do not work element by element.

    Raises:
        ValueError: there is one.
    """
    for trainer in trainers:
        if isinstance(trainer, _NOT_ELEMENTWISE):
            raise ValueError(
                f"{actor} trains pieces of tensors by {type(trainer).__name__}, which looks at "
                "whole tensors; take an optimizer that works element by element, such as AdamW, "
                "or leave the tensors whole"
            )


def watching_norms(body: Bodies, actor: GroupActor, name: str) -> Bodies:
    """The body, for each rank that this process plays; it raises where it takes a piece's norm."""
    bodies = {}
    for rank in actor.instances:
        tensors = actor.tensors(rank)
        cut = [tensors[path] for path in actor.layouts if path in tensors]
        own = body.at(rank) if isinstance(body, RankBodies) else body
        bodies[rank] = _norms_refused(own, cut, name) if cut else own
    return RankBodies.of(bodies)


def _norms_refused(body: Body, tensors: Sequence[torch.Tensor], name: str) -> Body:
    """The body, which raises a RuntimeError where it takes the norm of one of these pieces."""
    looks = _LOOKS

    @functools.wraps(body)
    def run(*inputs: Any) -> Sequence[Any]:
        nonlocal looks
        if not looks:
            return body(*inputs)
        looks -= 1
        with _Watch(tensors, name):
            return body(*inputs)

    return run


class _Watch(TorchFunctionMode):
    def __init__(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        super().__init__()
        self._tensors = tensors
        self._name = name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _NORMS and not self._pieces().isdisjoint(map(id, tree_leaves((args, kwargs)))):
            raise RuntimeError(
                f"the opaque method @{self._name} takes the norm of a piece of a tensor that is "
                "cut over ranks, which is not the norm of the whole. Clip gradients in the step: "
                "cg.clip_grad_norm([actor], max_norm) before the update"
            )
        return func(*args, **(kwargs or {}))

    def _pieces(self) -> set[int]:
        grads = (tensor.grad for tensor in self._tensors)
        return {id(each) for each in (*self._tensors, *grads) if each is not None}
