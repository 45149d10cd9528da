"""Hooks on the gradients of parameters: those that a step runs, and those that it refuses.

A step runs the hooks of `register_post_accumulate_grad_hook`, since they look at `.grad`. All other
hooks look at what autograd is about to add to it, which a step never has in one piece: it adds up
microbatches, and sums over ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ...source import is_own_file
from .kinds import CONTAINERS, SCALARS, TRAINERS
from .reach import parts_of
from .snapshot import MISSING, read_cell
from .variables import closure_of, names_of

_MANY = 10_000
"""A container with more items is not walked."""


def post_accumulate_hooks(tensor: torch.Tensor) -> tuple[Callable[[torch.Tensor], Any], ...]:
    """The hooks that `register_post_accumulate_grad_hook` has put on a leaf, in torch's order."""
    return tuple((tensor._post_accumulate_grad_hooks or {}).values())


def has_refused_hooks(tensor: torch.Tensor) -> bool:
    """Whether autograd would run somebody's Python before it adds to the gradient of a leaf.

    Besides hooks of the tensor these are hooks of the node that adds up, for which torch has no
    public list: `p.expand_as(p).grad_fn.next_functions[0][0].register_hook(...)`.
    """
    if tensor._backward_hooks:
        return True
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    with torch.enable_grad(), torch._C.DisableTorchFunction():
        node = get_gradient_edge(tensor).node
    return _has_others(node.register_hook) or _has_others(node.register_prehook)


def _has_others(register: Callable[[Callable[..., Any]], RemovableHandle]) -> bool:
    """Whether a node has hooks of a kind: the handle of one more knows the others."""
    handle = register(_nothing)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks is not None and len(hooks) > 0


def _nothing(*_: Any) -> None:
    """A hook that is removed before it runs."""


def trainers_of(hooks: Iterable[Callable[..., Any]]) -> Iterator[Any]:
    """The optimizers, schedulers and the like that hooks refer to.

    The walk goes through variables of closures, defaults, arguments of partial functions,
    containers and attributes of objects, and through the names of modules that the user's functions
    read. It does not enter `nn.Module`s: what an actor's module holds, the actor holds.
    """
    seen: set[int] = set()
    waiting: list[Any] = list(hooks)
    while waiting:
        value = waiting.pop()
        if isinstance(value, (*SCALARS, torch.Tensor, torch.nn.Module, type)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, TRAINERS):
            yield value
            continue
        if isinstance(value, CONTAINERS) and len(value) > _MANY:
            continue
        waiting += parts_of(value)
        if isinstance(value, FunctionType) and is_own_file(value.__code__.co_filename):
            space = value.__globals__
            waiting += [space[name] for name in names_of(value.__code__) if name in space]


def copy_hooks(original: torch.Tensor, duplicate: torch.Tensor, memo: dict[int, Any]) -> None:
    """Put the hooks behind the sum of a leaf on its copy, for what has been copied with it.

    Args:
        original, duplicate: the leaf and its copy.
        memo: the memo of `deepcopy`, which knows the copies of all that the leaf's actor holds.
    """
    for hook in post_accumulate_hooks(original):
        copied_hook = _rebound(hook, memo)
        duplicate.register_post_accumulate_grad_hook(copied_hook)  # type: ignore[no-untyped-call]


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy that also goes through variables of closures, defaults and bound objects."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, MethodType):
        return MethodType(_rebound(value.__func__, memo), _rebound(value.__self__, memo))
    if isinstance(value, functools.partial):
        parts = (_rebound(part, memo) for part in (value.func, value.args, value.keywords))
        function, args, keywords = parts
        return functools.partial(function, *args, **keywords)
    if isinstance(value, FunctionType):
        return _rebound_function(value, memo)
    return value if isinstance(value, ModuleType) else copy.deepcopy(value, memo)


def _rebound_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    cells = tuple(CellType() for _ in function.__closure__ or ())
    code, space, name = function.__code__, function.__globals__, function.__name__
    duplicate = FunctionType(code, space, name, None, cells if cells else None)
    memo[id(function)] = duplicate  # it may refer to itself
    memo.setdefault(id(memo), []).append(function)  # ids in a memo are of objects that are alive
    for cell, (_, original) in zip(cells, closure_of(function), strict=True):
        content = read_cell(original)
        if content is not MISSING:
            cell.cell_contents = _rebound(content, memo)
    defaults, named = function.__defaults__, function.__kwdefaults__
    duplicate.__defaults__ = (
        None if defaults is None else tuple(_rebound(d, memo) for d in defaults)
    )
    duplicate.__kwdefaults__ = (
        None if named is None else {key: _rebound(d, memo) for key, d in named.items()}
    )
    duplicate.__dict__.update(function.__dict__)
    duplicate.__qualname__ = function.__qualname__
    return duplicate
