"""Check in every execution what opaque methods do, as they have no trace.

The state that a trace relies on is compared before each execution. An opaque method may change it
later. So the traced methods that follow, of the same actor or of an actor that shares state with
it, compare it again. Opaque methods must not write to their arguments, either: in plain Python,
other users of the tensor would see the write, but a compiled step may have sent them a copy.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...ir.ops import Call
from ...ir.ops.module import FunctionKind
from ...ir.types import TensorType
from ..graph.codegen.bodies import wrapped
from ..values.interface import Body, Guard
from ..values.specs import show_type
from .session.session import Session


def recheck(session: Session) -> None:
    """Let the functions of a step that follow an opaque call check the state that they rely on."""
    functions, vjps = session.module.functions, session.module.vjps
    shaken: set[str] = set()
    checked: set[str] = set()
    for op in session.module.program.ops:
        if not isinstance(op, Call):
            continue
        function = functions[op.fn.name]
        actor = function.actor
        if actor is None:
            continue
        if function.kind is FunctionKind.OPAQUE:
            shaken.update((actor, *(sharing_actor for sharing_actor, _ in function.shares.effects)))
            continue
        guard = session.guards.get(function.name)
        if guard is None or actor not in shaken:
            continue
        names = [function.name, *([vjps[op.vjp.name].forward] if op.vjp is not None else [])]
        for name in names:
            if name in session.bodies and name not in checked:
                checked.add(name)
                session.bodies[name] = wrapped(session.bodies[name], _checking(guard))


def watch_arguments(session: Session) -> None:
    """Let opaque functions check that they do not write to tensors that others use as well."""
    program = session.module.program
    uses = Counter(value for op in program.ops for value in set(op.operands))
    uses.update(program.params)  # the caller holds them
    watched: dict[str, set[int]] = {}
    for op in program.ops:
        if not isinstance(op, Call) or op.fn.name not in session.bodies:
            continue
        if session.module.functions[op.fn.name].kind is FunctionKind.OPAQUE:
            for index, value in enumerate(op.operands):
                if isinstance(value.type, TensorType) and uses[value] > 1:
                    watched.setdefault(op.fn.name, set()).add(index)
    for name, indices in watched.items():
        leaving = functools.partial(_leaving, indices=tuple(sorted(indices)), name=name)
        session.bodies[name] = wrapped(session.bodies[name], leaving)


def _leaving(body: Body, indices: Sequence[int], name: str) -> Body:
    """A body that raises a RuntimeError if it has written to an input at one of the indices.

    Version counters show most writes, but not those to `x.data` or `x.numpy()`. So the first
    executions compare copies instead.
    """
    comparisons_left = itertools.chain(range(_COMPARED, 0, -1), itertools.repeat(0))

    @functools.wraps(body)
    def run(*inputs: Any) -> Sequence[Any]:
        look = _version if next(comparisons_left) == 0 else _copy
        before = [look(inputs[index]) for index in indices]
        results = body(*inputs)
        for index, version in zip(indices, before, strict=True):
            tensor = inputs[index]
            if not _same(version, look(tensor)):
                raise RuntimeError(
                    f"the opaque method @{name} has written to a tensor that it was given, "
                    f"{show_type(tensor.dtype, tensor.shape)}, and which others use as well: they "
                    "may have a copy of it. Write to x.clone(), and return it"
                )
        return results

    return run


_COMPARED = 2
"""The number of executions that compare the elements of tensors."""


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _same(before: int | torch.Tensor, after: int | torch.Tensor) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return torch.equal(before, after)
    return bool(before == after)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _checking(guard: Guard) -> Callable[[Body], Body]:
    """A wrapper that lets a body raise a RuntimeError if the guard is broken when it is called."""

    def wrap(body: Body) -> Body:
        def run(*inputs: Any) -> Sequence[Any]:
            change = guard()
            if change is not None:
                raise RuntimeError(
                    f"{change.partition(';')[0]}: an opaque method has changed it in this "
                    "execution. Mark the method that reads it @cg.opaque as well, or keep what "
                    "changes in a buffer"
                )
            return body(*inputs)

        return run

    return wrap
